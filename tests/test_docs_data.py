"""The page on data: its commands parse, its rows are rows, and the table of faults names tests that exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from draftsmith.cli import VERBS, _leading, parse
from draftsmith.data.forms import asked_messages, choose_form, read_row

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
COMMANDS = [
    found.replace("\\\n", " ").removeprefix("$ ").strip()
    for found in re.findall(r"^(?:\$ |    )draftsmith (?:.*\\\n)*.*$", PAGE, re.MULTILINE)
]


def test_commands_are_found():
    assert len(COMMANDS) >= 10 and sum("s3://" in command for command in COMMANDS) >= 2


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command):
    _, verb, *words = shlex.split(command)
    options, _, leading = VERBS[verb]
    named, flags = _leading(verb, leading, words)
    assert set(named.values()) <= {"RECIPE"}
    parsed = parse(options, flags, verb)
    assert isinstance(parsed, options)


ROWS = re.findall(r"```\{code-block\} json\n:caption: (\S+)\n(.*?)```", PAGE, re.DOTALL)


def test_rows_are_what_the_page_says():
    forms = {}
    for name, text in ROWS:
        rows = [json.loads(line) for line in text.splitlines()]
        if name == "prompts.jsonl":
            for row in rows:
                assert asked_messages(row, answered=False)[-1]["role"] == "user"
            continue
        forms[name] = choose_form("auto", (), rows[0])
        for number, row in enumerate(rows, 1):
            read_row(row, number, forms[name])
        assert f"{name}: rows of the form {forms[name]}, as the first row shows" in PAGE
    assert set(forms) == {"agents.jsonl", "tokens.jsonl"}


def test_the_table_of_faults_names_tests_that_exist():
    named = re.findall(r"`(\S+\.py)::(test_\w+)`", (ROOT / "docs" / "field-faults.md").read_text(encoding="utf-8"))
    assert len(named) > 30
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{test}"
