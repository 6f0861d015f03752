"""AdamW, or Muon for the matrices, on fp32 masters; the schedule, clipping, and the guard against non-finite gradients.

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

from draftsmith import muon
from draftsmith.config import OptimOptions

TINY = torch.finfo(torch.float32).tiny  # nothing supervised: 0 / TINY is 0, and the step is skipped


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
        matrices = {name: m for name, m in self.masters.items() if m.ndim == 2} if options.kind == "muon" else {}
        self.state = {
            name: muon.fresh_state(master) if name in matrices else _fresh_state(master)
            for name, master in self.masters.items()
        }
        self.muon = muon.MatrixMuon(matrices, self.state, options)
        self.rate = torch.zeros((), device=next(iter(self.weights.values())).device)
        """The learning rate where a step that is captured, or a fused kernel, reads it."""
        groups: dict[float, list[Tensor]] = {options.weight_decay: [], 0.0: []}
        for name, master in self.masters.items():
            if name not in matrices:
                groups[options.weight_decay if master.ndim > 1 else 0.0].append(master)
        self.adamw = torch.optim.AdamW(
            [{"params": params, "weight_decay": decay} for decay, params in groups.items() if params],
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            fused=True,
        )
        self._share_state()
        self._write_back()  # dividing by a scale rounds: from the start a weight is what its master makes it

    def _master(self, name: str, weight: nn.Parameter) -> Tensor:
        if weight.dtype == torch.float32 and name not in self.scales:
            return weight
        wide = weight.detach().float().clone()
        return nn.Parameter(wide * self.scales[name] if name in self.scales else wide)

    @torch.no_grad()
    def step(
        self, weight: Float[Tensor, ""], lr: float | None, gradients: dict[str, Tensor] | None = None
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Update from gradients of the weighted sum, divided here by the step's whole weight.

        The gradients are those that backward left at the weights, unless they are given by name. On a GPU `lr` may be
        None: the rate that `self.rate` holds, for a step that is captured once and replayed.

        Returns the gradient norm before clipping, and 1.0 if the step was skipped: its gradient was not finite, or
        nothing was supervised. A skipped step changes neither weights nor moments.
        """
        if gradients is None:
            gradients = {name: value.grad for name, value in self.weights.items() if value.grad is not None}
        missing = self.weights.keys() - gradients.keys()
        assert not missing, f"no backward pass reached {sorted(missing)}"
        norm = self._norm(gradients, weight)
        skipped = 1.0 - (torch.isfinite(norm) & (weight > 0)).float()
        clipping = (self.options.clip / (norm + 1e-6)).clamp_max(1.0)
        if lr is not None:
            self.rate.fill_(lr)
        update = self._update_fused if weight.is_cuda else self._update
        update(gradients, clipping / weight.clamp_min(TINY), skipped, lr)
        return norm, skipped

    def _norm(self, gradients: dict[str, Tensor], weight: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Of the whole normalised gradient, in the masters' coordinates."""
        seen = [g.float() / self.scales[n] if n in self.scales else g for n, g in gradients.items()]
        norms = [n.float() for n in torch._foreach_norm(seen)]
        return torch.linalg.vector_norm(torch.stack(norms)) / weight.clamp_min(TINY)

    def _wide(self, name: str, gradients: dict[str, Tensor], factor: Tensor) -> Tensor:
        wide = gradients[name].float() * factor
        return wide / self.scales[name] if name in self.scales else wide

    def _update(self, gradients: dict[str, Tensor], factor: Tensor, skipped: Tensor, lr: float | None) -> None:
        """The reference: torch's AdamW on the masters."""
        assert lr is not None, "a step is captured on a GPU only"
        for name, master in self.masters.items():
            if name in self.muon.masters:
                self.muon.update(name, self._wide(name, gradients, factor), skipped, lr)
            else:
                master.grad = self._wide(name, gradients, factor)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.grad_scale, self.adamw.found_inf = None, skipped  # read by the fused kernel (as GradScaler does)
        self.adamw.step()
        self._write_back()

    def _update_fused(self, gradients: dict[str, Tensor], factor: Tensor, skipped: Tensor, lr: float | None) -> None:
        """The same in one kernel a weight: no fp32 gradients, and the write-back included."""
        from draftsmith.adamw_kernel import update_  # Triton, which a CPU machine may not have

        for name, master in self.masters.items():
            state = self.state[name]
            if name in self.muon.masters:
                assert lr is not None, "Muon's steps are not captured"
                self.muon.update(name, self._wide(name, gradients, factor), skipped, lr)
                self._write_back_one(name)
                continue
            state["step"] += 1 - skipped
            update_(
                self.weights[name],
                gradients[name],
                master,
                state,
                self.scales.get(name),
                factor,
                skipped,
                lr=self.rate,
                betas=self.options.betas,
                eps=self.options.eps,
                decay=self.options.weight_decay if master.ndim > 1 else 0.0,
            )

    def _share_state(self) -> None:
        for name, master in self.masters.items():
            if name not in self.muon.masters:
                self.adamw.state[master] = self.state[name]

    def _write_back(self) -> None:
        for name in self.masters:
            self._write_back_one(name)

    @torch.no_grad()
    def _write_back_one(self, name: str) -> None:
        master = self.masters[name]
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
            for part, value in self.state[name].items():
                flat[f"{part}.{name}"] = value
        return flat

    @torch.no_grad()
    def load(self, flat: dict[str, Tensor]) -> None:
        """The inverse of `tensors`, in place; the scales must be those this optimizer was built with."""
        for name, master in self.masters.items():
            master.copy_(flat[f"master.{name}"])
            for part, value in self.state[name].items():
                value.copy_(flat[f"{part}.{name}"])
        self._write_back()


def _fresh_state(master: Tensor) -> dict[str, Tensor]:
    step = torch.zeros((), dtype=torch.float32, device=master.device)
    return {"step": step, "exp_avg": torch.zeros_like(master.data), "exp_avg_sq": torch.zeros_like(master.data)}
