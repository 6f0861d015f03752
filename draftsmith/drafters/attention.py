"""Attention of draft slots over [context ; draft slots], on a CPU and on a GPU.

The reference is scaled dot product with the dense mask of the visibility intervals. It is the CPU's path (flex
attention has no backward there) and what the fast path is tested against.

The fast path is flex attention with the same intervals as data: one mask function reads four int32 tensors, and the
tiles that can be skipped or need no mask are listed from per-tile bounds, without ever making the dense grid. All
layers and steps share one compiled kernel. Uncompiled flex attention would compute every score, so it is never used.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from draftsmith.types import Intervals
from draftsmith.visibility import TILE, tile_lists

_compiled_flex = torch.compile(flex_attention, dynamic=False, fullgraph=True)


def attend(
    query: Float[Tensor, "q head dim"],
    key: Float[Tensor, "key kv_head dim"],
    value: Float[Tensor, "key kv_head dim"],
    mask: Bool[Tensor, "q key"] | BlockMask,
) -> Float[Tensor, "q head dim"]:
    """Grouped-query attention; each key and value head serves an equal share of the query heads, in order."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    if isinstance(mask, BlockMask):
        out = flex(query, key, value, mask)
    else:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None = None) -> Tensor:
    """Flex attention, [1, head, n, dim] each, never uncompiled."""
    attention = flex_attention if torch.compiler.is_compiling() else _compiled_flex
    return attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)


def flex_mask(spans: Intervals, num_context: int) -> BlockMask:
    """The intervals as a flex attention mask. The context and the draft part must be whole tiles.

    Without context (0 tokens) the draft part is all there is: then the slots may be a target's own tokens.
    """
    num_slots = spans.ctx_lo.shape[0]
    assert num_context % TILE == 0 and num_slots % TILE == 0, (num_context, num_slots)
    ctx_lo, ctx_hi = spans.ctx_lo, spans.ctx_hi
    blk_lo, blk_hi = spans.blk_lo + num_context, spans.blk_hi + num_context

    def sees(batch, head, slot, key):
        in_context = (key >= ctx_lo[slot]) & (key < ctx_hi[slot])
        return in_context | ((key >= blk_lo[slot]) & (key < blk_hi[slot]))

    lists = tile_lists(spans, num_context)
    return BlockMask.from_kv_blocks(
        lists.num_partial[None, None],
        lists.partial[None, None],
        lists.num_full[None, None],
        lists.full[None, None],
        BLOCK_SIZE=TILE,
        mask_mod=sees,
        seq_lengths=(num_slots, num_context + num_slots),
    )
