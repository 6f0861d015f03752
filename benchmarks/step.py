"""The drafter's training step on synthetic features: masks, forward, loss, backward, clipping, AdamW."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.measure import seconds_of, spread, sustained_rate
from draftsmith.anchors import BlockShape, build_blocks
from draftsmith.compile import compile_layers
from draftsmith.config import OptimOptions
from draftsmith.drafters import DFlashDrafter
from draftsmith.drafters.dflash import DFlashConfig
from draftsmith.optim import MasterAdamW
from draftsmith.train import block_loss
from draftsmith.types import Blocks, Features


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A drafter and its work."""

    hidden: int = 4096
    intermediate: int = 12_288
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 5
    taps: int = 5
    vocabulary: int = 151_936
    block: int = 16
    tokens: int = 16_384
    anchors: int = 2_048
    document: int = 2_048
    window: int | None = None
    chunk: int = 4_096


TOY = Shape(
    hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16, layers=2, taps=2, vocabulary=512,
    block=8, tokens=512, anchors=64, document=128, chunk=256,
)  # fmt: skip


def drafter(shape: Shape, device: torch.device) -> DFlashDrafter:
    kind = "sliding_attention" if shape.window else "full_attention"
    config = DFlashConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        layer_types=[kind] * shape.layers,
        use_sliding_window=shape.window is not None,
        sliding_window=shape.window,
        max_position_embeddings=shape.document,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    config.block_size = shape.block
    config.dflash_config = {"mask_token_id": 0, "target_layer_ids": list(range(shape.taps))}
    with torch.device(device):
        model = DFlashDrafter(config)
    return model.to(dtype=torch.bfloat16 if device.type == "cuda" else torch.float32).train()


def blocks(shape: Shape, device: torch.device) -> tuple[torch.Tensor, Blocks]:
    """Positions and blocks of documents of one length, anchors spread evenly over them, as the loader makes them."""
    rng = np.random.default_rng(0)
    index = np.arange(shape.tokens)
    start = index // shape.document * shape.document
    anchor = np.sort(rng.choice(shape.tokens - shape.block, shape.anchors, replace=False))
    made = build_blocks(
        rng.integers(1, shape.vocabulary, shape.tokens),
        np.ones(shape.tokens, bool),
        anchor,
        start[anchor],
        np.minimum(start[anchor] + shape.document, shape.tokens),
        shape.anchors,
        BlockShape(block_size=shape.block, mask_token_id=0, gamma=7.0, window=shape.window),
    )
    return torch.from_numpy(index - start).to(device), made.to(device)


def useful_flop(shape: Shape, rows: int) -> float:
    """Floating-point operations that the step cannot do without (a multiply-add is two)."""
    h, layers, slots = shape.hidden, shape.layers, shape.anchors * shape.block
    kv = shape.kv_heads * shape.head_dim
    per_layer = 2 * h * shape.heads * shape.head_dim + 2 * h * kv + 3 * h * shape.intermediate
    seen = min(shape.document / 2, shape.window or shape.document) + shape.block
    return (
        6 * per_layer * layers * slots
        + 4 * shape.taps * h * h * shape.tokens
        + 12 * h * kv * layers * shape.tokens
        + 14 * shape.heads * shape.head_dim * seen * layers * slots
        + 4 * h * shape.vocabulary * rows
    )


def run(shape: Shape, device: torch.device, compile_mode: str, repeats: int, rate: float | None = None) -> dict:
    """One row of results."""
    torch.manual_seed(0)
    model = drafter(shape, device)
    compile_layers(model, compile_mode)
    optimizer = MasterAdamW(model, OptimOptions(), {})
    position, made = blocks(shape, device)
    kind = model.dtype
    context = torch.randn(shape.tokens, shape.taps * shape.hidden, device=device, dtype=kind)
    table = torch.randn(shape.vocabulary, shape.hidden, device=device, dtype=kind) * 0.02
    embedded = table[made.tokens]

    def step() -> None:
        draft = model(Features(context=context), position, embedded, made)
        loss = block_loss(draft, made, made.rows[: made.num_rows], table, chunk=shape.chunk)
        loss.total.backward()
        optimizer.step(loss.weight, 1e-4)
        optimizer.zero_grad()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = seconds_of(step, device, repeats, warmup=4)
    rate = rate or sustained_rate(device, 5.0 if device.type == "cuda" else 0.5, 8192 if device.type == "cuda" else 512)
    figures = spread(times)
    flop = useful_flop(shape, made.num_rows)
    return {
        "tokens": shape.tokens,
        "anchors": shape.anchors,
        "block": shape.block,
        "document": shape.document,
        "window": shape.window or 0,
        "compile": compile_mode,
        **figures,
        "tokens_per_s": shape.tokens / figures["seconds_median"],
        "share_of_sustained": flop / figures["seconds_median"] / rate,
        "sustained_tflops": rate / 1e12,
        "peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0,
    }
