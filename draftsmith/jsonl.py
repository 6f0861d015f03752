"""Lines of JSON that are appended to while a run goes on, and cut back when it is continued."""

from __future__ import annotations

import json


def is_line_until(line: bytes, step: int) -> bool:
    """Whether this is a whole line of a step's record, of `step` or an earlier one."""
    if not line.endswith(b"\n"):
        return False
    try:
        row = json.loads(line)
    except ValueError:
        return False
    return isinstance(row, dict) and type(row.get("step")) is int and row["step"] <= step
