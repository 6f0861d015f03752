"""Which samples fill pack k of epoch e: a pure function of lengths, budgets, seed and epoch.

There is no iterator and so no iterator state: any process finds any pack by its number, and a resumed run only needs
to know its step. The epoch's shuffled order is cut into windows, and each window is packed by itself by best fit,
longest first, under two budgets: tokens and anchor slots. No sample is dropped and none is split.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from jaxtyping import Int

from draftsmith.randomness import keyed_generator

PROBES = 64
"""Bins looked at for one sample; where anchors fill first, many have tokens left and no anchors."""


def count_anchors(legal: Int[np.ndarray, " sample"], per_document: int, density: float) -> Int[np.ndarray, " sample"]:
    """Anchors each sample draws in an epoch: min(per_document, ceil(density * legal positions))."""
    return np.minimum(per_document, np.ceil(density * legal - 1e-9).astype(np.int64))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The whole run's order of packs; `step -> packs` without any state."""

    lengths: Int[np.ndarray, " sample"]
    anchors: Int[np.ndarray, " sample"]
    num_tokens: int
    num_anchors: int
    window: int
    packs_per_step: int
    epochs: int
    seed: int
    steps: int | None = None
    """End after this many optimizer steps, whatever `epochs` says."""

    def packs(self, epoch: int) -> tuple[Int[np.ndarray, " doc"], ...]:
        """Sample numbers of every pack of one epoch, in order."""
        return self._packs(epoch)

    @cached_property
    def _packs(self):
        # Two epochs are remembered, so that readers on both sides of an epoch's end do not compute it again and again.
        return lru_cache(maxsize=2)(self._compute)

    def _compute(self, epoch: int) -> tuple[Int[np.ndarray, " doc"], ...]:
        order = keyed_generator("order", self.seed, epoch).permutation(len(self.lengths))
        packs: list[Int[np.ndarray, " doc"]] = []
        for number, start in enumerate(range(0, len(order), self.window)):
            members = order[start : start + self.window]
            bins = best_fit(self.lengths[members], self.anchors[members], self.num_tokens, self.num_anchors)
            shuffle = keyed_generator("packs", self.seed, epoch, number).permutation(len(bins))
            packs += [members[bins[i]] for i in shuffle]
        return tuple(packs)

    @cached_property
    def steps_before(self) -> tuple[int, ...]:
        """Steps taken before each epoch begins; the last entry is where the last epoch would end."""
        before = [0]
        while (len(before) <= self.epochs) if self.steps is None else (before[-1] < self.steps):
            before.append(before[-1] + -(-len(self.packs(len(before) - 1)) // self.packs_per_step))
        return tuple(before)

    @property
    def num_steps(self) -> int:
        return self.steps or self.steps_before[-1]

    def step_packs(self, step: int) -> tuple[tuple[int, int], ...]:
        """(epoch, pack index) of every pack of an optimizer step. An epoch's last step takes what is left."""
        epoch = bisect_right(self.steps_before, step) - 1
        first = (step - self.steps_before[epoch]) * self.packs_per_step
        last = min(first + self.packs_per_step, len(self.packs(epoch)))
        return tuple((epoch, index) for index in range(first, last))

    def fill(self, epoch: int = 0) -> tuple[float, float]:
        """Share of the token budget and of the anchor budget that an epoch's packs use."""
        num = len(self.packs(epoch))
        tokens = self.lengths.sum() / (num * self.num_tokens)
        return float(tokens), float(self.anchors.sum() / (num * self.num_anchors))


def best_fit(
    lengths: Int[np.ndarray, " sample"], anchors: Int[np.ndarray, " sample"], num_tokens: int, num_anchors: int
) -> list[Int[np.ndarray, " doc"]]:
    """Best fit, longest sample first, under both budgets. Returns the members of each pack.

    Every sample must fit a pack by itself; the caller has checked that.
    """
    members: list[list[int]] = []
    free_anchors: list[int] = []
    open_bins: list[tuple[int, int]] = []  # (free tokens, bin), sorted: the fullest bin that still fits comes first
    least = int(anchors.min(initial=num_anchors))
    for sample in np.argsort(-lengths, kind="stable").tolist():
        length, need = int(lengths[sample]), int(anchors[sample])
        at = bisect_left(open_bins, (length, -1))
        reach = min(len(open_bins), at + PROBES)
        while at < reach and free_anchors[open_bins[at][1]] < need:
            at += 1
        if at < reach:
            free, bin_number = open_bins.pop(at)
        else:
            free, bin_number = num_tokens, len(members)
            members.append([])
            free_anchors.append(num_anchors)
        members[bin_number].append(sample)
        free_anchors[bin_number] -= need
        if free > length and free_anchors[bin_number] >= least:
            insort(open_bins, (free - length, bin_number))
    return [np.asarray(m) for m in members]
