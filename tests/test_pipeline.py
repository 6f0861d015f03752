"""One run, any number of processes and any layout: the same packs in the same steps, the same drafter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith import checkpoint
from draftsmith.config import Recipe
from tests.conftest import make_recipe, with_options
from tests.ranks import run_ranks

STEPS = 6


def short(world: Path, folder: Path, layout: str = "colocated", **pipeline) -> Recipe:
    recipe = replace(make_recipe(world, folder), layout=layout)
    recipe = with_options(recipe, "optim", steps=STEPS, packs_per_step=4, noise="gaussian", noise_scale=0.1)
    recipe = with_options(recipe, "checkpoint", every=3)
    recipe = with_options(recipe, "evaluation", every=3, at_start=True)
    recipe = with_options(recipe, "log", every=1)
    return with_options(recipe, "pipeline", **pipeline)


def outcome(recipe: Recipe) -> dict:
    run = Path(recipe.run)
    found = checkpoint.newest_valid(run / "checkpoints", report=lambda line: None)
    assert found is not None
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "step": found.step,
        "ledger": (run / "ledger.jsonl").read_text(),
        "losses": [line["loss"] for line in lines if "loss" in line],
        "accept": [line["evaluation"]["accept_length"] for line in lines if "evaluation" in line],
        "weights": found.tensors("model") | found.tensors("optimizer"),
    }


def assert_equal(one: dict, other: dict) -> None:
    """The same rows in the same steps, and the same numbers up to the order of fp32 sums."""
    assert one["step"] == other["step"] == STEPS
    assert one["ledger"] == other["ledger"]
    assert one["losses"] == pytest.approx(other["losses"], rel=2e-5)
    assert one["accept"] == pytest.approx(other["accept"], rel=1e-6)
    for name, value in one["weights"].items():
        torch.testing.assert_close(value, other["weights"][name], rtol=1e-3, atol=2e-5, msg=name)


def assert_same_bits(one: dict, other: dict) -> None:
    assert_equal(one, other)
    differing = [name for name, value in one["weights"].items() if not torch.equal(value, other["weights"][name])]
    assert not differing


@pytest.fixture(scope="session")
def alone(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The outcome of one process, as a plain user runs it."""
    recipe = short(world, tmp_path_factory.mktemp("alone"))
    ended = run_ranks(recipe, 1)
    assert [e.code for e in ended] == [0], ended[0].output
    return outcome(recipe)


@pytest.mark.parametrize(
    ("layout", "targets", "drafters"),
    [
        ("colocated", None, 2),
        ("split", 1, 1),
        ("split", 2, 1),
        ("split", 1, 2),
        ("split", 3, 2),
        ("split", 2, 2),
        ("colocated", None, 3),
    ],
)
def test_any_layout_gives_the_same_drafter(world, tmp_path, alone, layout, targets, drafters):
    given = {"targets": targets, "drafters": drafters} if layout == "split" else {}
    recipe = short(world, tmp_path, layout, **given)
    ended = run_ranks(recipe, drafters + (targets or 0))
    assert {e.code for e in ended} == {0}, [e.output for e in ended]
    if drafters == 1:
        assert_same_bits(outcome(recipe), alone)
    else:
        assert_equal(outcome(recipe), alone)
