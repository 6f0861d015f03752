"""AdamW on fp32 masters, the learning-rate schedule, clipping, and the guard against non-finite gradients.

Compute weights may be bf16; the numbers that are updated are fp32 (peers that updated bf16 weights left every norm at
exactly 1.0). A weight may also be *scaled*: its master is weight * scale, so that AdamW's steps, which have about the
same size for every entry, suit inputs of very unequal sizes. The served weight is master / scale, nothing else changes.

Nothing here waits for the device: a bad step is skipped by the fused kernel itself, through its `found_inf` input.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from draftsmith.config import OptimOptions


def learning_rate(step: int, num_steps: int, options: OptimOptions) -> float:
    """Linear warm-up, then a cosine from the peak to `min_lr` of it. A pure function of the step (from 0)."""
    warmup = max(1, round(options.warmup * num_steps))
    if step < warmup:
        return options.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    floor = options.min_lr
    return options.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


class MasterAdamW:
    """One optimizer for fp32 and bf16 weights, scaled or not. State is a flat dict of named tensors."""

    def __init__(self, model: nn.Module, options: OptimOptions, scales: dict[str, Tensor]) -> None:
        self.options = options
        self.weights = dict(model.named_parameters())
        self.scales = {name: scale.float() for name, scale in scales.items()}
        self.masters = {name: self._master(name, weight) for name, weight in self.weights.items()}
        matrices = [m for m in self.masters.values() if m.ndim > 1]
        vectors = [m for m in self.masters.values() if m.ndim <= 1]
        self.adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            fused=True,
        )
        self._write_back()  # dividing by a scale rounds: from the start a weight is what its master makes it

    def _master(self, name: str, weight: nn.Parameter) -> Tensor:
        if weight.dtype == torch.float32 and name not in self.scales:
            return weight
        wide = weight.detach().float().clone()
        return nn.Parameter(wide * self.scales[name] if name in self.scales else wide)

    @torch.no_grad()
    def step(self, weight: Float[Tensor, ""], lr: float) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Update from gradients of the weighted sum, divided here by the step's whole weight.

        Returns the gradient norm before clipping, and 1.0 if the step was skipped: its gradient was not finite, or
        nothing was supervised. A skipped step changes neither weights nor moments.
        """
        for name, master in self.masters.items():
            gradient = self.weights[name].grad
            assert gradient is not None, f"no backward pass reached {name}"
            if master is not self.weights[name]:
                gradient = gradient.float()
                master.grad = gradient / self.scales[name] if name in self.scales else gradient
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        torch._foreach_div_(gradients, weight.clamp_min(torch.finfo(torch.float32).tiny))
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, (self.options.clip / (norm + 1e-6)).clamp_max(1.0))
        skipped = 1.0 - (torch.isfinite(norm) & (weight > 0)).float()
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.grad_scale, self.adamw.found_inf = None, skipped  # read by the fused kernel (as GradScaler does)
        self.adamw.step()
        self._write_back()
        return norm, skipped

    @torch.no_grad()
    def _write_back(self) -> None:
        for name, master in self.masters.items():
            if master is not self.weights[name]:
                self.weights[name].copy_(master / self.scales[name] if name in self.scales else master)

    def zero_grad(self) -> None:
        for weight in self.weights.values():
            weight.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Masters, moments and step counts, by weight name; the scales are the caller's."""
        flat = {}
        for name, master in self.masters.items():
            flat[f"master.{name}"] = master.detach()
            for part, value in self.adamw.state.get(master, {}).items():
                flat[f"{part}.{name}"] = value
        return flat

    @torch.no_grad()
    def load(self, flat: dict[str, Tensor]) -> None:
        """The inverse of `tensors`, in place; the scales must be those this optimizer was built with."""
        for name, master in self.masters.items():
            master.copy_(flat[f"master.{name}"])
            parts = {part: f"{part}.{name}" for part in ("step", "exp_avg", "exp_avg_sq")}
            if all(key in flat for key in parts.values()):
                self.adamw.state[master] = {part: flat[key].clone().to(master.device) for part, key in parts.items()}
        self._write_back()
