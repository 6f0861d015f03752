"""The page on serving says what the results say."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_table_of_negative_controls_is_the_one_measured():
    rows = json.loads((ROOT / "benchmarks" / "results" / "negative-controls.json").read_text())["rows"]
    page = (ROOT / "docs" / "serving.md").read_text()
    for row in rows:
        assert f"| {row['control']} | {row['by'] or 'nothing: it passes'} |" in page
    assert [row["caught"] for row in rows] == [False] + [True] * (len(rows) - 1)
