"""What several processes cost on a CPU beside the drafter's own step: the wire with an instant target, canonical sums.

Every run is `train` itself with a target whose capture takes no time. Runs are repeated in turn; medians of all steps.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.pipeline import make_world
from benchmarks.step import Shape
from draftsmith.config import PipelineOptions, Recipe

SHAPE = Shape(
    hidden=256, intermediate=768, heads=8, kv_heads=4, head_dim=32, layers=2, taps=2, vocabulary=2_048,
    block=8, tokens=1_024, anchors=128, document=256, chunk=1_024,
)  # fmt: skip
RUNS = {
    "1 process": (1, "colocated", 1, {}),
    "1+1 split": (2, "split", 1, {"targets": 1, "drafters": 1}),
    "2 colocated, 4 packs": (2, "colocated", 4, {}),
    "2 colocated, 4 packs, canonical": (2, "colocated", 4, {"canonical": True}),
}
STEPS, SKIPPED = 12, 4


def work(rank: int, world: int, port: int, recipe: Recipe) -> None:
    from draftsmith.targets import HFTarget
    from draftsmith.telemetry import Silent
    from draftsmith.train import train
    from draftsmith.types import Features

    def instant(self, pack, out=None):
        if out is None:
            out = torch.zeros(pack.tokens.shape[0], len(self.layer_ids) * self.config.hidden_size)
        return Features(context=out)

    torch.set_num_threads(1)
    HFTarget.capture = instant
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    train(recipe, Silent())


def step_seconds(recipe: Recipe, world: int) -> list[float]:
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [context.Process(target=work, args=(rank, world, port, recipe)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    lines = [json.loads(line) for line in (Path(recipe.run) / "metrics.jsonl").read_text().splitlines()]
    real = recipe.pack.tokens * recipe.optim.packs_per_step
    return [real * (1 - line["padding"]) / line["tokens_per_second"] for line in lines[SKIPPED:]]


def main(repeats: int) -> list[dict]:
    times: dict[str, list[float]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as folder:
        recipe = make_world(Path(folder), SHAPE, 8, torch.device("cpu"))
        for number in range(repeats):
            for name, (world, layout, packs, options) in RUNS.items():
                one = replace(recipe, run=f"{folder}/{number}-{world}-{layout}-{len(options)}", layout=layout)
                one = replace(one, pipeline=PipelineOptions(**options), data=replace(one.data, workers=0))
                one = replace(one, optim=replace(one.optim, steps=STEPS, packs_per_step=packs))
                times[name] += step_seconds(one, world)
    rows = []
    for name, found in times.items():
        base = {"1+1 split": "1 process", "2 colocated, 4 packs, canonical": "2 colocated, 4 packs"}.get(name)
        row = {"layout": name, "tokens": SHAPE.tokens, "anchors": SHAPE.anchors, "block": SHAPE.block}
        row |= {"seconds_median": statistics.median(found), "seconds_spread": max(found) - min(found)}
        if base:
            row["ratio_to"] = {base: statistics.median(found) / statistics.median(times[base])}
        rows.append(row | {"steps": len(found), "load": os.getloadavg()[0]})
    return rows


if __name__ == "__main__":
    from benchmarks import measure

    out = Path(__file__).parent / "results"
    measure.write("overhead", torch.device("cpu"), main(int(sys.argv[1]) if len(sys.argv) > 1 else 3), out)
