"""Where blocks start, and what stands in them: tokens, positions, labels, weights.

Position p is *supervised* if the target would have produced its token; a is a *legal anchor* iff a and a + 1 are
supervised and in one document. Slot 0 of a block holds the token x_a, slots 1..B-1 the mask token; slot k's label is
x_{a+k}, the token at its own position. Weights are exp(-(k-1)/gamma) from slot 1 on and stop for good at the first
position that is unsupervised or outside the document: serving never gets past it. (DFlash, arXiv 2602.06036.)

NumPy, in the loader's process: the training step draws nothing and synchronises nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int

from draftsmith.randomness import keyed_generator
from draftsmith.types import Blocks, Sample
from draftsmith.visibility import intervals

GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}  # the paper's choices


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """What a block looks like, whatever is in it."""

    block_size: int
    mask_token_id: int
    gamma: float
    window: int | None
    causal_full: bool = False
    causal_sliding: bool = True


def default_gamma(block_size: int) -> float:
    """The paper's decay for its block sizes; in proportion (0.45 B) for others."""
    return GAMMA.get(block_size, 0.45 * block_size)


def legal_anchors(supervised: Bool[np.ndarray, " n"]) -> Int[np.ndarray, " legal"]:
    """Positions p of one document with p and p + 1 supervised."""
    return np.flatnonzero(supervised[:-1] & supervised[1:])


def draw_anchors(sample: Sample, num: int, seed: int, epoch: int, visit: int = 0) -> Int[np.ndarray, " num"]:
    """`num` legal anchors without replacement, sorted; a function of the document, the seed and the epoch alone.

    `visit`: how often the epoch has seen the document before; others are drawn each time.
    """
    legal = legal_anchors(sample.supervised)
    again = (visit,) if visit else ()
    chosen = keyed_generator("anchors", seed, epoch, sample.id, *again).choice(len(legal), size=num, replace=False)
    return legal[np.sort(chosen)]


def build_blocks(
    tokens: Int[np.ndarray, " tok"],
    supervised: Bool[np.ndarray, " tok"],
    anchor: Int[np.ndarray, " used"],
    doc_start: Int[np.ndarray, " used"],
    doc_end: Int[np.ndarray, " used"],
    num_anchors: int,
    shape: BlockShape,
) -> Blocks:
    """Blocks at the given anchors (indices within the pack), padded with empty ones to `num_anchors`."""
    size, used = shape.block_size, len(anchor)
    assert used <= num_anchors, (used, num_anchors)
    slot = np.arange(size)
    at = anchor[:, None] + slot  # (used, B) index within the pack
    scored = at < doc_end[:, None]
    at = np.minimum(at, len(tokens) - 1)
    scored = np.logical_and.accumulate(scored & supervised[at], axis=1)
    decay = np.where(slot == 0, 0.0, np.exp(-(slot - 1) / shape.gamma))

    block_tokens = np.full((num_anchors, size), shape.mask_token_id)
    block_tokens[:used, 0] = tokens[anchor]
    position = np.tile(slot, (num_anchors, 1))
    position[:used] += (anchor - doc_start)[:, None]
    label = np.zeros((num_anchors, size), np.int64)
    label[:used] = np.where(scored, tokens[at], 0)
    weight = np.zeros((num_anchors, size), np.float32)
    weight[:used] = scored * decay
    every_anchor = np.full(num_anchors, -1)
    every_anchor[:used] = anchor
    every_start = np.zeros(num_anchors, np.int64)
    every_start[:used] = doc_start

    flat = weight.reshape(-1)
    candidates = np.flatnonzero(np.tile(slot > 0, num_anchors))
    rows = candidates[np.argsort(flat[candidates] == 0, kind="stable")]
    return Blocks(
        anchor=torch.from_numpy(every_anchor),
        tokens=torch.from_numpy(block_tokens),
        position=torch.from_numpy(position),
        label=torch.from_numpy(label),
        weight=torch.from_numpy(weight),
        full=intervals(every_anchor, every_start, size, window=None, causal=shape.causal_full),
        sliding=intervals(every_anchor, every_start, size, window=shape.window, causal=shape.causal_sliding),
        rows=torch.from_numpy(rows),
        num_rows=int(np.count_nonzero(flat)),
    )
