"""One run, any number of processes and any layout: the same packs in the same steps, the same drafter."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.children import Fault
from tests.conftest import with_options
from tests.ranks import STEPS, assert_equal, assert_same_bits, outcome, run_ranks, short
from tests.test_resume import start_again


@pytest.mark.parametrize(
    ("layout", "targets", "drafters"),
    [
        ("colocated", None, 2),
        ("split", 1, 1),
        ("split", 2, 1),
        pytest.param("split", 1, 2, marks=pytest.mark.slow),
        ("split", 3, 2),
        pytest.param("split", 2, 2, marks=pytest.mark.slow),
        pytest.param("colocated", None, 3, marks=pytest.mark.slow),
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


@pytest.mark.parametrize("depth", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_queue_depth_changes_nothing(world, tmp_path, alone, depth):
    recipe = short(world, tmp_path, "split", targets=2, drafters=1, queue_depth=depth)
    ended = run_ranks(recipe, 3)
    assert {e.code for e in ended} == {0}, [e.output for e in ended]
    assert_same_bits(outcome(recipe), alone)


def test_canonical_sums_give_the_same_bits_for_any_world(world, tmp_path):
    found = []
    for layout, world_size in (("colocated", 1), ("colocated", 2), ("colocated", 4), ("split", 3)):
        given = {"targets": 1, "drafters": 2} if layout == "split" else {}
        recipe = short(world, tmp_path / f"{layout}-{world_size}", layout, canonical=True, **given)
        recipe = with_options(recipe, "optim", packs_per_step=5)  # the tree has a short branch, and leftover steps
        ended = run_ranks(recipe, world_size)
        assert {e.code for e in ended} == {0}, [e.output for e in ended]
        found.append(outcome(recipe))
    for other in found[1:]:
        assert_same_bits(found[0], other)


def test_offline_ranks_share_one_file(world, tmp_path):
    one, two = (short(world, tmp_path / name, "offline") for name in ("one", "two"))
    for recipe, number in ((one, 1), (two, 2)):
        ended = run_ranks(recipe, number)
        assert {e.code for e in ended} == {0}, [e.output for e in ended]
    assert_equal(outcome(one), outcome(two))
    features = [(Path(r.run) / "features" / "features.bin").read_bytes() for r in (one, two)]
    assert features[0] == features[1]


def test_a_run_goes_on_in_another_layout(world, tmp_path, alone):
    """One process, then 2 + 1, then two colocated: as if nothing had happened, but for the order of sums."""
    recipe = short(world, tmp_path)
    for number, layout, given, stop_after in (
        (1, "colocated", {}, 2),
        (3, "split", {"targets": 2, "drafters": 1}, 2),
        (2, "colocated", {}, None),
    ):
        resumed = with_options(replace(recipe, layout=layout), "pipeline", **given)
        fault = Fault(call="optimizer step", nth=stop_after, signal=signal.SIGTERM) if stop_after else None
        ended = run_ranks(resumed, number, faults={0: fault} if fault else None)
        assert {e.code for e in ended} == {75 if stop_after else 0}, [e.output for e in ended]
    assert_equal(outcome(recipe), alone)


@pytest.mark.parametrize("rank", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1)), 2])
def test_a_signal_to_one_rank_saves_and_ends_all(world, tmp_path, alone, rank):
    recipe = short(world, tmp_path, "split", targets=1, drafters=2)
    call = "capture" if rank == 2 else "optimizer step"
    ended = run_ranks(recipe, 3, faults={rank: Fault(call=call, nth=8 if rank == 2 else 3, signal=signal.SIGTERM)})
    assert {e.code for e in ended} == {75}, [e.output for e in ended]
    assert "continue with: draftsmith train" in ended[0].output
    assert 0 < outcome(recipe)["step"] < STEPS
    assert {e.code for e in run_ranks(recipe, 3)} == {0}
    assert_equal(outcome(recipe), alone)


def test_ranks_that_differ_are_told_apart(world, tmp_path):
    recipe = short(world, tmp_path)
    ended = run_ranks(recipe, 2, flags_of={1: ("--optim.lr", "0.5")})
    assert {e.code for e in ended} == {2}
    said = "".join(e.output for e in ended)
    assert "rank 1 on host" in said and "optim.lr: 0.5 there, 0.003 on rank 0" in said
    assert said.count("draftsmith:") == 1  # once, whoever says it
    assert not Path(recipe.run).exists()


@pytest.mark.parametrize(
    ("layout", "number", "pipeline", "said"),
    [
        ("split", 2, {"targets": 2, "drafters": 1}, "makes 3 processes, but there are 2"),
        ("split", 2, {}, "needs pipeline.targets and pipeline.drafters"),
        ("colocated", 2, {"targets": 1}, 'would have no effect with layout = "colocated"'),
        ("colocated", 3, {"canonical": True}, "pipeline.canonical needs 1, 2, 4, 8"),
        ("colocated", 2, {"processes": 2}, "torchrun has started this process as one of 2"),
        ("colocated", 2, {"max_restarts": 2}, "give torchrun --max-restarts"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(world, tmp_path, layout, number, pipeline, said):
    recipe = short(world, tmp_path, layout, **pipeline)
    ended = run_ranks(recipe, number)
    assert {e.code for e in ended} == {2}
    assert said in "".join(e.output for e in ended)
    assert not Path(recipe.run).exists()


def test_more_drafters_than_packs_are_refused(world, tmp_path):
    recipe = with_options(short(world, tmp_path), "optim", packs_per_step=1)
    ended = run_ranks(recipe, 2)
    assert {e.code for e in ended} == {2}
    assert "there are 2 drafter ranks, so 1 would never have work" in "".join(e.output for e in ended)


def test_a_mixture_is_the_same_in_another_layout(world, tmp_path):
    """Rows seen several times, rows left out: a pure function of the recipe, in every process."""
    found = []
    for name, layout, world_size in (("one", "colocated", 1), ("two", "split", 2)):
        recipe = short(world, tmp_path / name, layout, **({"targets": 1, "drafters": 1} if world_size == 2 else {}))
        recipe = with_options(recipe, "data", prepared="", mix=(f"{world / 'prepared'}=1.5",), caps=("odd=8",))
        ended = run_ranks(recipe, world_size)
        assert {e.code for e in ended} == {0}, [e.output for e in ended]
        found.append(outcome(recipe))
    assert_same_bits(*found)
    samples = [name for line in found[0]["ledger"].splitlines() for name in json.loads(line)["samples"]]
    assert len(samples) > len(set(samples))


@pytest.mark.parametrize(("targets", "drafters"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_targets_that_share_one_copy_of_the_weights(world, tmp_path, alone, targets, drafters):
    recipe = short(world, tmp_path, "split", targets=targets, target_ranks=2, drafters=drafters)
    ended = run_ranks(recipe, targets + drafters)
    assert {e.code for e in ended} == {0}, [e.output for e in ended]
    assert_equal(outcome(recipe), alone)


@pytest.mark.parametrize(("layout", "number"), [("colocated", 1), ("split", 3)])
def test_a_trace_of_all_ranks(world, tmp_path, alone, layout, number):
    given = {"targets": 1, "drafters": 2} if layout == "split" else {}
    recipe = short(world, tmp_path, layout, trace=2, **given)
    ended = run_ranks(recipe, number) if number > 1 else [start_again(recipe)]
    assert {e.code for e in ended} == {0}, [e.output for e in ended]
    assert_equal(outcome(recipe), alone)
    events = json.loads((Path(recipe.run) / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == set(range(number))
    names = {"load", "capture", "forward", "loss", "backward", "step"}
    names |= {"send", "receive", "reduce"} if layout == "split" else {"reduce"}  # several packs a step are summed
    assert names <= {event["name"] for event in spans}
    assert {event["args"]["step"] for event in spans if event["name"] == "forward"} == {4, 5}
    begun = [event["ts"] for event in spans]
    assert max(begun) - min(begun) < 60e6 and all(event["dur"] >= 0 for event in spans)
    titles = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert titles == (
        {"rank 0 (drafter 0)", "rank 1 (drafter 1)", "rank 2 (target 0)"} if layout == "split" else {"rank 0"}
    )
