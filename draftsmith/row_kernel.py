"""One Triton kernel per chunk of logits: loss, hits, and the gradient written over the logits.

Two passes over a row: the first finds the largest logit, the sum of exponentials and how many tokens beat the label;
the second turns the logits into weight * (softmax - one-hot) where they stand. Needs a CUDA device; the reference, and
what a CPU runs, is in `losses`.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

BLOCK, WARPS = 4096, 16  # the fastest of sixteen on an H200
LOWEST = tl.constexpr(-1e30)  # stands for minus infinity, whose differences would be NaN


@triton.jit
def survey(line, want, topk, nll, correct, in_topk, voc, RIVAL: tl.constexpr, BLOCK: tl.constexpr):
    """The first pass over a row. Stores its loss and hits at the three addresses.

    Returns the label's logit, the largest logit, the sum of exponentials relative to it, and, with RIVAL, the largest
    logit but the label's.
    """
    lane = tl.arange(0, BLOCK)
    wanted = tl.load(line + want).to(tl.float32)
    highest = tl.full([BLOCK], LOWEST, tl.float32)
    rival = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    higher = tl.zeros([BLOCK], tl.int32)
    earlier = tl.zeros([BLOCK], tl.int32)
    for start in range(0, voc, BLOCK):
        at = start + lane
        x = tl.load(line + at, mask=at < voc, other=LOWEST, eviction_policy="evict_last").to(tl.float32)
        smaller = tl.exp(-tl.abs(x - highest))  # of the two, relative to the larger one
        total = tl.where(x > highest, total * smaller + 1.0, total + smaller)
        highest = tl.maximum(highest, x)
        if RIVAL:
            rival = tl.maximum(rival, tl.where(at == want, LOWEST, x))
        higher += (x > wanted).to(tl.int32)
        earlier += ((x == wanted) & (at < want)).to(tl.int32)
    top = tl.max(highest, 0)
    norm = tl.sum(total * tl.exp(highest - top), 0)
    num_higher = tl.sum(higher, 0)
    tl.store(nll, tl.log(norm) + top - wanted)
    tl.store(correct, (num_higher + tl.sum(earlier, 0)) == 0)
    tl.store(in_topk, num_higher < topk)
    return wanted, top, norm, tl.max(rival, 0)


@triton.jit
def _rows(logits, label, weight, nll, correct, in_topk, voc, topk, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * voc
    want = tl.load(label + row)
    _, top, norm, _ = survey(line, want, topk, nll + row, correct + row, in_topk + row, voc, False, BLOCK)
    scale = tl.load(weight + row)
    share = scale / norm
    for start in range(0, voc, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(line + at, mask=at < voc, other=LOWEST, eviction_policy="evict_first").to(tl.float32)
        slope = tl.exp(x - top) * share
        slope = tl.where(at == want, slope - scale, slope)
        tl.store(line + at, slope.to(logits.dtype.element_ty), mask=at < voc, eviction_policy="evict_first")


def loss_and_slope_(
    logits: Float[Tensor, "row voc"],
    label: Int[Tensor, " row"],
    weight: Float[Tensor, " row"],
    nll: Float[Tensor, " row"],
    correct: Bool[Tensor, " row"],
    in_topk: Bool[Tensor, " row"],
    topk: int,
) -> None:
    """Fill `nll`, `correct`, `in_topk`, and overwrite `logits` with the gradient of the weighted sum of losses."""
    assert logits.is_contiguous() and label.dtype == torch.int64
    _rows[(logits.shape[0],)](
        logits, label, weight, nll, correct, in_topk, logits.shape[1], topk, BLOCK=BLOCK, num_warps=WARPS
    )
