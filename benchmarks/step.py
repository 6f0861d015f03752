"""The drafter's training step on synthetic features: masks, forward, loss, backward, clipping, AdamW."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.measure import clean, peak_gib, seconds_of, spread, sustained_rate
from draftsmith.anchors import BlockShape, build_blocks
from draftsmith.compile import compile_layers
from draftsmith.config import OptimOptions
from draftsmith.drafters import DFlashDrafter
from draftsmith.drafters.dflash import DFlashConfig
from draftsmith.fp8 import quantised_head, train_in_fp8
from draftsmith.optim import MasterAdamW
from draftsmith.train import block_loss
from draftsmith.types import Blocks, Features, Loss


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

    @property
    def sizes(self) -> dict[str, int]:
        """The widths, as configs of transformers name them; the same for drafter, target and other trainers."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }


TOY = Shape(
    hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16, layers=2, taps=2, vocabulary=512,
    block=8, tokens=512, anchors=64, document=128, chunk=256,
)  # fmt: skip


def drafter(shape: Shape, device: torch.device) -> DFlashDrafter:
    kind = "sliding_attention" if shape.window else "full_attention"
    config = DFlashConfig(
        **shape.sizes,
        num_hidden_layers=shape.layers,
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
    anchors_in_last_layer = shape.anchors * (h * shape.heads * shape.head_dim + 3 * h * shape.intermediate)
    return (
        6 * (per_layer * layers * slots - anchors_in_last_layer)
        + 4 * shape.taps * h * h * shape.tokens
        + 12 * h * kv * layers * shape.tokens
        + 14 * shape.heads * shape.head_dim * seen * layers * slots
        + 4 * h * shape.vocabulary * rows
    )


class Step:
    """A drafter, its optimizer and synthetic features: one call is one training step."""

    def __init__(
        self, shape: Shape, device: torch.device, compile_mode: str, *, recompute="none", fp8: tuple[str, ...] = ()
    ) -> None:
        torch.manual_seed(0)
        self.shape = shape
        self.model = drafter(shape, device)
        for layer in self.model.layers:
            layer.recompute = recompute
        if "drafter" in fp8:
            train_in_fp8(self.model.layers)
        compile_layers(self.model, compile_mode)
        self.optimizer = MasterAdamW(self.model, OptimOptions(), {})
        self.position, self.blocks = blocks(shape, device)
        kind = self.model.dtype
        self.context = torch.randn(shape.tokens, shape.taps * shape.hidden, device=device, dtype=kind)
        self.head = torch.randn(shape.vocabulary, shape.hidden, device=device, dtype=kind) * 0.02
        self.fp8_head = quantised_head(self.head) if "head" in fp8 else None

    def loss(self, made: Blocks | None = None) -> Loss:
        made = made or self.blocks
        draft = self.model(Features(context=self.context), self.position, self.head[made.tokens], made)
        rows = made.rows[: made.num_rows]
        return block_loss(draft, made, rows, self.head, chunk=self.shape.chunk, fp8_head=self.fp8_head)

    def __call__(self) -> None:
        loss = self.loss()
        loss.total.backward()
        self.optimizer.step(loss.weight, 1e-4)
        self.optimizer.zero_grad()


def run(
    shape: Shape,
    device: torch.device,
    compile_mode: str,
    repeats: int,
    rate: float | None = None,
    *,
    recompute="none",
    fp8: tuple[str, ...] = (),
) -> dict:
    """One row of results."""
    clean(device)
    step = Step(shape, device, compile_mode, recompute=recompute, fp8=fp8)
    times = seconds_of(step, device, repeats, warmup=4)
    peak = peak_gib(device)
    rate = rate or sustained_rate(device, 5.0 if device.type == "cuda" else 0.5, 8192 if device.type == "cuda" else 512)
    figures = spread(times)
    flop = useful_flop(shape, step.blocks.num_rows)
    return {
        "tokens": shape.tokens,
        "anchors": shape.anchors,
        "block": shape.block,
        "document": shape.document,
        "window": shape.window or 0,
        "compile": compile_mode,
        "recompute": recompute,
        "fp8": " ".join(fp8) or "none",
        **figures,
        "tokens_per_s": shape.tokens / figures["seconds_median"],
        "share_of_sustained": flop / figures["seconds_median"] / rate,
        "sustained_tflops": rate / 1e12,
        "peak_memory_gib": peak,
    }
