"""Whose run folder it is, and what may change when a run is continued."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.checkpoint import Superseded
from draftsmith.config import Recipe, to_toml
from draftsmith.errors import UserError
from draftsmith.recipe import read_recipe
from draftsmith.run import RunFolder, find_checkpoint, refuse_other_recipe, versions
from tests.conftest import with_options

PRINTS = {"data": "d", "target": "t", "tokenizer": "k"}


def fail(warning: str) -> None:
    raise AssertionError(warning)


@pytest.fixture
def opened():
    """Opens run folders, and closes them in the end."""
    folders: list[RunFolder] = []

    def open_folder(recipe: Recipe, prints: dict[str, str] = PRINTS) -> RunFolder:
        folders.append(RunFolder(recipe, prints, fail))
        return folders[-1]

    yield open_folder
    for folder in folders:
        folder.close()


def save(folder: RunFolder, step: int, best: int | None = None) -> None:
    folder.record_step(step, [(0, step)], [f"sample-{step}"])
    facts = {"best": {"checkpoint": f"step-{best:08d}", "accept_length": 2.0} if best else None}
    tensors = {"weight": torch.full((2,), float(step))}
    folder.save(step, tensors, tensors, "{}", facts, last=False)


def contents(folder: str | Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_the_resolved_recipe_reads_back_as_it_was(opened, recipe):
    folder = opened(recipe)
    assert read_recipe(str(folder.path / "recipe.toml")) == recipe


def test_strings_that_toml_must_escape_survive(recipe, tmp_path):
    odd = replace(recipe, run=str(tmp_path / 'quo"te \\ ü\n[optim]\nlr = 9'))
    file = tmp_path / "odd.toml"
    file.write_text(to_toml(odd))
    assert read_recipe(str(file)) == odd


def test_reopening_continues(opened, recipe):
    folder = opened(recipe)
    save(folder, 1)
    save(folder, 2)
    folder.record_step(3, [(0, 3)], ["sample-3"])  # past the checkpoint: trained on again
    folder.close()
    again = opened(recipe)
    assert again.step == 2
    assert (again.path / "ledger.jsonl").read_text().count("\n") == 2


@pytest.mark.parametrize(
    ("table", "changes"),
    [
        ("checkpoint", {"every": 7, "keep": 3}),
        ("log", {"every": 1}),
        ("data", {"workers": 3}),
        ("evaluation", {"limit": 1, "temperature": 0.5}),
    ],
)
def test_what_decides_no_weight_may_change(opened, recipe, table, changes):
    opened(recipe).close()
    assert opened(with_options(recipe, table, **changes)).step == 0


@pytest.mark.parametrize(
    ("table", "changes", "said"),
    [
        ("optim", {"lr": 1.0}, "optim.lr: 0.003 there, 1.0 here"),
        ("pack", {"tokens": 170}, "pack.tokens: 160 there, 170 here"),
        ("loss", {"gamma": 2.0}, "loss.gamma: unset there, 2.0 here"),
        ("target", {"layer_ids": (1, 2)}, r"target.layer_ids: \[0, 2\] there, \[1, 2\] here"),
        ("data", {"overlong": "cut"}, "data.overlong: refuse there, cut here"),
        ("data", {"mix": ("a=2", "b")}, r"data.mix: \[\] there, \[2.0, 1.0\] here"),
    ],
)
def test_another_recipe_is_refused_with_the_difference(opened, recipe, table, changes, said):
    opened(recipe).close()
    before = contents(recipe.run)
    with pytest.raises(UserError, match=said):
        opened(with_options(recipe, table, **changes))
    assert contents(recipe.run) == before


@pytest.mark.parametrize("name", PRINTS)
def test_other_inputs_are_refused(opened, recipe, name):
    folder = opened(recipe)
    save(folder, 1)
    folder.close()
    with pytest.raises(UserError, match=f"another {name} than this recipe finds now"):
        opened(recipe, {**PRINTS, name: "changed"})


def test_a_moved_run_continues(opened, recipe, tmp_path):
    folder = opened(recipe)
    save(folder, 1)
    folder.close()
    Path(recipe.run).rename(tmp_path / "elsewhere")
    assert opened(replace(recipe, run=str(tmp_path / "elsewhere"))).step == 1


@pytest.mark.parametrize(
    ("table", "changes"),
    [
        ("target", {"path": "/elsewhere/target/", "revision": "abc"}),
        ("data", {"prepared": "s3://elsewhere/prepared", "cache": "/elsewhere", "cache_gb": 1.0}),
        ("data", {"mix": ("/elsewhere/a=2.0", "/elsewhere/b=1")}),
    ],
)
def test_inputs_may_move(opened, recipe, table, changes):
    if "mix" in changes:
        recipe = with_options(recipe, "data", prepared="", mix=("here/a=2", "here/b"))
    folder = opened(recipe)
    save(folder, 1)
    folder.close()
    again = opened(with_options(recipe, table, **changes))
    assert again.step == 1
    save(again, 2)
    assert find_checkpoint(again.path, "last", fail).run_id == find_checkpoint(again.path, "step-00000001", fail).run_id


def test_an_edit_of_the_runs_own_recipe_loses_no_checkpoint(opened, recipe):
    folder = opened(recipe)
    save(folder, 1)
    folder.close()
    moved = with_options(recipe, "target", path="/elsewhere")
    (folder.path / "recipe.toml").write_text(to_toml(moved))
    assert opened(moved).step == 1
    edited = with_options(recipe, "optim", lr=1.0)
    (folder.path / "recipe.toml").write_text(to_toml(edited))
    with pytest.raises(UserError, match="step-00000001 was trained with another recipe .optim.lr: 0.003 there, 1.0"):
        opened(edited)


def test_fingerprints_of_later_releases_are_not_asked_of_older_checkpoints(opened, recipe):
    folder = opened(recipe)
    save(folder, 1)
    folder.close()
    assert opened(recipe, {**PRINTS, "mix": "new"}).step == 1
    save(opened(recipe, {**PRINTS, "mix": "new"}), 2)
    with pytest.raises(UserError, match="another mix"):
        opened(recipe, {**PRINTS, "mix": "other"})


def test_a_run_of_this_release_continues_in_later_ones(opened, recipe):
    """`recipe-0.1.toml` is what the release before options were added had written; never edit it."""
    stored = (Path(__file__).parent / "recipe-0.1.toml").read_text()
    Path(recipe.run).mkdir()
    (Path(recipe.run) / "recipe.toml").write_text(stored)
    assert read_recipe(str(Path(recipe.run) / "recipe.toml")).optim == recipe.optim
    assert opened(recipe).step == 0


@pytest.mark.parametrize("absent", ["overlap", "fp8", "recompute", "canonical"])
def test_an_option_that_a_recipe_lacks_has_its_default(opened, recipe, absent):
    opened(recipe).close()
    file = Path(recipe.run) / "recipe.toml"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if not line.startswith(f"{absent} = ")))
    assert len(file.read_text()) < len("".join(lines))
    assert opened(recipe).step == 0


def test_other_versions_are_said(opened, recipe, monkeypatch):
    folder = opened(recipe)
    save(folder, 1)
    folder.close()
    now = versions()
    monkeypatch.setattr("draftsmith.run.versions", lambda: {**now, "torch": "99", "python": "4"})
    said: list[str] = []
    RunFolder(recipe, PRINTS, said.append).close()
    (line,) = said
    assert f"torch {now['torch']}, now 99" in line and "python" not in line


def test_a_folder_of_something_else_is_refused(recipe):
    Path(recipe.run).mkdir()
    (Path(recipe.run) / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="is not empty and holds no recipe.toml"):
        refuse_other_recipe(recipe)
    assert [path.name for path in Path(recipe.run).iterdir()] == ["thesis.txt"]


def test_a_damaged_recipe_is_refused(recipe):
    Path(recipe.run).mkdir()
    (Path(recipe.run) / "recipe.toml").write_text('run = "half')
    with pytest.raises(UserError, match="recipe.toml is damaged"):
        refuse_other_recipe(recipe)


def test_no_run_folder_given(recipe):
    with pytest.raises(UserError, match="run is not given"):
        refuse_other_recipe(replace(recipe, run=""))


def test_an_older_process_writes_nothing_more(opened, recipe):
    first = opened(recipe)
    save(first, 1)
    second = opened(recipe)
    before = contents(recipe.run)
    with pytest.raises(Superseded):
        first.record_step(2, [(0, 2)], ["sample-2"])
    with pytest.raises(Superseded):
        first.save(2, {}, {}, "{}", {}, last=False)
    assert contents(recipe.run) == before
    save(second, 2)


def test_checkpoints_by_name(opened, recipe):
    folder = opened(recipe)
    for step in (1, 2, 3):
        save(folder, step, best=2)
    assert find_checkpoint(folder.path, "best", fail).step == 2
    assert find_checkpoint(folder.path, "last", fail).step == 3
    assert find_checkpoint(folder.path, "step-00000003", fail).step == 3


def test_without_an_evaluation_the_best_is_the_last(opened, recipe):
    folder = opened(recipe)
    save(folder, 1)
    assert find_checkpoint(folder.path, "best", fail).step == 1


@pytest.mark.parametrize("name", ["step-00000009", "../checkpoints", "", ".."])
def test_an_unknown_checkpoint_lists_the_known_ones(opened, recipe, name):
    folder = opened(recipe)
    save(folder, 1)
    with pytest.raises(UserError, match="best, last, step-00000001"):
        find_checkpoint(folder.path, name, fail)


def test_a_run_without_checkpoints_says_what_to_do(opened, recipe):
    with pytest.raises(UserError, match="holds no valid checkpoint; train first"):
        find_checkpoint(opened(recipe).path, "best", fail)
