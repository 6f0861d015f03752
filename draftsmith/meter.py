"""Sums on the device between two lines of metrics, read by the host once a line."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Meter:
    """Adds up tensors by name; `read` is the only place where the host waits for the device."""

    def __init__(self, zeros: dict[str, Tensor]) -> None:
        """`zeros`: what will be added, so that a process that adds nothing reads the same names and shapes."""
        self._zeros = {name: value.detach().float() for name, value in zeros.items()}
        self.sums = dict(self._zeros)

    def add(self, parts: dict[str, Tensor]) -> None:
        for name, value in parts.items():
            self.sums[name] = self.sums[name] + value.detach().float()

    def read(self, over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float | list[float]]:
        """The sums so far as numbers, over all processes, after one transfer; the meter starts anew."""
        names = list(self.sums)
        flat = over_ranks(torch.cat([self.sums[name].reshape(-1) for name in names])).tolist()
        values: dict[str, float | list[float]] = {}
        at = 0
        for name in names:
            size = self.sums[name].numel()
            values[name] = flat[at] if self.sums[name].ndim == 0 else flat[at : at + size]
            at += size
        self.sums = dict(self._zeros)
        return values


def ratio(numerator: float, denominator: float) -> float | None:
    """A quotient of sums, or None where nothing was counted: unscored is not zero."""
    return numerator / denominator if denominator else None
