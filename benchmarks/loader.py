"""The loader on a prepared set: how soon the first pack is there, and how many tokens a second one process builds."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.measure import spread
from benchmarks.packing import conversations, density_for
from draftsmith.anchors import BlockShape
from draftsmith.config import DataOptions, OptimOptions, PackOptions
from draftsmith.data import store
from draftsmith.data.loader import PackBuilder, pack_stream
from draftsmith.data.overlap import find_overlap
from draftsmith.data.plan import Plan, make_plan
from draftsmith.data.prompts import Prompt
from draftsmith.data.shards import COLUMNS

BLOCK, BATCH, SHARD_ROWS = 16, 1_000, 100_000


def write_store(folder: Path, lengths: np.ndarray, legal: np.ndarray) -> None:
    """A prepared folder of random tokens: of each row the last `legal + 1` are supervised."""
    rng = np.random.default_rng(0)
    draws = rng.integers(0, 150_000, 1 << 22, dtype=np.int32)
    built = folder.with_name("built")
    built.mkdir()
    for first in range(0, len(lengths), SHARD_ROWS):
        with pa.ipc.new_stream(str(built / f"data-{first // SHARD_ROWS:05d}.arrow"), COLUMNS) as stream:
            for start in range(first, min(first + SHARD_ROWS, len(lengths)), BATCH):
                stream.write_batch(_batch(start, lengths[start:][:BATCH], legal[start:][:BATCH], draws))
    counts = {"kept": len(lengths), "tokens": int(lengths.sum()), "supervised": int((legal + 1).sum())}
    counts |= {"longest": int(lengths.max()), "tags": {"chat": len(lengths)}}
    manifest = {"counts": counts, "inputs": {"tokenizer": ""}, "content_hash": "synthetic"}
    store.publish(built, folder, manifest, {})


def _batch(start: int, lengths: np.ndarray, legal: np.ndarray, draws: np.ndarray) -> pa.RecordBatch:
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = np.resize(draws[start % 1_000 :], ends[-1])
    within = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
    supervised = (within >= np.repeat(lengths - legal - 1, lengths)).astype(np.uint8)
    columns = [
        pa.array([f"{start + i:016x}" for i in range(len(lengths))], pa.string()),
        pa.ListArray.from_arrays(ends, pa.array(tokens)),
        pa.ListArray.from_arrays(ends, pa.array(supervised)),
        pa.array([["chat"]] * len(lengths), pa.list_(pa.string())),
        pa.array(legal.astype(np.int32)),
    ]
    return pa.record_batch(columns, schema=COLUMNS)


def run(num: int, num_tokens: int, num_anchors: int, *, packs: int, repeats: int) -> list[dict]:
    lengths, legal = conversations(num, 500, num_tokens // 4)
    density = density_for(lengths, legal, num_tokens, num_anchors, 0.97)
    options = PackOptions(
        tokens=num_tokens, anchors=num_anchors, anchors_per_document=num_anchors, anchor_density=density
    )
    shape = BlockShape(block_size=BLOCK, mask_token_id=150_001, gamma=7.0, window=None)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "prepared"
        write_store(folder, lengths, legal)
        data = DataOptions(prepared=str(folder))
        facts = {"rows": num, "tokens": num_tokens, "anchors": num_anchors, "block": BLOCK}

        def planned(epochs: int) -> Plan:
            """As `train` does it."""
            return make_plan(data, options, OptimOptions(epochs=epochs), 0, [], tokenizer=None)

        def first_pack(epochs: int) -> object:
            return next(stream(planned(epochs), 0))

        def stream(plan: Plan, workers: int):
            builder, schedule = PackBuilder(plan.dataset, options, shape, 0), plan.schedule
            return pack_stream(builder, schedule, schedule.places(), workers)

        rows, plan = [], planned(1)
        for epochs in (1, 6):
            times = _times(partial(first_pack, epochs), repeats)
            rows.append({"what": f"first pack, {epochs} epochs scheduled", **facts, **_figures(times)})
        tokens = int(num_tokens * plan.schedule.fill()[0])
        for workers in (0, 1):
            ready = stream(plan, workers)
            _times(partial(next, ready), 4)
            times = _times(partial(next, ready), packs)
            ready.close()
            rows.append({"what": f"a pack, {workers} workers", **facts, **_figures(times, tokens)})
        times = _times(partial(_overlap, plan), repeats)
        rows.append({"what": "search for 500 prompts", "rows": num, **_figures(times, int(plan.dataset.lengths.sum()))})
    return rows


def _times(action: Callable[[], object], count: int) -> list[tuple[float, float]]:
    """Seconds of the clock and of this process's CPU: on a shared machine the clock also counts what others do."""
    times = []
    for _ in range(count):
        wall, cpu = time.perf_counter(), time.process_time()
        action()
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


def _figures(times: list[tuple[float, float]], tokens: int | None = None) -> dict:
    wall, cpu = ([one[place] for one in times] for place in (0, 1))
    rate = {"tokens_per_s": tokens / statistics.median(wall)} if tokens else {}
    return {**spread(wall), **rate, "cpu_seconds_median": statistics.median(cpu), "load": os.getloadavg()[0]}


class _Words:
    """Stands in for a tokenizer: a prompt's text is its tokens, written out."""

    def __call__(self, text: str, **options) -> dict:
        return {"input_ids": [int(word) for word in text.split()]}


def _overlap(plan: Plan) -> object:
    """Looks for evaluation prompts of 60 tokens in the whole set."""
    rng = np.random.default_rng(1)
    texts = [" ".join(map(str, rng.integers(0, 150_000, 60))) for _ in range(500)]
    prompts = [Prompt(id=text, messages=({"role": "user", "content": text},)) for text in texts]
    return find_overlap(plan.dataset, prompts, _Words())
