"""AdamW of one weight in one Triton kernel: bf16 gradient in, fp32 master and moments updated, bf16 weight written.

Everything that differs from step to step and is known only to the device (the factor from clipping and normalisation,
whether the step is skipped, how many steps were taken) is read there. Reference: torch.optim.AdamW on the masters,
which is what a CPU runs.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _update(
    weight, gradient, master, exp_avg, exp_avg_sq, column_scale, step, factor, skipped,
    rate, beta1, beta2, eps, decay, size, columns, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skipped) == 0.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        grad = tl.load(gradient + at, mask=inside).to(tl.float32) * tl.load(factor)
        scale = 1.0
        if SCALED:
            scale = tl.load(column_scale + at % columns, mask=inside, other=1.0)
            grad = grad / scale
        value = tl.load(master + at, mask=inside)
        first = beta1 * tl.load(exp_avg + at, mask=inside) + (1.0 - beta1) * grad
        second = beta2 * tl.load(exp_avg_sq + at, mask=inside) + (1.0 - beta2) * grad * grad
        taken = tl.load(step)
        lr = tl.load(rate)
        unbias1 = 1.0 - tl.exp(taken * tl.log(beta1))
        unbias2 = 1.0 - tl.exp(taken * tl.log(beta2))
        value = value * (1.0 - lr * decay)
        value -= lr / unbias1 * first / (tl.sqrt(second / unbias2) + eps)
        tl.store(master + at, value, mask=inside)
        tl.store(exp_avg + at, first, mask=inside)
        tl.store(exp_avg_sq + at, second, mask=inside)
        tl.store(weight + at, (value / scale).to(weight.dtype.element_ty), mask=inside)


def update_(
    weight: Tensor,
    gradient: Tensor,
    master: Tensor,
    state: dict[str, Tensor],
    scale: Tensor | None,
    factor: Tensor,
    skipped: Tensor,
    *,
    lr: Tensor,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> None:
    """One weight's update in place. `state["step"]` must count this step already; `factor` multiplies the gradient."""
    size = weight.numel()
    _update[(triton.cdiv(size, BLOCK),)](
        weight, gradient.contiguous(), master, state["exp_avg"], state["exp_avg_sq"],
        master if scale is None else scale, state["step"], factor, skipped,
        lr, betas[0], betas[1], eps, decay, size, weight.shape[-1], SCALED=scale is not None, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
