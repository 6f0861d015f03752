"""A run whose target and data have moved since: it continues, and its drafter is evaluated, exported and used."""

from __future__ import annotations

import io
import shutil

import pytest

from draftsmith.cli import main
from draftsmith.config import Recipe
from draftsmith.telemetry import Console
from draftsmith.train import train
from tests.conftest import make_recipe, with_options
from tests.tiny import tiny_target, tiny_tokenizer


@pytest.fixture
def moved(world, tmp_path) -> Recipe:
    """The recipe of a run of two steps, as it was written; nothing lies any more where it says."""
    for name in ("target", "prepared"):
        shutil.copytree(world / name, tmp_path / "before" / name)
    recipe = make_recipe(tmp_path / "before", tmp_path)
    recipe = with_options(with_options(recipe, "evaluation", prompts=""), "optim", steps=2)
    train(recipe, Console(io.StringIO()))
    (tmp_path / "before").rename(tmp_path / "after")
    return recipe


def test_it_continues(moved, tmp_path, capsys):
    after = with_options(moved, "target", path=f"{tmp_path}/after/target/")
    after = with_options(after, "data", prepared=f"{tmp_path}/after/prepared")
    assert train(after, Console())["steps"] == 2
    assert "is finished: all 2 steps are done" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["evaluate", "RUN"], ["export", "RUN", "--recorded_prompts", "0"], ["generate", "RUN", "hello"]]
)
def test_its_drafter_is_used(moved, world, tmp_path, capsys, words):
    words = [moved.run if word == "RUN" else word for word in words]
    words += ["--evaluation.prompts", str(world / "prompts.jsonl")] if words[0] == "evaluate" else []
    with pytest.raises(SystemExit):
        main(words)
    assert "before/target" in capsys.readouterr().err
    main([*words, "--target.path", str(tmp_path / "after" / "target")])
    said = capsys.readouterr().out
    assert str(tmp_path / "before") not in said
    tiny_target("llama").save_pretrained(tmp_path / "other")  # other weights: the world's were changed
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    with pytest.raises(SystemExit) as ended:
        main([*words, "--target.path", str(tmp_path / "other")])
    assert ended.value.code == 2 and "is not the one that" in capsys.readouterr().err


def test_options_of_the_target_that_a_run_ignores_are_refused(moved, world, capsys):
    words = ["evaluate", moved.run, "--evaluation.prompts", str(world / "prompts.jsonl"), "--target.dtype", "bfloat16"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and "target.dtype has no effect here" in capsys.readouterr().err
