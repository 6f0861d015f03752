"""Evaluations as files: intervals by hand, and samples from which the figures can be computed again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftsmith.cli import main
from draftsmith.config import to_toml
from draftsmith.export.folder import measure
from draftsmith.results import bootstrap, intervals, wilson
from draftsmith.telemetry import Console
from draftsmith.train import train
from tests.conftest import with_options
from tests.test_evaluate import ANSWERS, CASES, _summarise


def test_wilson_by_hand():
    low, high = wilson(8, 10)
    assert low == pytest.approx(0.4902, abs=1e-3) and high == pytest.approx(0.9433, abs=1e-3)
    assert wilson(0, 0) is None and wilson(0, 5)[0] == 0.0 and wilson(5, 5)[1] == 1.0


def test_bootstrap_holds_the_mean_and_is_the_same_every_time():
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    low, high = bootstrap(values)
    assert 1.5 < low < 3 < high < 4.5 and bootstrap(values) == (low, high)
    assert bootstrap([2.0]) is None and bootstrap([2.0, 2.0]) == (2.0, 2.0)


def test_intervals_count_what_they_are_over():
    report = intervals(CASES, _summarise(CASES, ANSWERS, 4, 1.0), 4)
    assert report["accept_length"]["value"] == 2.25 and report["accept_length"]["count"] == 2
    assert report["by_tag"]["y"] == {"value": 2.0, "interval": None, "count": 1}
    assert [slot["count"] for slot in report["by_slot"]] == [3, 3, 2]
    assert [slot["value"] for slot in report["by_slot"]] == [2 / 3, 2 / 3, 1 / 2]


def test_an_evaluation_can_be_scored_again(recipe, tmp_path, capsys):
    import io

    train(with_options(recipe, "optim", steps=6), Console(io.StringIO()))
    capsys.readouterr()
    main(["evaluate", recipe.run])
    said = capsys.readouterr().out
    folder = Path(recipe.run) / "evaluation"
    report = json.loads((folder / "results.json").read_text())
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    means = [sum(s["cycles"]) / len(s["cycles"]) for s in samples if s["cycles"]]
    assert report["accept_length"]["value"] == pytest.approx(sum(means) / len(means))
    assert f"{report['accept_length']['value']:.3f}  ({len(means)} responses" in said
    assert all(len(s["tokens"]) == 1 + sum(s["cycles"]) and s["equal"] for s in samples)
    assert report["prompts_file"]["sha256"] == measure(Path(recipe.evaluation.prompts))["sha256"]
    assert report["versions"]["torch"] and report["target_fingerprint"] and report["checkpoint"] == "step-00000006"
    assert report["speed"].keys() == {"plain", "speculative"} and "batch 1, no figure of a server" in said
    (tmp_path / "elsewhere").write_text(to_toml(recipe))
    main(["evaluate", recipe.run, "--output", str(tmp_path / "out")])
    assert (tmp_path / "out" / "samples.jsonl").read_text() == (folder / "samples.jsonl").read_text()
