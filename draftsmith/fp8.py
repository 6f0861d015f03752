"""FP8 products: both factors e4m3, one scale a row, accumulated and returned wide.

A row's scale maps its largest entry to 448, the largest e4m3 number. A product contracts the rows' inner axis, so each
factor is quantised along it: the gradient of a weight needs both factors once more, turned. About 3.7 % relative error
a product on gaussian data, nearly twice the bf16 rate on a Hopper GPU. Three uses, options that are off by default:

    target.fp8    the frozen target's linear layers while it captures features (decoding keeps the real weights)
    loss.fp8      the frozen head's two products
    drafter.fp8   the decoder layers' linear layers in training, forward and backward; masters stay fp32, and what is
                  saved, decoded and served are the ordinary weights

Recipe: row-wise scaled training, arXiv 2209.05433 and torchao's; the loss's own treatment is in `losses`.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_SCALE = 1e-30  # of a row of zeros
UNIT = 16  # both axes of a factor must be multiples of this


class Quantised(NamedTuple):
    """`values * scale` stands for a matrix; products contract the inner axis."""

    values: Float[Tensor, "row inner"]
    scale: Float[Tensor, "row 1"]


class Head(NamedTuple):
    """A frozen head for both products of the loss: logits contract the hidden axis, their gradient the vocabulary."""

    rows: Quantised  # voc hid
    columns: Quantised  # hid voc


def quantise(x: Float[Tensor, "row inner"]) -> Quantised:
    """Row-wise, in plain operations that torch.compile fuses; not-finite entries make not-finite products."""
    wide = x.float()
    scale = (wide.abs().amax(dim=1, keepdim=True) / LARGEST).clamp_min(SMALLEST_SCALE)
    return Quantised((wide / scale).to(E4M3).contiguous(), scale)


def multiply(a: Quantised, b: Quantised, dtype: torch.dtype, *, fast: bool) -> Float[Tensor, "row col"]:
    """a @ b.T. `fast` accumulates in the matrix units' short registers, otherwise partial sums are added in fp32."""
    if not a.values.is_cuda:  # the reference
        return ((a.values.float() @ b.values.float().T) * a.scale * b.scale.T).to(dtype)
    return torch._scaled_mm(
        a.values, b.values.T, scale_a=a.scale, scale_b=b.scale.T, out_dtype=dtype, use_fast_accum=fast
    )


def quantised_head(head: Float[Tensor, "voc hid"]) -> Head:
    return Head(_in_parts(head), _in_parts(head.T))


def _in_parts(matrix: Float[Tensor, "row inner"]) -> Quantised:
    """`quantise` in parts of the rows: its fp32 copies of a whole head would be the largest tensors of a run."""
    parts = [quantise(part) for part in matrix.split(max(1, 2**26 // matrix.shape[1]))]
    return Quantised(torch.cat([p.values for p in parts]), torch.cat([p.scale for p in parts]))


class FrozenLinear(nn.Module):
    """A frozen linear layer in FP8. Its input has one leading axis of any kind, or two."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        values, scale = quantise(linear.weight.detach())
        self.values: Tensor
        self.scale: Tensor
        self.register_buffer("values", values)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = multiply(quantise(flat), Quantised(self.values, self.scale), x.dtype, fast=True)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], -1)


def frozen_copy(layer: nn.Module) -> nn.Module:
    """The layer with its linear layers in FP8; everything else is shared with the original, which is unchanged."""
    shared = {id(tensor): tensor for tensor in [*layer.parameters(), *layer.buffers()]}
    twin = copy.deepcopy(layer, shared)
    for parent in list(twin.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, FrozenLinear(child))
    return twin


class _TrainedProduct(torch.autograd.Function):
    """x @ weight.T, and both gradients, each as an FP8 product."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return multiply(quantise(x), quantise(weight), x.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = multiply(quantise(grad), quantise(weight.T), grad.dtype, fast=False)
        grad_weight = multiply(quantise(grad.T), quantise(x.T), grad.dtype, fast=False)
        return grad_x, grad_weight


class TrainedLinear(nn.Linear):
    """A linear layer whose products are FP8 while it trains; evaluated, it is the ordinary layer."""

    def forward(self, x: Float[Tensor, "n inner"]) -> Float[Tensor, "n out"]:
        if not self.training:
            return super().forward(x)
        out = _TrainedProduct.apply(x, self.weight)
        return out if self.bias is None else out + self.bias


def train_in_fp8(module: nn.Module) -> None:
    """Every linear layer below `module` computes in FP8 from now on; its weights and their names stay."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                with torch.device("meta"):
                    linear = TrainedLinear(child.in_features, child.out_features, bias=child.bias is not None)
                linear.weight, linear.bias = child.weight, child.bias
                setattr(parent, name, linear.train(child.training))


def refusal(device: torch.device, dtype: torch.dtype, sizes: dict[str, int]) -> str | None:
    """Why FP8 products cannot run here; None if they can. `sizes`: the axes of every matrix, by the option's name."""
    if device.type != "cuda":
        return f"FP8 needs a GPU with FP8 matrix units (compute capability 9.0 or higher), and this is a {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (9, 0):
        return (
            f"FP8 needs a GPU of compute capability 9.0 or higher, and {torch.cuda.get_device_name(device)} has "
            f"{capability[0]}.{capability[1]}"
        )
    if dtype != torch.bfloat16:
        return f"FP8 products are returned as bfloat16, and target.dtype is {str(dtype).removeprefix('torch.')}"
    odd = [f"{name} is {size}" for name, size in sizes.items() if size % UNIT]
    if odd:
        return f"FP8 needs sizes that are multiples of {UNIT}, and {', '.join(odd)}"
    return None
