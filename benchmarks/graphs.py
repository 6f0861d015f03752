"""The drafter's step as a CUDA graph against the same step launched kernel by kernel: from which size on it pays."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.measure import clean, seconds_of, spread
from benchmarks.step import Shape, Step
from draftsmith.graph import StepGraphs
from draftsmith.types import Pack

SMALL = Shape(
    hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, layers=5, taps=5, vocabulary=49_152
)  # fmt: skip
"""A drafter for SmolLM2-135M."""


def sized(shape: Shape, tokens: int) -> Shape:
    return replace(shape, tokens=tokens, anchors=tokens // 8, document=min(shape.document, tokens))


def run(shape: Shape, device: torch.device, compile_mode: str, repeats: int) -> dict:
    """One row. The copy of the pack to the GPU is part of both."""
    clean(device)
    step = Step(shape, device, compile_mode)
    host = step.blocks.to(torch.device("cpu"))
    position = step.position.cpu()
    pack = Pack(
        tokens=position, position=position, doc_start=position, doc_lengths=(shape.tokens,), blocks=host, epoch=0,
        index=0, samples=(), sample_ids=(), num_supervised=0, num_labelled=0,
    )  # fmt: skip

    def work(pack: Pack, topk: int) -> dict[str, torch.Tensor]:
        loss = step.loss(pack.blocks)
        loss.total.backward()
        norm, skipped = step.optimizer.step(loss.weight, None)
        step.optimizer.zero_grad()
        return {**loss.parts, "norm": norm, "skipped": skipped}

    graphs = StepGraphs(device, work)

    def eager() -> None:
        step.optimizer.rate.fill_(1e-4)
        work(pack.to(device), 0)

    def replayed() -> None:
        step.optimizer.rate.fill_(1e-4)
        graphs.run(pack, host.num_rows, 0)

    plain = spread(seconds_of(eager, device, repeats, warmup=4))
    graph = spread(seconds_of(replayed, device, repeats, warmup=4))
    return {
        "tokens": shape.tokens,
        "anchors": shape.anchors,
        "block": shape.block,
        "hidden": shape.hidden,
        "compile": compile_mode,
        **graph,
        "eager_seconds_median": plain["seconds_median"],
        "tokens_per_s": shape.tokens / graph["seconds_median"],
        "ratio_to": {"eager": plain["seconds_median"] / graph["seconds_median"]},
    }
