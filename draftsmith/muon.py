"""Muon for the matrices: momentum, then the nearest orthogonal matrix by Newton-Schulz (Keller Jordan, 2024).

torch.optim.Muon does the arithmetic, one optimizer a matrix, on the fp32 masters. Its steps are scaled to the size of
AdamW's (`match_rms_adamw`, arXiv 2502.16982), so one learning rate serves both. It knows nothing of skipped steps: a
matrix and its momentum are put back on the device, without a look from the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.config import OptimOptions

MOMENTUM = 0.95


def fresh_state(master: Tensor) -> dict[str, Tensor]:
    return {"momentum_buffer": torch.zeros_like(master.data)}


class MatrixMuon:
    """Updates the named matrices in place. The state belongs to the caller, who saves it."""

    def __init__(self, masters: dict[str, Tensor], state: dict[str, dict[str, Tensor]], options: OptimOptions) -> None:
        self.masters, self.state = masters, state
        self.optimizers = {
            name: torch.optim.Muon(
                [master],
                lr=options.lr,
                weight_decay=options.weight_decay,
                momentum=MOMENTUM if options.momentum is None else options.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
            for name, master in masters.items()
        }
        for name, optimizer in self.optimizers.items():
            optimizer.state[masters[name]] = state[name]

    def update(self, name: str, gradient: Tensor, skipped: Tensor, lr: float) -> None:
        """One matrix. `gradient` is the normalised and clipped one, fp32; `skipped` is 1 if nothing may change."""
        master, momentum = self.masters[name], self.state[name]["momentum_buffer"]
        before = master.detach().clone(), momentum.clone()
        own, master.grad = master.grad, gradient  # an fp32 weight is its own master
        optimizer = self.optimizers[name]
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        master.grad = own
        for now, old in zip((master, momentum), before, strict=True):
            now.copy_(torch.where(skipped > 0, old, now))
