"""The page on serving says what the results say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_table_of_negative_controls_is_the_one_measured():
    rows = json.loads((ROOT / "benchmarks" / "results" / "negative-controls.json").read_text())["rows"]
    page = (ROOT / "docs" / "serving.md").read_text()
    for row in rows:
        assert f"| {row['control']} | {row['by'] or 'nothing: it passes'} |" in page
    assert [row["caught"] for row in rows] == [False] + [True] * (len(rows) - 1)


@pytest.mark.parametrize("page", ["docs/targets.md", "SECURITY.md"])
def test_tables_name_tests_that_exist(page):
    named = re.findall(r"`(\S+\.py)::(test_\w+)`", (ROOT / page).read_text())
    assert len(named) >= 3
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"
