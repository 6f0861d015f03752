"""The file that `regenerate` appends to: one conversation a line, written whole, known by its id."""

from __future__ import annotations

import json
import os
from pathlib import Path

from draftsmith.data.prompts import content_id
from draftsmith.errors import DataError


def recover(output: Path) -> dict[str, str]:
    """Ids in the output, each with the content id of the prompt it answers. Cuts off a last line torn by a kill."""
    done: dict[str, str] = {}
    if not output.exists():
        return done
    whole = 0  # bytes up to the end of the last whole line
    with output.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            try:
                row = json.loads(line)
                done[row["id"]] = row.get("asked") or content_id(row["messages"][:-1])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(
                    f"{output}, line {number}: not a conversation written by regenerate ({error!r}). "
                    "Repair or remove the line, or choose another output."
                ) from error
    if whole < output.stat().st_size:
        os.truncate(output, whole)
    return done


def row_bytes(row: dict) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
