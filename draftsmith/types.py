"""The nouns of the pipeline, and the words for their axes.

    tok   T tokens of one pack          anc   N anchor slots (one block each) of one pack
    slot  B slots of one block          drafted   its slots 1..B-1
    row   slots that carry loss, weighted ones first
    tap   tapped target blocks          hid   hidden size of the target and the drafter
    voc   vocabulary                    q     anc * slot, every draft slot of the pack in order

A pack *is* the batch, so nothing here has a leading axis of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One tokenised document: a conversation as the target would have seen and written it."""

    id: str
    """Stable, content-based; the key of its anchors and its place in the ledger."""
    tokens: Int[np.ndarray, " n"]
    supervised: Bool[np.ndarray, " n"]
    """True where the target would have produced the token."""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """What each draft slot sees: context [ctx_lo, ctx_hi) and draft slots [blk_lo, blk_hi)."""

    ctx_lo: Int[Tensor, " q"]
    ctx_hi: Int[Tensor, " q"]
    blk_lo: Int[Tensor, " q"]
    blk_hi: Int[Tensor, " q"]


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The draft part of a pack. An empty anchor slot has anchor -1, weight 0, and sees itself only."""

    anchor: Int[Tensor, " anc"]
    """Index of the anchor token within the pack."""
    tokens: Int[Tensor, "anc slot"]
    position: Int[Tensor, "anc slot"]
    """Position within the document: the anchor's, then one more per slot."""
    label: Int[Tensor, "anc slot"]
    weight: Float[Tensor, "anc slot"]
    full: Intervals
    sliding: Intervals
    rows: Int[Tensor, " row"]
    """Flat slot numbers 1..B-1 of every block, those with weight first, in order."""
    num_rows: int
    """How many of `rows` carry weight; known on the host, so no synchronisation."""

    def to(self, device: torch.device) -> Blocks:
        return _move(self, device)


@dataclass(frozen=True, kw_only=True)
class Pack:
    """A fixed-size batch: T tokens of whole documents, and N blocks anchored in them."""

    tokens: Int[Tensor, " tok"]
    position: Int[Tensor, " tok"]
    """Restarts at 0 with each document; the padded tail counts as one more document."""
    doc_start: Int[Tensor, " tok"]
    """Index within the pack at which the token's document begins."""
    doc_lengths: tuple[int, ...]
    blocks: Blocks
    epoch: int
    index: int
    samples: tuple[int, ...]
    """Row numbers of the documents in the prepared set, in the order they stand in the pack."""
    sample_ids: tuple[str, ...]
    num_supervised: int
    num_labelled: int
    """Supervised tokens that are the label of at least one slot."""

    @property
    def num_tokens(self) -> int:
        """Tokens of real documents, the padded tail excluded."""
        return sum(self.doc_lengths)

    def to(self, device: torch.device, into: Int[Tensor, " byte"] | None = None) -> Pack:
        """A copy there; with `into`, bytes of `staging_size` on a GPU, the copy's tensors are views of these."""
        return _move(self, device, into)


@dataclass(frozen=True, kw_only=True)
class Features:
    """The frozen target's hidden states: one row per token, the taps side by side."""

    context: Float[Tensor, "tok tap_hid"]


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The drafter's normed output for slots 1..B-1 of every block; the target's head reads it."""

    hidden: Float[Tensor, "anc drafted hid"]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A weighted sum and its weight. Packs and ranks are added up; the division happens once."""

    total: Float[Tensor, ""]
    weight: Float[Tensor, ""]
    parts: dict[str, Tensor]
    """Detached sums and counts for metrics, on the device."""


def staging_size(value) -> int:
    """Bytes of the one buffer in which a dataclass travels to a GPU."""
    return sum(_padded(leaf) for leaf in _leaves(value))


def _padded(leaf: Tensor) -> int:
    return -(-leaf.nbytes // 16) * 16


def _move(value, device: torch.device, into: Tensor | None = None):
    """A copy of a frozen dataclass with every tensor, at any depth, on `device`.

    To a GPU everything travels as one pinned buffer in one asynchronous copy, so the host does not wait.
    """
    leaves = _leaves(value)
    if device.type != "cuda":
        return _rebuilt(value, iter([leaf.to(device) for leaf in leaves]))
    starts = list(accumulate((_padded(leaf) for leaf in leaves), initial=0))
    staging = torch.empty(starts.pop(), dtype=torch.uint8, pin_memory=True)
    for start, leaf in zip(starts, leaves, strict=True):
        staging[start : start + leaf.nbytes].copy_(leaf.contiguous().reshape(-1).view(torch.uint8))
    there = staging.to(device, non_blocking=True) if into is None else into.copy_(staging, non_blocking=True)
    views = [
        there[start : start + leaf.nbytes].view(leaf.dtype).view(leaf.shape)
        for start, leaf in zip(starts, leaves, strict=True)
    ]
    return _rebuilt(value, iter(views))


def _leaves(value) -> list[Tensor]:
    """Every tensor of a dataclass, nested ones included, in the order of the fields."""
    found = []
    for field in fields(value):
        item = getattr(value, field.name)
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (Blocks, Intervals)):
            found += _leaves(item)
    return found


def _rebuilt(value, tensors: Iterator[Tensor]):
    """The dataclass with its tensors replaced, in the order of `_leaves`."""
    changes = {}
    for field in fields(value):
        item = getattr(value, field.name)
        if isinstance(item, Tensor):
            changes[field.name] = next(tensors)
        elif isinstance(item, (Blocks, Intervals)):
            changes[field.name] = _rebuilt(item, tensors)
    return replace(value, **changes)
