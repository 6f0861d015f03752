"""Several processes of one run, started as torchrun starts them, but quickly: each is a fork of a warm server.

And a short run to give them, and what it came to, to be compared with that of other processes."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from draftsmith import checkpoint
from draftsmith.config import Recipe, to_toml
from tests import children
from tests.children import Ended, Fault
from tests.conftest import make_recipe, with_options

STEPS = 6


class Started(list):
    """Process and log of each rank, and the store in which they meet."""

    store: dist.Store


def start_ranks(
    recipe: Recipe,
    world: int,
    *flags: str,
    faults: dict[int, Fault] | None = None,
    flags_of: dict[int, tuple] | None = None,
) -> Started:
    """Processes that run the recipe together; `wait_for` gets what they came to."""
    folder = Path(recipe.run).parent
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{Path(recipe.run).name}.toml"
    file.write_text(to_toml(recipe))
    # As torchrun's agent does, the test holds the store, so that the ranks can talk about a death of any of them.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = Started()
    started.store = store
    for rank in range(world):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        words = ["train", str(file), *flags, *(flags_of or {}).get(rank, ())]
        log = folder / f"{Path(recipe.run).name}-rank-{rank}.log"
        started.append((children.start(words, log, fault=(faults or {}).get(rank), environment=environment), log))
    return started


def wait_for(started: Sequence) -> list[Ended]:
    return [children.finish(child, log) for child, log in started]


def run_ranks(recipe: Recipe, world: int, *flags: str, **more) -> list[Ended]:
    return wait_for(start_ranks(recipe, world, *flags, **more))


def kill_one(recipe: Recipe, world: int, rank: int, fault: Fault, *flags: str) -> list[Ended]:
    """Run until the fault kills `rank`; the others must end by themselves within 30 seconds. There is no launcher."""
    started = start_ranks(recipe, world, *flags, faults={rank: fault})
    try:
        killed, _ = started[rank]
        killed.join(120)
        assert killed.exitcode == -signal.SIGKILL, [log.read_text() for _, log in started]
        until = time.monotonic() + 30
        for child, _ in started:
            child.join(max(0.0, until - time.monotonic()))
        left = [number for number, (child, _) in enumerate(started) if child.is_alive()]
        assert not left, f"still alive: {left}; {[log.read_text() for _, log in started]}"
    finally:
        for child, _ in started:
            child.kill()
    return wait_for(started)


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
