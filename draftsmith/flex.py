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
from draftsmith.visibility import TILE, Tiles, tile_lists

TILES: dict[int, Any] = {
    64: {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3},
    128: {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 128, "fwd_num_warps": 8, "fwd_num_stages": 3},
}
"""Options of the kernels by head dimension, for bf16 on a Hopper GPU; fixed, so that nothing is tuned at run time.

Elsewhere, and in the backward pass, torch's own choice was the best (docs/log.md).
"""

_compiled_flex = torch.compile(flex_attention, dynamic=False, fullgraph=True)


@torch.compiler.assume_constant_result
def _on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None = None) -> Tensor:
    """Flex attention, [1, head, n, dim] each, never uncompiled."""
    attention = flex_attention if torch.compiler.is_compiling() else _compiled_flex
    options = TILES.get(query.shape[-1]) if query.dtype == torch.bfloat16 and _on_hopper() else None
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

    partial, full = (Tiles(*(x[None, None] for x in tiles)) for tiles in tile_lists(spans, num_context))
    mask = BlockMask.from_kv_blocks(
        partial.num_keys,
        partial.keys,
        full.num_keys,
        full.keys,
        BLOCK_SIZE=TILE,
        mask_mod=sees,
        seq_lengths=(num_slots, num_context + num_slots),
        compute_q_blocks=False,
    )
    mask.q_num_blocks, mask.q_indices = partial.num_queries, partial.queries
    mask.full_q_num_blocks, mask.full_q_indices = full.num_queries, full.queries
    return mask
