"""Target and drafter on one GPU, from the loader to the optimizer: the real pipeline over synthetic documents."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks import step, target
from benchmarks.measure import clean, peak_gib, spread
from draftsmith.anchors import BlockShape
from draftsmith.compile import compile_layers
from draftsmith.config import OptimOptions, PackOptions
from draftsmith.data.loader import PackBuilder, make_schedule, pack_stream
from draftsmith.fp8 import quantised_head, train_in_fp8
from draftsmith.optim import MasterAdamW
from draftsmith.train import block_loss
from draftsmith.types import Sample


@dataclass(frozen=True, kw_only=True)
class Documents:
    """A prepared set that is computed on the spot: log-normal lengths, the first fifth of each document a prompt."""

    lengths: np.ndarray
    vocabulary: int

    @property
    def legal_counts(self) -> np.ndarray:
        return self.lengths - self.lengths // 5 - 1

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        length = int(self.lengths[index])
        tokens = np.random.default_rng(index).integers(1, self.vocabulary, length)
        return Sample(id=str(index), tokens=tokens, supervised=np.arange(length) >= length // 5)


def run(
    shape: step.Shape,
    device: torch.device,
    num_layers: int,
    layer_ids: tuple[int, ...],
    *,
    steps: int,
    workers: int,
    fp8: bool = False,
):
    """One row of results; `tokens_per_s` counts tokens of documents, no padding. `fp8`: target, drafter and head."""
    rng = np.random.default_rng(0)
    mean = shape.document
    lengths = np.clip(rng.lognormal(np.log(mean) - 0.125, 0.5, 600), 16, shape.tokens // 4).astype(np.int64)
    documents = Documents(lengths=lengths, vocabulary=shape.vocabulary)
    density = shape.anchors / shape.tokens / 0.8
    options = PackOptions(
        tokens=shape.tokens, anchors=shape.anchors, anchors_per_document=shape.anchors, anchor_density=density
    )
    schedule, _ = make_schedule(documents, options, cut=False, packs_per_step=1, epochs=9, steps=steps, seed=0)
    builder = PackBuilder(
        documents, options, BlockShape(block_size=shape.block, mask_token_id=0, gamma=7.0, window=None), 0
    )
    clean(device)
    frozen = target.build(shape, device, num_layers, layer_ids)
    model = step.drafter(shape, device)
    if fp8:
        frozen.capture_in_fp8()
        train_in_fp8(model.layers)
    fp8_head = quantised_head(frozen.head) if fp8 else None
    if device.type == "cuda":
        frozen.compile_layers()
        compile_layers(model, "on")
    optimizer = MasterAdamW(model, OptimOptions(), {})
    times, tokens, start, warmup = [], 0, 0.0, min(4, steps - 1)
    for number, pack in enumerate(pack_stream(builder, schedule, schedule.places(), workers)):
        if number >= warmup:
            tokens += pack.num_tokens
        moved = pack.to(device)
        features = frozen.capture(moved)
        draft = model(features, moved.position, frozen.embed(moved.blocks.tokens), moved.blocks)
        loss = block_loss(draft, moved.blocks, moved.blocks.rows, frozen.head, chunk=shape.chunk, fp8_head=fp8_head)
        loss.total.backward()
        optimizer.step(loss.weight, 1e-4)
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        if number >= warmup:
            times.append(now - start)
        start = now
    return {
        "tokens": shape.tokens,
        "anchors": shape.anchors,
        "block": shape.block,
        "document": f"log-normal, mean {mean}",
        "fill_tokens": schedule.fill()[0],
        "fill_anchors": schedule.fill()[1],
        "loader_workers": workers,
        "fp8": "target drafter head" if fp8 else "none",
        **spread(times),
        "tokens_per_s": tokens / sum(times),
        "budget_tokens_per_s": shape.tokens * len(times) / sum(times),
        "peak_memory_gib": peak_gib(device),
    }
