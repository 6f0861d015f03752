"""How much GPU memory a run needs: arithmetic on sizes, before anything is loaded.

The parts add up to the peak of a step. What is kept from the forward to the backward pass is known exactly (what the
compiled drafter saves, listed in `_kept`); how much the backward pass needs on top was fitted to measurements
(docs/log.md) and is the inexact part. Not in it: CUDA's own context, about half a GiB, and the allocator's slack.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from draftsmith.config import Recipe
from draftsmith.errors import UserError
from draftsmith.shapes import TILE, anchor_unit

GIB = 2**30
CLEARLY = 1.1
"""The formula is within a few per cent of what was measured; CUDA's context and the allocator's slack come on top."""
FP8_KEPT = 0.84  # of the activations: some inputs of linear layers are kept quantised


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What memory depends on. `width` is bytes of a compute number: 2 in bf16, 4 in fp32."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    taps: int
    vocabulary: int
    block: int
    tokens: int
    anchors: int
    chunk: int
    target_weights: int
    """Numbers in the target's weights, embedding and head included. 0: the target is somewhere else."""
    target_block_weights: int = 0
    """Of these, in the blocks that capturing runs."""
    target_intermediate: int = 0
    width: int = 2
    recompute: Literal["none", "mlp", "layer"] = "none"
    muon: bool = False
    summed: bool = False
    """Gradients are summed in fp32, over packs or processes."""
    fp8_target: bool = False
    fp8_head: bool = False
    fp8_drafter: bool = False

    @property
    def slots(self) -> int:
        return self.anchors * self.block

    @property
    def rows(self) -> int:
        return self.anchors * (self.block - 1)

    @property
    def matrices(self) -> int:
        """Numbers in the drafter's matrices; its norms are too small to count."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = 2 * self.hidden * query + 2 * self.hidden * kv + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.taps * self.hidden * self.hidden


def breakdown(sizes: Sizes) -> dict[str, int]:
    """Bytes of each part at the peak of a step, in the order they come to be."""
    s, wide = sizes, 4
    head = s.vocabulary * s.hidden if s.target_weights == 0 else 0
    quantised = (s.target_block_weights if s.fp8_target else 0) + (2 * s.vocabulary * s.hidden if s.fp8_head else 0)
    rows = s.rows * s.hidden * s.width
    logits = min(s.chunk, s.rows) * s.vocabulary * (s.width + (1 if s.fp8_head else 0))
    forward = int(_kept(s) * s.width * (FP8_KEPT if s.fp8_drafter else 1))
    backward = int(_backward(s) * s.width)
    gradients = s.matrices * s.width - forward - rows  # all of them are there when nothing else is left
    capture = s.tokens * (2 * s.hidden + 3 * s.target_intermediate) * s.width - forward - rows
    return {
        "target": s.target_weights * s.width,
        "weights": (s.matrices + head) * s.width,
        "fp8 copies": quantised,
        "masters": s.matrices * wide if s.width < wide else 0,
        "optimizer": s.matrices * wide * (1 if s.muon else 2),
        "gradient sum": s.matrices * wide if s.summed else 0,
        "features": s.tokens * s.taps * s.hidden * s.width,
        "activations": forward,
        "gradient of the loss": rows,
        "logits or backward pass": max(logits + rows, backward, gradients, capture),
    }


def _kept(s: Sizes) -> int:
    """Numbers that the forward pass keeps for the backward pass."""
    query, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    keys = 2 * kv * (s.tokens + s.slots)  # of context and draft slots together, as attention reads them
    before_norms = kv * (s.tokens + s.slots) + s.slots * query
    attention = 2 * s.slots * query  # its queries and its output
    residual = 4 * s.slots * s.hidden  # before and after each of a layer's two norms
    mlp = 2 * s.slots * s.intermediate
    context = 2 * s.tokens * s.hidden
    ends = (2 * s.slots - s.anchors) * s.hidden  # the embedded blocks and the drafter's output, without slot 0
    unread = 2 * s.anchors * s.intermediate if s.recompute == "none" else 0  # slot 0 in the last layer's MLP
    if s.recompute == "layer":
        return s.layers * (s.slots * s.hidden + keys - 2 * kv * s.slots + kv * s.tokens) + context + ends
    layer = keys + before_norms + attention + residual + (mlp if s.recompute == "none" else -s.slots * s.hidden)
    return s.layers * layer + context + ends - unread


def _backward(s: Sizes) -> float:
    """Numbers that the backward pass holds at its peak, in the last layer, besides what was kept."""
    query = s.heads * s.head_dim
    return (
        s.slots
        * {
            "none": 3 * s.intermediate + 2.5 * s.hidden,
            "mlp": 6 * s.intermediate + 0.5 * s.hidden,
            "layer": 6 * s.intermediate + 5.5 * s.hidden + 4 * query,
        }[s.recompute]
    )


def describe(parts: dict[str, int]) -> str:
    """One line: the sum, and every part of at least a hundredth of a GiB."""
    named = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size >= GIB // 100)
    return f"{sum(parts.values()) / GIB:.1f} GiB ({named})"


def total(sizes: Sizes) -> int:
    return sum(breakdown(sizes).values())


def largest_pack(sizes: Sizes, capacity: float) -> tuple[int, int] | None:
    """Tokens and anchors of the largest pack, in the proportion asked for, whose step fits into so many bytes."""
    unit = anchor_unit(sizes.block)
    for tokens in range(sizes.tokens // TILE * TILE, 0, -TILE):
        anchors = tokens * sizes.anchors // sizes.tokens // unit * unit
        if anchors and total(replace(sizes, tokens=tokens, anchors=anchors)) <= capacity:
            return tokens, anchors
    return None


def levers(sizes: Sizes) -> str:
    """What would make a step smaller, and how large it then is expected to be."""
    half = {"tokens": sizes.tokens // 2, "anchors": sizes.anchors // 2}
    changes: dict[str, dict] = {
        'recompute = "mlp"': {"recompute": "mlp"},
        'recompute = "layer"': {"recompute": "layer"},
        f"half the pack (pack.tokens {half['tokens']}, pack.anchors {half['anchors']})": half,
        "drafter.fp8 (on Hopper or newer)": {"fp8_drafter": True} if sizes.width == 2 else {},
    }
    now = total(sizes)
    after = {name: total(replace(sizes, **change)) for name, change in changes.items()}
    return ", ".join(f"{name}: {size / GIB:.1f} GiB" for name, size in after.items() if size < now)


def refuse_too_large(sizes: Sizes, capacity: int) -> None:
    """Raise UserError if a step needs clearly more than a GPU has, before anything is compiled."""
    if total(sizes) <= CLEARLY * capacity:
        return
    fits = largest_pack(sizes, capacity / CLEARLY)
    best = (
        f"the largest pack that fits is pack.tokens {fits[0]} with pack.anchors {fits[1]}" if fits else "no pack fits"
    )
    raise UserError(
        f"a step needs about {describe(breakdown(sizes))}, and the GPU has {capacity / GIB:.1f} GiB; {best}. "
        f'Other ways: {levers(sizes)}; or layout = "split"'
    )


def sizes_of(recipe: Recipe, drafter: Any, target: Any, *, width: int, drafters: int = 1) -> Sizes:
    """The sizes of a drafter process from the recipe, the drafter's config and the target's; `drafters` processes."""
    heads, kv_heads = target.num_attention_heads, target.num_key_value_heads
    dim = getattr(target, "head_dim", None) or target.hidden_size // heads
    block = target.hidden_size * (2 * heads * dim + 2 * kv_heads * dim + 3 * target.intermediate_size)
    tables = target.vocab_size * target.hidden_size * (1 if target.tie_word_embeddings else 2)
    taps = drafter.dflash_config["target_layer_ids"]
    here = recipe.layout in ("colocated", "offline")
    return Sizes(
        hidden=drafter.hidden_size,
        intermediate=drafter.intermediate_size,
        heads=drafter.num_attention_heads,
        kv_heads=drafter.num_key_value_heads,
        head_dim=drafter.head_dim,
        layers=drafter.num_hidden_layers,
        taps=len(taps),
        vocabulary=target.vocab_size,
        block=drafter.block_size,
        tokens=recipe.pack.tokens,
        anchors=recipe.pack.anchors,
        chunk=recipe.loss.chunk,
        target_weights=(target.num_hidden_layers * block if here else 0) + tables,
        target_block_weights=(max(taps) + 1) * block,
        target_intermediate=target.intermediate_size,
        width=width,
        recompute=recipe.recompute,
        muon=recipe.optim.kind == "muon",
        summed=drafters > 1 or recipe.optim.packs_per_step > 1,
        fp8_target=recipe.target.fp8,
        fp8_head=recipe.loss.fp8,
        fp8_drafter=recipe.drafter.fp8,
    )
