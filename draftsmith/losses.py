"""Cross-entropy through the target's frozen head, without ever holding all logits.

The head is frozen, so a row needs two matrix products only: its logits, and the gradient of the loss with respect to
its hidden state. Both happen in the forward pass, chunk by chunk; the gradient is all that is kept. Weights are known
beforehand, so the gradient is exact, and it is the gradient of the weighted *sum*: the caller divides once, by the
weight of the whole optimizer step over all packs and ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftsmith import fp8
from draftsmith.types import Draft


class RowLoss(NamedTuple):
    """What the frozen head says about each row."""

    total: Float[Tensor, ""]
    """Weighted sum of the rows' cross-entropies; the only part with a gradient."""
    nll: Float[Tensor, " row"]
    correct: Bool[Tensor, " row"]
    """The label is the head's first choice."""
    in_topk: Bool[Tensor, " row"]
    """Fewer than k tokens score higher than the label; all False when topk is 0."""


class FrozenHeadLoss(torch.autograd.Function):
    """See the module's text. `forward` returns RowLoss's four tensors."""

    @staticmethod
    def forward(ctx, hidden, head, label, weight, chunk: int, topk: int, fp8_head: fp8.Head | None):
        gradient = torch.empty_like(hidden)
        nll = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        correct = torch.empty(hidden.shape[0], dtype=torch.bool, device=hidden.device)
        in_topk = torch.zeros_like(correct)
        chunk_loss = _fused_chunk if hidden.is_cuda and hidden.dtype == torch.bfloat16 else _chunk
        logits = hidden.new_empty(0 if fp8_head else min(chunk, hidden.shape[0]), head.shape[0])
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            facts = (label[rows], weight[rows], nll[rows], correct[rows], in_topk[rows], topk)
            if fp8_head:
                gradient[rows] = _fp8_chunk(hidden[rows], head, fp8_head, *facts)
            else:
                out = logits[: hidden.shape[0] - start]
                torch.mm(chunk_loss(torch.mm(hidden[rows], head.T, out=out), *facts), head, out=gradient[rows])
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(nll, correct, in_topk)
        return (nll * weight).sum(), nll, correct, in_topk

    @staticmethod
    def backward(ctx, grad_total, *_):
        (gradient,) = ctx.saved_tensors
        return gradient * grad_total, None, None, None, None, None, None


class TakeRows(torch.autograd.Function):
    """`x[rows]` for distinct rows: the gradient is written back, where plain indexing would sort and add up."""

    @staticmethod
    def forward(ctx, x, rows):
        ctx.save_for_backward(rows)
        ctx.num = x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num, grad.shape[1]).index_copy_(0, rows, grad), None


def drafted_rows(draft: Draft, rows: Int[Tensor, " row"]) -> Float[Tensor, "row hid"]:
    """What was drafted for the given flat slots, all different and none of them slot 0 of its block."""
    block = draft.hidden.shape[1] + 1
    return TakeRows.apply(draft.hidden.flatten(0, 1), rows - rows // block - 1)


def _chunk(logits, label, weight, nll, correct, in_topk, topk: int) -> Float[Tensor, "row voc"]:
    """Fill `nll`, `correct`, `in_topk` for a chunk; returns the gradient of its weighted loss. The reference."""
    kind, logits, want = logits.dtype, logits.float(), label[:, None]
    highest, first = logits.max(dim=1, keepdim=True)
    wanted = logits.gather(1, want)
    correct.copy_((first == want)[:, 0])
    if topk:
        in_topk.copy_((logits > wanted).sum(dim=1) < topk)
    odds = logits.sub_(highest).exp_()
    norm = odds.sum(dim=1, keepdim=True)
    nll.copy_((norm.log() + highest - wanted)[:, 0])
    return odds.mul_(weight[:, None] / norm).scatter_add_(1, want, -weight[:, None]).to(kind)


def _fused_chunk(logits, label, weight, nll, correct, in_topk, topk: int) -> Float[Tensor, "row voc"]:
    """The same in one kernel, in place."""
    from draftsmith.row_kernel import loss_and_slope_  # Triton, which a CPU machine may not have

    loss_and_slope_(logits, label, weight, nll, correct, in_topk, topk)
    return logits


def _fp8_chunk(
    hidden, head, fp8_head: fp8.Head, label, weight, nll, correct, in_topk, topk: int
) -> Float[Tensor, "row hid"]:
    """Fill `nll`, `correct`, `in_topk` for a chunk; returns the gradient of its weighted loss, both products in FP8.

    A row of the gradient of the logits is the softmax, in e4m3 relative to its largest entry, except at the label: that
    entry, mostly the largest by far and minus a probability otherwise, stays in fp32 and meets the real head.
    """
    if hidden.is_cuda:
        from draftsmith.fp8_kernel import quantise_rows, rows_  # Triton, which a CPU machine may not have

        quantised = fp8.Quantised(*quantise_rows(hidden, fp8.SMALLEST_SCALE))
        logits = fp8.multiply(quantised, fp8_head.rows, hidden.dtype, fast=True)
        slope, scale, at_label = rows_(logits, label, weight, nll, correct, in_topk, topk)
    else:
        logits = fp8.multiply(fp8.quantise(hidden), fp8_head.rows, hidden.dtype, fast=True)
        slope, scale, at_label = _fp8_slope(logits, label, weight, nll, correct, in_topk, topk)
    gradient = fp8.multiply(fp8.Quantised(slope, scale), fp8_head.columns, hidden.dtype, fast=False)
    return gradient + at_label * head[label].float()


def _fp8_slope(logits, label, weight, nll, correct, in_topk, topk: int) -> tuple[Tensor, Tensor, Tensor]:
    """The reference of `fp8_kernel.rows_`: values and scale of the gradient off the label, and its entry there."""
    odds, want = torch.softmax(logits.float(), dim=1), label[:, None]
    _chunk(logits, label, weight, nll, correct, in_topk, topk)  # works in place
    at_label = weight[:, None] * (odds.gather(1, want) - 1)
    odds = odds.scatter(1, want, 0.0)
    largest = odds.amax(dim=1, keepdim=True)
    slope = (odds / largest * fp8.LARGEST).to(fp8.E4M3)
    return slope, weight[:, None] * largest / fp8.LARGEST, at_label


def frozen_head_loss(
    hidden: Float[Tensor, "row hid"],
    head: Float[Tensor, "voc hid"],
    label: Int[Tensor, " row"],
    weight: Float[Tensor, " row"],
    *,
    chunk: int,
    topk: int = 0,
    fp8_head: fp8.Head | None = None,
) -> RowLoss:
    """Weighted cross-entropy of `hidden @ head.T` against `label`; logits exist for `chunk` rows at a time.

    With `fp8_head`, the same head quantised, both of its products are FP8.
    """
    return RowLoss(*FrozenHeadLoss.apply(hidden, head, label, weight, chunk, topk, fp8_head))
