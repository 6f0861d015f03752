"""Several processes of one run, started as torchrun starts them, but quickly: each is a fork of a warm server."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from draftsmith.config import Recipe, to_toml
from tests import children
from tests.children import Ended, Fault


def start_ranks(
    recipe: Recipe,
    world: int,
    *flags: str,
    faults: dict[int, Fault] | None = None,
    flags_of: dict[int, tuple] | None = None,
) -> list:
    """Processes that run the recipe together; `wait_for` gets what they came to."""
    folder = Path(recipe.run).parent
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{Path(recipe.run).name}.toml"
    file.write_text(to_toml(recipe))
    port = free_port()
    started = []
    for rank in range(world):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
