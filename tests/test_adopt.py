"""Drafters of others: measured on a target, used for a warm start, refused where they do not fit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.negative_controls import edit_config, labels_shifted
from draftsmith.checkpoint import load
from draftsmith.cli import main
from draftsmith.config import OptimOptions, to_toml
from draftsmith.errors import UserError
from draftsmith.job import warm_start
from tests.handmade import tiny_drafter
from tests.overfit import make_export, make_recipe, make_target


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def donor(target, tmp_path_factory) -> Path:
    """Folder with `export/zlab`, `export/speculators`, `run` and `prompts.jsonl`; all layers sliding and causal."""
    folder = tmp_path_factory.mktemp("donor")
    kinds = ("sliding_attention",) * 2
    make_export(folder, target, "all", layer_types=kinds, sliding_window=12)
    return folder


def theirs(donor: Path, to: Path, layout: str = "zlab") -> Path:
    """The export as somebody else's: without our record."""
    shutil.copytree(donor / "export" / layout, to)
    (to / "draftsmith.json").unlink()
    return to


def evaluate(donor: Path, target: Path, folder: Path, capsys, *words: str) -> str:
    capsys.readouterr()
    prompts = ["--evaluation.prompts", str(donor / "prompts.jsonl"), "--evaluation.max_new_tokens", "32"]
    main(["evaluate", "--drafter", str(folder), "--target.path", str(target), "--device", "cpu", *prompts, *words])
    return capsys.readouterr().out


def figure(said: str) -> float:
    return float(said.split("accept length, pooled")[1].split()[0])


def test_any_drafter_is_evaluated_before_training(donor, target, tmp_path, capsys):
    said = evaluate(donor, target, theirs(donor, tmp_path / "a"), capsys)
    assert "silent on slot offset" in said and "taken: same-position labels" in said
    assert "4 of 4 outputs equal" in said and "no figure of a server" in said
    assert said.strip().splitlines()[-1] == f"next: draftsmith train RECIPE --init {tmp_path / 'a'}"
    assert figure(said) > 3
    assert figure(evaluate(donor, target, theirs(donor, tmp_path / "b", "speculators"), capsys)) == figure(said)


def test_a_silent_in_block_rule_is_measured(donor, target, tmp_path, capsys):
    folder = theirs(donor, tmp_path / "a")
    stated = figure(evaluate(donor, target, folder, capsys))
    edit_config(folder, lambda config: config.pop("is_causal"))
    said = evaluate(donor, target, folder, capsys)
    assert "silent on is_causal, slot offset" in said and "taken: the servers' rule" in said
    assert figure(said) == stated


def test_a_silent_rule_that_is_not_the_servers(target, tmp_path, capsys):
    kinds = ("sliding_attention",) * 2
    (tmp_path / "d").mkdir()
    make_export(tmp_path / "d", target, "all", layer_types=kinds, sliding_window=24, is_causal=False)
    folder = theirs(tmp_path / "d", tmp_path / "a")
    stated = figure(evaluate(tmp_path / "d", target, folder, capsys))
    edit_config(folder, lambda config: config.pop("is_causal"))
    said = evaluate(tmp_path / "d", target, folder, capsys)
    assert "taken: is_causal False" in said and figure(said) == stated


def test_a_drafter_of_the_other_slot_convention_is_refused(target, tmp_path, capsys):
    (tmp_path / "d").mkdir()
    with labels_shifted():
        make_export(tmp_path / "d", target, "all")
    with pytest.raises(SystemExit) as ended:
        evaluate(tmp_path / "d", target, theirs(tmp_path / "d", tmp_path / "a"), capsys)
    assert ended.value.code == 2 and "after each slot's own position" in capsys.readouterr().err


def test_a_drafter_of_a_target_of_another_size(donor, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        evaluate(donor, make_target(tmp_path / "other", hidden=64), donor / "export" / "zlab", capsys)
    assert ended.value.code == 2 and "it belongs to another target" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["RUN", "--drafter", "X"]])
def test_either_a_run_or_a_drafter(donor, capsys, words):
    words = [word.replace("RUN", str(donor / "run")) for word in words]
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *words])
    assert ended.value.code == 2 and "give either the folder of a run, or --drafter" in capsys.readouterr().err


# Warm starts


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_training_starts_from_an_exported_drafter(layout, donor, target, tmp_path, capsys):
    recipe = make_recipe(tmp_path, target, steps=1, layer_types=("sliding_attention",) * 2, sliding_window=12)
    recipe = replace(recipe, init=str(donor / "export" / layout), optim=OptimOptions(lr=1e-9, steps=1))
    (tmp_path / "my.toml").write_text(to_toml(recipe))
    main(["train", str(tmp_path / "my.toml")])
    started = load(Path(recipe.run) / "checkpoints" / "step-00000001").tensors("model")
    trained = load(donor / "run" / "checkpoints" / "step-00000080").tensors("model")
    for name, value in trained.items():
        torch.testing.assert_close(started[name], value.to(torch.bfloat16).float(), rtol=0, atol=1e-6)


def test_a_warm_start_under_other_conventions_is_refused(donor, target, tmp_path, capsys):
    recipe = make_recipe(tmp_path, target, steps=1, layer_types=("sliding_attention",) * 2, sliding_window=9)
    recipe = replace(recipe, init=str(donor / "export" / "zlab"), target=replace(recipe.target, layer_ids=(3, 1)))
    (tmp_path / "my.toml").write_text(to_toml(recipe))
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path / "my.toml")])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and not Path(recipe.run).exists()
    assert "target.layer_ids is [3, 1] here, [1, 3] there" in said and "drafter.sliding_window is 9 here, 12" in said


def test_a_warm_start_names_missing_tensors(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="config.json: key dflash_config is missing"):
        warm_start(tiny_drafter(), tmp_path)


# The end of a run


def test_a_run_ends_with_a_verified_export(target, tmp_path, capsys):
    recipe = replace(make_recipe(tmp_path, target, steps=2), at_end="verify")
    (tmp_path / "my.toml").write_text(to_toml(recipe))
    main(["train", str(tmp_path / "my.toml")])
    said = capsys.readouterr().out.strip().splitlines()
    folder = Path(recipe.run) / "export" / "zlab"
    assert f"verified {folder}: it drafts as it did in training" in said
    assert said[-1].startswith("next: draftsmith generate") and sum(line.startswith("next:") for line in said) == 1
    assert json.loads((folder / "draftsmith.json").read_text())["step"] == 2


def test_an_export_that_is_not_as_trained_ends_with_code_4(target, tmp_path, capsys, monkeypatch):
    from draftsmith import export

    honest = export.EXPORTS["zlab"]

    def broken(*arguments):
        config, tensors = honest(*arguments)
        return config, tensors | {"norm.weight": torch.flip(tensors["norm.weight"], (0,)) * 2}

    monkeypatch.setitem(export.EXPORTS, "zlab", broken)
    recipe = replace(make_recipe(tmp_path, target, steps=2), at_end="verify")
    (tmp_path / "my.toml").write_text(to_toml(recipe))
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path / "my.toml")])
    said = capsys.readouterr()
    assert ended.value.code == 4
    assert "the run is complete, but its export is not as trained" in said.err and "proposals" in said.err
    assert (Path(recipe.run) / "results.json").is_file()


def regenerate(donor: Path, target: Path, output: Path, capsys, *words: str) -> tuple[dict, str]:
    """Rows by id, and what was said."""
    capsys.readouterr()
    options = {"prompts": donor / "prompts.jsonl", "output": output, "max_new_tokens": 32, "batch": 3}
    flags = [word for name, value in options.items() for word in (f"--regenerate.{name}", str(value))]
    main(["regenerate", "--target.path", str(target), "--device", "cpu", *flags, *words])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    return {row["id"]: row for row in rows}, capsys.readouterr().out


def test_a_drafter_helps_its_target_to_answer(donor, target, tmp_path, capsys):
    expected, said = regenerate(donor, target, tmp_path / "plain.jsonl", capsys)
    assert len(expected) == 4 and "accept_length" not in said
    (checkpoint,) = (donor / "run" / "checkpoints").iterdir()
    ours = [donor / "run", checkpoint, donor / "export" / "zlab", donor / "export" / "speculators"]
    for number, folder in enumerate([*ours, theirs(donor, tmp_path / "theirs")]):
        output = tmp_path / f"{number}.jsonl"
        rows, said = regenerate(donor, target, output, capsys, "--regenerate.drafter", str(folder))
        assert rows == expected
        assert float(said.split("accept_length ")[1].split()[0]) > 3
        assert ("silent on slot offset" in said) == (folder not in ours)


def test_a_drafter_that_does_not_fit_is_refused(donor, target, tmp_path, capsys):
    """Before anything is written, in one line."""
    others = {"seed": {"seed": 1}, "hidden": {"hidden": 48}, "vocab": {"vocab": 352}}
    reasons = {
        "seed": "was trained for another target than",
        "hidden": "has hidden_size 32, the target 48; it belongs to another target",
        "vocab": "has vocab_size 320, the target 352; it belongs to another target",
    }
    for name, options in others.items():
        other = make_target(tmp_path / name, **options)
        refused(donor, other, tmp_path / "out.jsonl", capsys, donor / "run", reasons[name])

    def deeper(config):
        config["num_target_layers"] = config["dflash_config"]["num_target_layers"] = 7

    edit_config(theirs(donor, tmp_path / "deeper"), deeper)
    refused(donor, target, tmp_path / "out.jsonl", capsys, tmp_path / "deeper", "num_target_layers 7, the target 6")
    refused(donor, target, tmp_path / "out.jsonl", capsys, tmp_path / "no", "is no folder")


def refused(donor, target, output, capsys, drafter, reason: str) -> None:
    with pytest.raises(SystemExit) as ended:
        regenerate(donor, target, output, capsys, "--regenerate.drafter", str(drafter))
    said = capsys.readouterr().err
    assert ended.value.code == 2 and len(said.splitlines()) == 1 and reason in said
    assert not output.exists()
