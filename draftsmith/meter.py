"""Sums on the device between two lines of metrics, read by the host once a line."""

from __future__ import annotations

import torch
from torch import Tensor


class Meter:
    """Adds up tensors by name; `read` is the only place where the host waits for the device."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, parts: dict[str, Tensor]) -> None:
        for name, value in parts.items():
            value = value.detach().float()
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def read(self) -> dict[str, float | list[float]]:
        """The sums so far as numbers, after one transfer; the meter starts anew."""
        names = list(self.sums)
        flat = torch.cat([self.sums[name].reshape(-1) for name in names]).tolist()
        values: dict[str, float | list[float]] = {}
        at = 0
        for name in names:
            size = self.sums[name].numel()
            values[name] = flat[at] if self.sums[name].ndim == 0 else flat[at : at + size]
            at += size
        self.sums = {}
        return values


def ratio(numerator: float, denominator: float) -> float | None:
    """A quotient of sums, or None where nothing was counted: unscored is not zero."""
    return numerator / denominator if denominator else None
