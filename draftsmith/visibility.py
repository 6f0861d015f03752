"""What each draft slot may see, as numbers: two half-open intervals per slot.

    context  [ctx_lo, ctx_hi)   tokens of the pack, whose features the target computed
    draft    [blk_lo, blk_hi)   draft slots of the pack, flat (block * B + slot)

A block with anchor a sees context at doc_start <= t < a: strictly before the anchor, because the anchor's own feature
does not exist yet when the block is drafted. It sees its own block and never another one. A window of w counts the
current token (query - key < w), so it slides with the slot, in the context as in the block. Document rule, strictness,
window, in-block rule and padding are all in the numbers: one mask function serves every layer and step.
Rules: DFlash, arXiv 2602.06036, section 4; windows as the servers have them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from draftsmith.shapes import TILE
from draftsmith.types import Intervals


def intervals(
    anchor: Int[np.ndarray, " anc"],
    doc_start: Int[np.ndarray, " anc"],
    block_size: int,
    *,
    window: int | None,
    causal: bool,
) -> Intervals:
    """Interval ends of every draft slot. `anchor` is -1 for an empty slot, which sees its own block only."""
    slot = np.arange(block_size)[None, :]
    first = np.arange(len(anchor))[:, None] * block_size  # slot 0 of each block, flat
    empty = anchor[:, None] < 0
    reach = block_size if window is None else window  # how far back within the block
    ctx_lo = np.broadcast_to(doc_start[:, None], empty.shape)
    if window is not None:
        ctx_lo = np.maximum(ctx_lo, anchor[:, None] + slot - window + 1)
    ctx_hi = np.broadcast_to(anchor[:, None], (len(anchor), block_size))
    ctx_lo, ctx_hi = np.where(empty, 0, ctx_lo), np.where(empty, 0, ctx_hi)
    ctx_lo = np.minimum(np.broadcast_to(ctx_lo, ctx_hi.shape), ctx_hi)  # a window may have left the context behind
    blk_lo = first + np.maximum(0, slot - reach + 1)
    blk_hi = first + (slot + 1 if causal else np.full_like(slot, block_size))

    def flat(ends) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(np.broadcast_to(ends, ctx_hi.shape), dtype=np.int32).reshape(-1))

    return Intervals(ctx_lo=flat(ctx_lo), ctx_hi=flat(ctx_hi), blk_lo=flat(blk_lo), blk_hi=flat(blk_hi))


def dense_mask(spans: Intervals, num_context: int) -> Bool[Tensor, "q key"]:
    """True where a draft slot sees a key; keys are the context tokens, then every draft slot."""
    num_slots = spans.ctx_lo.shape[0]
    context = torch.arange(num_context, device=spans.ctx_lo.device)
    draft = torch.arange(num_slots, device=spans.ctx_lo.device)
    sees_context = (context >= spans.ctx_lo[:, None]) & (context < spans.ctx_hi[:, None])
    sees_draft = (draft >= spans.blk_lo[:, None]) & (draft < spans.blk_hi[:, None])
    return torch.cat([sees_context, sees_draft], dim=1)


def row_masks(spans: Intervals, block_size: int, num_context: int) -> Bool[Tensor, "anc slot key"]:
    """As `dense_mask`, for blocks that each have a context of their own; keys are the context, then the own block."""
    ends = (spans.ctx_lo, spans.ctx_hi, spans.blk_lo, spans.blk_hi)
    ctx_lo, ctx_hi, blk_lo, blk_hi = (end.view(-1, block_size, 1) for end in ends)
    context = torch.arange(num_context, device=ctx_lo.device)
    first = torch.arange(0, ctx_lo.numel(), block_size, device=ctx_lo.device)
    draft = first[:, None, None] + torch.arange(block_size, device=ctx_lo.device)
    return torch.cat([(context >= ctx_lo) & (context < ctx_hi), (draft >= blk_lo) & (draft < blk_hi)], dim=-1)


class Tiles(NamedTuple):
    """Per tile of 128 draft slots the tiles of 128 keys that hold anything, ascending, and the other way round.

    Only the first `num` entries of a row mean something.
    """

    num_keys: Int[Tensor, " q_tile"]
    keys: Int[Tensor, "q_tile key_tile"]
    num_queries: Int[Tensor, " key_tile"]
    queries: Int[Tensor, "key_tile q_tile"]


class TileLists(NamedTuple):
    """Tiles that are seen whole, and those of which only a part is seen."""

    partial: Tiles
    full: Tiles


def tile_lists(spans: Intervals, num_context: int) -> TileLists:
    """The tiles a kernel must compute, from per-tile bounds of the interval ends: a few elementwise operations.

    With sorted anchors the bounds are tight. A tile that is listed without need costs time, never correctness: the mask
    still applies to every tile that is not full.
    """
    num_slots = spans.ctx_lo.shape[0]
    start = torch.arange(0, num_context + num_slots, TILE, device=spans.ctx_lo.device)
    present = torch.zeros(num_slots // TILE, start.shape[0], dtype=torch.bool, device=start.device)
    whole = present.clone()
    draft = ((spans.blk_lo + num_context), (spans.blk_hi + num_context))
    for lo, hi in ((spans.ctx_lo, spans.ctx_hi), draft):
        lo, hi = lo.view(-1, TILE), hi.view(-1, TILE)
        some = lo < hi  # a row that sees nothing here has no say in what is present, and forbids a whole tile
        first = torch.where(some, lo, num_context + num_slots).amin(1, keepdim=True)
        last = torch.where(some, hi, 0).amax(1, keepdim=True)
        present |= (first < start + TILE) & (last > start)
        whole |= (lo.amax(1, keepdim=True) <= start) & (hi.amin(1, keepdim=True) >= start + TILE)
    partial = present & ~whole
    return TileLists(*(Tiles(*listed(chosen), *listed(chosen.T.contiguous())) for chosen in (partial, whole)))


@torch.library.custom_op("draftsmith::listed", mutates_args=(), schema="(Tensor chosen) -> (Tensor, Tensor)")
def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many of each row are chosen, and their numbers, ascending, before those of the others; int32.

    An operation of its own: a sort is what torch.compile makes the slowest kernels of, and takes longest to compile.
    """
    order = torch.argsort((~chosen).int(), dim=1, stable=True)
    return chosen.sum(dim=1, dtype=torch.int32), order.int()


@listed.register_fake
def _(chosen):
    return chosen.new_empty(chosen.shape[0], dtype=torch.int32), chosen.new_empty(chosen.shape, dtype=torch.int32)
