"""Flex attention over visibility intervals: the fast path of a GPU.

One mask function reads four int32 tensors, and the tiles that can be skipped or need no mask are listed from per-tile
bounds, without ever making the dense grid. All layers and steps share one compiled kernel. Uncompiled flex attention
would compute every score, so it is never used; and it has no backward pass on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from draftsmith.types import Intervals
from draftsmith.visibility import TILE, tile_lists

KERNEL_OPTIONS: Any = {}
"""Tile sizes of the kernels, fixed so that nothing is tuned at run time; empty: torch's own choice."""

_compiled_flex = torch.compile(flex_attention, dynamic=False, fullgraph=True)


def flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None = None) -> Tensor:
    """Flex attention, [1, head, n, dim] each, never uncompiled."""
    attention = flex_attention if torch.compiler.is_compiling() else _compiled_flex
    options = KERNEL_OPTIONS or None
    return attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=True, kernel_options=options)


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
