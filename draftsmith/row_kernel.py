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

BLOCK = 4096
LOWEST = tl.constexpr(-1e30)  # stands for minus infinity, whose differences would be NaN


@triton.jit
def _rows(logits, label, weight, nll, correct, in_topk, voc, topk, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * voc
    lane = tl.arange(0, BLOCK)
    want = tl.load(label + row)
    scale = tl.load(weight + row)
    wanted = tl.load(line + want).to(tl.float32)

    highest = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    higher = tl.zeros([BLOCK], tl.int32)
    earlier = tl.zeros([BLOCK], tl.int32)
    for start in range(0, voc, BLOCK):
        at = start + lane
        x = tl.load(line + at, mask=at < voc, other=LOWEST).to(tl.float32)
        top = tl.maximum(highest, x)
        total = total * tl.exp(highest - top) + tl.exp(x - top)
        highest = top
        higher += (x > wanted).to(tl.int32)
        earlier += ((x == wanted) & (at < want)).to(tl.int32)
    top = tl.max(highest, 0)
    norm = tl.sum(total * tl.exp(highest - top), 0)
    num_higher = tl.sum(higher, 0)
    tl.store(nll + row, tl.log(norm) + top - wanted)
    tl.store(correct + row, (num_higher + tl.sum(earlier, 0)) == 0)
    tl.store(in_topk + row, num_higher < topk)

    for start in range(0, voc, BLOCK):
        at = start + lane
        x = tl.load(line + at, mask=at < voc, other=LOWEST).to(tl.float32)
        slope = tl.exp(x - top) / norm
        slope = scale * tl.where(at == want, slope - 1.0, slope)
        tl.store(line + at, slope.to(logits.dtype.element_ty), mask=at < voc)


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
        logits, label, weight, nll, correct, in_topk, logits.shape[1], topk, BLOCK=BLOCK, num_warps=16
    )
