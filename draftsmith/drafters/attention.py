"""Attention of draft slots over [context ; draft slots].

The reference is scaled dot product with the dense mask of the visibility intervals: the CPU's path, and what the fast
path, flex attention over tiles (`flex`), is tested against.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from draftsmith.flex import flex


def attend(
    query: Float[Tensor, "q head dim"],
    key: Float[Tensor, "key kv_head dim"],
    value: Float[Tensor, "key kv_head dim"],
    mask: Bool[Tensor, "q key"] | BlockMask,
) -> Float[Tensor, "q head dim"]:
    """Grouped-query attention; each key and value head serves an equal share of the query heads, in order."""
    if not isinstance(mask, BlockMask):
        return attend_rows(query[None], key[None], value[None], mask[None])[0]
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    return flex(query, key, value, mask)[0].transpose(0, 1)


def attend_rows(
    query: Float[Tensor, "row q head dim"],
    key: Float[Tensor, "row key kv_head dim"],
    value: Float[Tensor, "row key kv_head dim"],
    mask: Bool[Tensor, "row q key"],
) -> Float[Tensor, "row q head dim"]:
    """`attend` for rows that have keys of their own."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None], enable_gqa=True)
    return out.transpose(1, 2)
