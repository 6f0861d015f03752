"""Attention of a target over packed documents, under a name of its own in transformers.

With a tile mask (a GPU's capture) it is flex attention, documents isolated by the tiles' intervals; with anything else
(decoding, and a CPU) it is transformers' scaled dot product.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from draftsmith.flex import flex
from draftsmith.types import Intervals

NAME = "draftsmith_packed"


def document_spans(doc_start: Int[Tensor, " tok"]) -> Intervals:
    """Causal, and within the document: token t sees [doc_start, t]."""
    index = torch.arange(doc_start.shape[0], device=doc_start.device, dtype=torch.int32)
    nothing = torch.zeros_like(index)
    return Intervals(ctx_lo=nothing, ctx_hi=nothing, blk_lo=doc_start.int(), blk_hi=index + 1)


def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """transformers' interface: [1, heads, tok, dim] in, [1, tok, heads, dim] out."""
    if isinstance(attention_mask, BlockMask):
        return flex(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
