"""What happens to a run of several processes when one of them dies, is slow, meets a full disk or bad numbers."""

from __future__ import annotations

import json
import os
import random
import statistics
from pathlib import Path

import pytest

from draftsmith.config import Recipe
from tests.children import ALWAYS, Fault
from tests.conftest import with_options
from tests.ranks import STEPS, assert_equal, assert_same_bits, kill_one, outcome, run_ranks, short

SEED = int(os.environ.get("DRAFTSMITH_FAULT_SEED", "0"))
"""Of the random points at which ranks are killed."""
ROLES = {"drafter 0": 0, "target 0": 1, "drafter 1": 2}
"""Ranks of two targets and two drafters (see `roles`)."""


def metrics(recipe: Recipe) -> list[dict]:
    lines = [json.loads(line) for line in (Path(recipe.run) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.fixture(scope="session")
def undisturbed(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The outcome of two targets and two drafters: the same bits each time, as two numbers have only one sum."""
    recipe = short(world, tmp_path_factory.mktemp("undisturbed"), "split", targets=2, drafters=2)
    ended = run_ranks(recipe, 4)
    assert {e.code for e in ended} == {0}, [e.output for e in ended]
    return outcome(recipe)


def check_death(recipe: Recipe, world: int, rank: int, fault: Fault, expected: dict) -> None:
    """All end soon after one is killed, one tells why, and the same command then gives what nothing had disturbed."""
    ended = kill_one(recipe, world, rank, fault)
    assert [e.code for number, e in enumerate(ended) if number != rank] == [1] * (world - 1)
    assert sum("lost contact with another rank" in e.output for e in ended) == 1, [e.output for e in ended]
    assert not any("Traceback" in e.output for e in ended), [e.output for e in ended]
    ended = run_ranks(recipe, world)
    assert {e.code for e in ended} == {0}, [e.output for e in ended]
    assert_same_bits(outcome(recipe), expected)


@pytest.mark.parametrize(
    ("rank", "fault"),
    [
        (0, Fault(call="receive", nth=14)),
        (0, Fault(call="fsync", nth=3, save=2)),
        (1, Fault(call="capture", nth=1)),  # before the drafters know their target
        (1, Fault(call="evaluate", nth=2)),  # while a drafter waits for what it finds
        (2, Fault(call="send", nth=7)),
    ],
    ids=str,
)
def test_a_killed_rank_ends_two_targets_and_a_drafter(world, tmp_path, alone, rank, fault):
    recipe = short(world, tmp_path, "split", targets=2, drafters=1)
    check_death(recipe, 3, rank, fault, alone)


@pytest.mark.parametrize(
    ("rank", "fault"),
    [(0, Fault(call="optimizer step", nth=5)), (2, Fault(call="loss", nth=8))],
    ids=str,
)
def test_a_killed_rank_ends_two_targets_and_two_drafters(world, tmp_path, undisturbed, rank, fault):
    recipe = short(world, tmp_path, "split", targets=2, drafters=2)
    check_death(recipe, 4, rank, fault, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("role", ROLES)
def test_ranks_killed_anywhere(world, tmp_path, undisturbed, role, number):
    draw = random.Random(f"{SEED}/{role}/{number}")
    last = {"optimizer step": STEPS, "loss": 2 * STEPS, "receive": 2 * STEPS}  # each is called so often
    if role == "target 0":
        last = {"capture": 2 * STEPS, "send": 2 * STEPS, "load": 2 * STEPS}
    elif role == "drafter 0":
        last |= {"fsync": 20, "rename": 2, "write": 4}
    call = draw.choice(sorted(last))
    fault = Fault(call=call, nth=draw.randint(1, last[call]))
    print(f"seed {SEED}: {role} is killed at {fault}")
    recipe = short(world, tmp_path, "split", targets=2, drafters=2)
    check_death(recipe, 4, ROLES[role], fault, undisturbed)


@pytest.mark.parametrize(
    ("rank", "call", "seconds", "waiting"),
    [
        (1, "capture", 0.2, "drafter_wait"),
        (0, "optimizer step", 0.8, "target_wait"),
        (0, "load", 0.2, "load_wait"),
        (1, "load", 0.2, "drafter_wait"),
    ],
)
def test_a_slow_stage_is_seen_in_the_waits(world, tmp_path, alone, rank, call, seconds, waiting):
    recipe = short(world, tmp_path, "split", targets=1, drafters=1, queue_depth=1)
    slow = Fault(call=call, nth=1, times=ALWAYS, effect="sleep", seconds=seconds)
    ended = run_ranks(recipe, 2, faults={rank: slow})
    assert {e.code for e in ended} == {0}, [e.output for e in ended]
    assert_same_bits(outcome(recipe), alone)
    waits = {
        name: statistics.median(line[name] for line in metrics(recipe))
        for name in ("target_wait", "drafter_wait", "load_wait")
    }
    assert waits[waiting] > 0.5, waits
    if waiting != "load_wait":
        other = "target_wait" if waiting == "drafter_wait" else "drafter_wait"
        assert waits[other] < waits[waiting], waits


def test_a_disk_that_is_full_once_stops_nobody(world, tmp_path, alone):
    recipe = short(world, tmp_path)
    ended = run_ranks(recipe, 2, faults={0: Fault(call="write", nth=1, effect="full disk")})
    assert {e.code for e in ended} == {0}, [e.output for e in ended]
    assert "No space left" in ended[0].output and "Training goes on" in ended[0].output
    assert_equal(outcome(recipe), alone)


@pytest.mark.parametrize("layout", ["colocated", "split"])
def test_a_disk_that_stays_full_ends_all(world, tmp_path, layout):
    given = {"targets": 1, "drafters": 1} if layout == "split" else {}
    recipe = with_options(short(world, tmp_path, layout, **given), "checkpoint", every=1)
    ended = run_ranks(recipe, 2, faults={0: Fault(call="write", nth=3, times=ALWAYS, effect="full disk")})
    assert {e.code for e in ended} == {3}, [e.output for e in ended]
    assert ended[0].output.count("Training goes on") == 2
    assert ended[0].output.count("draftsmith: checkpoint step-00000004 could not be written") == 1
    assert "draftsmith:" not in ended[1].output
    assert outcome(recipe)["step"] == 1


def test_a_slow_disk_holds_nobody_up_for_good(world, tmp_path, alone):
    recipe = short(world, tmp_path)
    ended = run_ranks(recipe, 2, faults={0: Fault(call="fsync", nth=1, times=ALWAYS, effect="sleep", seconds=0.2)})
    assert {e.code for e in ended} == {0}, [e.output for e in ended]
    assert_equal(outcome(recipe), alone)


@pytest.mark.parametrize("layout", ["colocated", "split"])
def test_bad_features_of_one_rank_end_all(world, tmp_path, layout):
    """A step is skipped by all together, and after optim.max_skipped of them all end."""
    given = {"targets": 2, "drafters": 1} if layout == "split" else {}
    recipe = with_options(short(world, tmp_path, layout, **given), "optim", max_skipped=2)
    fault = Fault(call="capture", nth=9, times=ALWAYS, effect="nan")  # 4 for the sizes of channels, 2 a step
    ended = run_ranks(recipe, 3 if given else 2, faults={1: fault})
    assert {e.code for e in ended} == {5}, [e.output for e in ended]
    assert [line["skipped"] for line in metrics(recipe)] == [0, 0, 1, 1]
    said = "".join(e.output for e in ended)
    assert said.count("draftsmith: 2 steps were skipped (optim.max_skipped is 2)") == 1
    assert "step 3 changed nothing: a gradient was not finite (pack " in said
    assert outcome(recipe)["step"] == 3


def test_a_step_is_skipped_by_all_or_none(world, tmp_path):
    """One pack's features are bad: the run goes on as it does in one process."""
    found = []
    for number, faults in ((1, {0: 4 + 2 * 4 + 2}), (2, {1: 4 + 2 * 2 + 1})):  # step 3, lane 1, in both
        recipe = short(world, tmp_path / str(number))
        fault = {rank: Fault(call="capture", nth=nth, effect="nan") for rank, nth in faults.items()}
        ended = run_ranks(recipe, number, faults=fault)
        assert {e.code for e in ended} == {0}, [e.output for e in ended]
        assert [line["skipped"] for line in metrics(recipe)] == [0, 0, 1, 0, 0, 0]
        found.append(outcome(recipe))
        found[-1]["losses"].pop(2)  # it is not a number
    assert_equal(*found)


@pytest.mark.parametrize(("layout", "rank"), [("colocated", 0), ("split", 0), ("split", 1)])
def test_a_loader_process_that_dies_is_told_with_its_pack(world, tmp_path, layout, rank):
    number, given = (2, {"targets": 1, "drafters": 1}) if layout == "split" else (1, {})
    recipe = with_options(short(world, tmp_path, layout, **given), "data", workers=1)
    ended = run_ranks(recipe, number, faults={rank: Fault(call="load", nth=11)})
    assert {e.code for e in ended} == {3}, [e.output for e in ended]
    said = "".join(e.output for e in ended)
    assert said.count("a loader process died while it built pack ") == 1 and "Traceback" not in said
    assert "of epoch 0 (samples " in said or "of epoch 1 (samples " in said
    recipe = with_options(recipe, "data", workers=0)
    assert {e.code for e in run_ranks(recipe, number)} == {0}


@pytest.mark.parametrize(("number", "layout"), [(1, "colocated"), (2, "colocated"), (2, "split")])
def test_out_of_memory_is_one_line_with_what_lowers_it(world, tmp_path, number, layout):
    given = {"targets": 1, "drafters": 1} if layout == "split" else {}
    recipe = short(world, tmp_path, layout, **given)
    nth = 7 if number == 2 and layout == "colocated" else 15  # in step 4
    ended = run_ranks(recipe, number, faults={0: Fault(call="loss", nth=nth, effect="out of memory")})
    assert {e.code for e in ended} == {3}, [e.output for e in ended]
    (line,) = [line for e in ended for line in e.output.splitlines() if line.startswith("draftsmith:")]
    assert "is out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.); about 0.0 GiB" in line
    assert 'recompute = "mlp": 0.0 GiB' in line and "half the pack (pack.tokens 80, pack.anchors 12)" in line
    assert "Traceback" not in "".join(e.output for e in ended)
    assert outcome(recipe)["step"] == 3
