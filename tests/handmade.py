"""Documents, packs and drafters made by hand, for tests that must know every token and every anchor."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from draftsmith.anchors import BlockShape, build_blocks
from draftsmith.config import DFlashOptions
from draftsmith.drafters.dflash import DFlashDrafter, build_config
from draftsmith.types import Features, Pack, Sample
from tests.tiny import tiny_target

MASK = 300
"""A row of the tiny targets' embedding that no text uses."""


def document(length: int, *, first: int = 0, supervised: list[int] | None = None, name: str = "document") -> Sample:
    """Tokens first, first + 1, ...; supervised at the given positions, everywhere by default."""
    flags = np.ones(length, bool) if supervised is None else np.isin(np.arange(length), supervised)
    return Sample(id=name, tokens=np.arange(first, first + length), supervised=flags)


def block_shape(size: int, *, gamma: float = 4.0, window: int | None = None, **causal: bool) -> BlockShape:
    return BlockShape(block_size=size, mask_token_id=MASK, gamma=gamma, window=window, **causal)


def pack_of(
    documents: list[Sample],
    anchors: list[list[int]],
    shape: BlockShape,
    *,
    num_tokens: int | None = None,
    num_anchors: int | None = None,
) -> Pack:
    """A pack of these documents with blocks at these anchors, given per document as positions in it."""
    lengths = [len(d.tokens) for d in documents]
    starts = np.cumsum([0, *lengths])
    budget = num_tokens or int(starts[-1])
    padding = budget - int(starts[-1])
    doc_start = np.concatenate([np.repeat(starts[:-1], lengths), np.full(padding, starts[-1])])
    tokens = np.concatenate([*(d.tokens for d in documents), np.zeros(padding, np.int64)])
    supervised = np.concatenate([*(d.supervised for d in documents), np.zeros(padding, bool)])
    owner = np.repeat(np.arange(len(documents)), [len(a) for a in anchors])
    anchor = starts[owner] + np.concatenate([np.asarray(a, np.int64) for a in anchors])
    blocks = build_blocks(
        tokens, supervised, anchor, starts[owner], starts[owner + 1], num_anchors or max(1, len(anchor)), shape
    )
    return Pack(
        tokens=torch.from_numpy(tokens),
        position=torch.from_numpy(np.arange(budget) - doc_start),
        doc_start=torch.from_numpy(doc_start),
        doc_lengths=tuple(lengths),
        blocks=blocks,
        epoch=0,
        index=0,
        samples=tuple(range(len(documents))),
        sample_ids=tuple(d.id for d in documents),
        num_supervised=int(supervised.sum()),
        num_labelled=0,
    )


def tiny_drafter(
    *, block_size: int = 8, num_layers: int = 2, layer_ids: tuple[int, ...] = (0, 2), **options
) -> DFlashDrafter:
    """A random drafter for `tiny_target("qwen3")`, with norms that are not all ones."""
    chosen = DFlashOptions(num_layers=num_layers, block_size=block_size, mask_token_id=MASK, **options)
    drafter = DFlashDrafter(build_config(chosen, tiny_target("qwen3").config, layer_ids))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in drafter.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.1 * noise if weight.ndim == 1 else noise / weight.shape[1] ** 0.5)
    return drafter


def shape_of(drafter: DFlashDrafter, *, gamma: float = 4.0) -> BlockShape:
    """The block shape that belongs to a drafter."""
    config = drafter.config
    return block_shape(
        config.block_size,
        gamma=gamma,
        window=config.sliding_window,
        causal_full=config.causal("full_attention"),
        causal_sliding=config.causal("sliding_attention"),
    )


def random_features(num_tokens: int, drafter: DFlashDrafter, seed: int = 0) -> Features:
    width = len(drafter.config.target_layer_ids) * drafter.config.hidden_size
    return Features(context=torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(seed)))


def random_embedding(drafter: DFlashDrafter, seed: int = 1) -> Tensor:
    """An embedding table for every token of the vocabulary."""
    shape = (drafter.config.vocab_size, drafter.config.hidden_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
