"""FP8 beside the loss, in Triton: rows quantised in one pass over memory, and the loss's gradient born quantised.

`rows_` is the row kernel's twin (see `row_kernel`): instead of the bf16 gradient it writes e4m3 values with one scale a
row. The label's own entry, which would dwarf the others of the row, is kept apart in fp32: what remains are softmax
probabilities relative to the largest of them. Needs a CUDA device; the references are in `fp8` and `losses`.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftsmith.row_kernel import BLOCK, LOWEST, WARPS, survey


@triton.jit
def _quantise(x, values, scale, inner, smallest, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, inner, BLOCK):
        at = start + lane
        largest = tl.maximum(largest, tl.abs(tl.load(x + row * inner + at, mask=at < inner, other=0.0).to(tl.float32)))
    unit = tl.maximum(tl.max(largest, 0) / 448.0, smallest)
    tl.store(scale + row, unit)
    for start in range(0, inner, BLOCK):
        at = start + lane
        part = tl.load(x + row * inner + at, mask=at < inner, other=0.0).to(tl.float32)
        tl.store(values + row * inner + at, (part / unit).to(values.dtype.element_ty), mask=at < inner)


def quantise_rows(x: Float[Tensor, "row inner"], smallest: float) -> tuple[Tensor, Tensor]:
    """`fp8.quantise` in one kernel, for code that is not compiled."""
    assert x.is_contiguous()
    values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    block = min(4096, triton.next_power_of_2(x.shape[1]))
    _quantise[(x.shape[0],)](x, values, scale, x.shape[1], smallest, BLOCK=block, num_warps=8)
    return values, scale


@triton.jit
def _rows(
    logits, label, weight, nll, correct, in_topk, slope, scale, at_label, voc, topk, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * voc
    want = tl.load(label + row)
    wanted, top, norm, rival = survey(
        line, want, topk, nll + row, correct + row, in_topk + row, voc, True, BLOCK
    )  # fmt: skip
    share = tl.load(weight + row)
    tl.store(scale + row, share * tl.exp(rival - top) / norm / 448.0)
    tl.store(at_label + row, share * (tl.exp(wanted - top) / norm - 1.0))
    for start in range(0, voc, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(line + at, mask=at < voc, other=LOWEST).to(tl.float32)
        value = tl.where(at == want, 0.0, tl.exp(x - rival) * 448.0)
        tl.store(slope + row * voc + at, value.to(slope.dtype.element_ty), mask=at < voc)


def rows_(
    logits: Float[Tensor, "row voc"],
    label: Int[Tensor, " row"],
    weight: Float[Tensor, " row"],
    nll: Float[Tensor, " row"],
    correct: Bool[Tensor, " row"],
    in_topk: Bool[Tensor, " row"],
    topk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fill `nll`, `correct`, `in_topk`; returns the gradient's values, their scales, and its entry at the label."""
    assert logits.is_contiguous() and label.dtype == torch.int64
    slope = torch.empty_like(logits, dtype=torch.float8_e4m3fn)
    scale = torch.empty(logits.shape[0], 1, dtype=torch.float32, device=logits.device)
    at_label = torch.empty_like(scale)
    _rows[(logits.shape[0],)](
        logits, label, weight, nll, correct, in_topk, slope, scale, at_label, logits.shape[1], topk,
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return slope, scale, at_label
