"""Which samples fill pack k of epoch e: a pure function of lengths, budgets, seed and epoch.

There is no iterator and so no iterator state: any process finds any pack by its number, and a resumed run only needs
to know its step. The epoch's shuffled order is cut into windows, and each window is packed by itself under two budgets,
tokens and anchor slots. Large windows are dealt out like cards, always to the emptiest packs; small ones, and what is
left over, are packed by best fit, longest first. No sample is dropped and none is split.

What is packed are *visits*: an epoch may see a row several times, or leave it out (`Mix`). Visit v * n + r is the
(v + 1)th of row r among n rows, so without mixing visits are rows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt64

from draftsmith.errors import UserError
from draftsmith.randomness import keyed_draws, keyed_generator

PROBES = 64
"""Bins looked at for one sample; where anchors fill first, many have tokens left and no anchors."""
DEALT, DEALT_PER_PACK = 2_048, 3
"""Windows of at least so many samples, and of so many for each pack, are dealt: there are small ones enough to even out
what the large ones leave."""
HANDS = 2
"""A hand is dealt to this part of the packs, the emptiest ones."""
NO_BINS = np.empty(0, np.int64)


def count_anchors(legal: Int[np.ndarray, " sample"], per_document: int, density: float) -> Int[np.ndarray, " sample"]:
    """Anchors each sample draws in an epoch: min(per_document, ceil(density * legal positions))."""
    return np.minimum(per_document, np.ceil(density * legal - 1e-9).astype(np.int64))


@dataclass(frozen=True, kw_only=True)
class Cap:
    """At most `limit` visits (or tokens) an epoch of the rows that carry a tag."""

    tag: str
    member: Bool[np.ndarray, " row"]
    limit: int
    in_tokens: bool = False


@dataclass(frozen=True, kw_only=True)
class Mix:
    """How often an epoch sees each row: a pure function of the row's own key, the seed and the epoch."""

    weight: Float[np.ndarray, " row"]
    """Visits per epoch, on average: 0.25 is one in four epochs, 1.5 one or two an epoch."""
    key: UInt64[np.ndarray, " row"]
    """A hash of the row's id."""
    caps: tuple[Cap, ...] = ()

    def visits(self, seed: int, epoch: int, lengths: Int[np.ndarray, " row"]) -> Int[np.ndarray, " visit"]:
        """The epoch's visits. Each row has a phase, so that over many epochs it is seen its weight's share exactly."""
        phase = (keyed_draws(self.key, "mix", seed) >> 32) / 2**32
        times = np.floor(phase + (epoch + 1) * self.weight) - np.floor(phase + epoch * self.weight)
        times = times.astype(np.int64)
        rows = np.repeat(np.arange(len(times)), times)
        visits = np.arange(len(rows)) - np.repeat(np.cumsum(times) - times, times)
        for cap in self.caps:
            capped = np.flatnonzero(cap.member[rows])
            draws = keyed_draws(self.key[rows[capped]], "cap", seed, epoch)
            capped = capped[np.lexsort((draws, visits[capped]))]  # nothing twice before everything was seen once
            costs = lengths[rows[capped]] if cap.in_tokens else np.ones(len(capped), np.int64)
            over = capped[np.cumsum(costs) > cap.limit]
            rows, visits = np.delete(rows, over), np.delete(visits, over)
        return visits * len(self.weight) + rows


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The whole run's order of packs; `step -> packs` without any state."""

    lengths: Int[np.ndarray, " row"]
    anchors: Int[np.ndarray, " row"]
    num_tokens: int
    num_anchors: int
    window: int
    packs_per_step: int
    epochs: int
    seed: int
    steps: int | None = None
    """End after this many optimizer steps, whatever `epochs` says."""
    mix: Mix | None = None
    """Without one, every row once an epoch."""

    def packs(self, epoch: int) -> tuple[Int[np.ndarray, " doc"], ...]:
        """The visits in every pack of one epoch, in order."""
        return self._packs(epoch)

    def rows(self, epoch: int) -> Int[np.ndarray, " visit"]:
        """The rows that an epoch sees, as often as it does."""
        return np.concatenate([np.empty(0, np.int64), *self.packs(epoch)]) % len(self.lengths)

    @cached_property
    def _packs(self):
        # Two epochs are remembered, so that readers on both sides of an epoch's end do not compute it again and again.
        return lru_cache(maxsize=2)(self._compute)

    def _compute(self, epoch: int) -> tuple[Int[np.ndarray, " doc"], ...]:
        packs: list[Int[np.ndarray, " doc"]] = []
        for number, (members, placed) in enumerate(self._windows(epoch)):
            bins = placed.members()
            shuffle = keyed_generator("packs", self.seed, epoch, number).permutation(len(bins))
            packs += [members[bins[i]] for i in shuffle]
        return tuple(packs)

    def _windows(self, epoch: int) -> Iterator[tuple[Int[np.ndarray, " visit"], Placed]]:
        """The visits of each window of an epoch, and where they are placed."""
        num_rows = len(self.lengths)
        visits = None if self.mix is None else self.mix.visits(self.seed, epoch, self.lengths)
        order = keyed_generator("order", self.seed, epoch).permutation(num_rows if visits is None else len(visits))
        if not len(order):
            raise UserError(f"epoch {epoch} sees not a single row; raise the weights of data.mix, or data.caps")
        for start in range(0, len(order), self.window):
            members = rows = order[start : start + self.window]
            if visits is not None:
                members = visits[members]
                rows = members % num_rows
            yield members, place_window(self.lengths[rows], self.anchors[rows], self.num_tokens, self.num_anchors)

    def _steps_of(self, epoch: int) -> int:
        # The first epoch's packs are wanted anyway; of the others only their number is.
        later = (placed.num_bins for _, placed in self._windows(epoch)) if epoch else ()
        return -(-(sum(later) or len(self.packs(0))) // self.packs_per_step)

    @cached_property
    def steps_before(self) -> tuple[int, ...]:
        """Steps taken before each epoch begins; the last entry is where the last epoch would end."""
        if self.steps is None:
            return tuple(accumulate(map(self._steps_of, range(self.epochs)), initial=0))
        before = [0]
        while before[-1] < self.steps:
            before.append(before[-1] + self._steps_of(len(before) - 1))
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

    def places(self, first_step: int = 0) -> Iterator[tuple[int, int]]:
        """(epoch, pack index) of every pack from a step on, in order."""
        for step in range(first_step, self.num_steps):
            yield from self.step_packs(step)

    def fill(self, epoch: int = 0) -> tuple[float, float]:
        """Share of the token budget and of the anchor budget that an epoch's packs use."""
        num, rows = len(self.packs(epoch)), self.rows(epoch)
        tokens, anchors = self.lengths[rows].sum(), self.anchors[rows].sum()
        return float(tokens / (num * self.num_tokens)), float(anchors / (num * self.num_anchors))


class Placed(NamedTuple):
    """Samples of a window in the order in which they were placed, and the bin of each."""

    samples: Int[np.ndarray, " sample"]
    bins: Int[np.ndarray, " sample"]
    num_bins: int

    def members(self) -> list[Int[np.ndarray, " doc"]]:
        """The samples of each bin."""
        by_bin = _ascending(self.bins)
        ends = np.searchsorted(self.bins[by_bin], np.arange(self.num_bins + 1)).tolist()
        samples = self.samples[by_bin]
        return [samples[begin:end] for begin, end in pairwise(ends)]


def place_window(
    lengths: Int[np.ndarray, " sample"], anchors: Int[np.ndarray, " sample"], num_tokens: int, num_anchors: int
) -> Placed:
    """The samples in bins, each of which makes a pack; as few as can be found quickly.

    Every sample must fit a pack by itself; the caller has checked that.
    """
    num_bins = max(-(-int(lengths.sum()) // num_tokens), -(-int(anchors.sum()) // num_anchors))  # no fewer will do
    if len(lengths) < max(DEALT, DEALT_PER_PACK * num_bins):
        return best_fit(lengths, anchors, num_tokens, num_anchors)
    place = deal(lengths, anchors, num_tokens, num_anchors, num_bins)
    dealt, rest = np.flatnonzero(place >= 0), np.flatnonzero(place < 0)
    used = (np.bincount(place[dealt], values[dealt], num_bins).astype(np.int64) for values in (lengths, anchors))
    left = best_fit(lengths[rest], anchors[rest], num_tokens, num_anchors, *used)
    bins = np.concatenate([place[dealt], left.bins])
    return Placed(np.concatenate([dealt, rest[left.samples]]), bins, left.num_bins)


def deal(
    lengths: Int[np.ndarray, " sample"],
    anchors: Int[np.ndarray, " sample"],
    num_tokens: int,
    num_anchors: int,
    num_bins: int,
) -> Int[np.ndarray, " sample"]:
    """The bin of each sample; -1 for those that did not fit the bin they were dealt to.

    Largest samples first, a hand at a time to the emptiest bins; within a hand, samples that are rich in anchors go to
    bins that are rich in tokens. So both loads stay even, and the small samples at the end fill both budgets. Whole
    numbers without ties: the same on every machine.
    """
    tokens, needs = lengths * num_anchors, anchors * num_tokens  # in units of which a pack holds this many:
    whole = num_tokens * num_anchors
    hand = -(-num_bins // HANDS)
    order = _ascending(-np.maximum(tokens, needs))
    order = order[_ascending((needs - tokens)[order], each=hand)]
    tokens, needs = tokens[order], needs[order]
    used_tokens, used_anchors = np.zeros(num_bins, np.int64), np.zeros(num_bins, np.int64)
    place = np.full(len(lengths), -1)
    for start in range(0, len(order), hand):
        dealt = order[start : start + hand]
        to = _ascending(np.maximum(used_tokens, used_anchors))[: len(dealt)]
        to = to[_ascending(used_tokens[to] - used_anchors[to])]
        now_tokens, now_anchors = used_tokens[to] + tokens[start:][:hand], used_anchors[to] + needs[start:][:hand]
        if now_tokens.max() > whole or now_anchors.max() > whole:
            fits = (now_tokens <= whole) & (now_anchors <= whole)
            to, dealt, now_tokens, now_anchors = to[fits], dealt[fits], now_tokens[fits], now_anchors[fits]
        place[dealt], used_tokens[to], used_anchors[to] = to, now_tokens, now_anchors
    return place


def _ascending(values: Int[np.ndarray, " n"], each: int = 0) -> Int[np.ndarray, " n"]:
    """A stable argsort, several times quicker than NumPy's; with `each`, of so many values after the others."""
    bits = len(values).bit_length()
    numbered = (values << bits) | np.arange(len(values))
    if each:
        whole = len(values) // each * each
        numbered[:whole].reshape(-1, each).sort(axis=1)
        numbered[whole:].sort()
    else:
        numbered.sort()
    return numbered & ((1 << bits) - 1)


def best_fit(
    lengths: Int[np.ndarray, " sample"],
    anchors: Int[np.ndarray, " sample"],
    num_tokens: int,
    num_anchors: int,
    used_tokens: Int[np.ndarray, " bin"] = NO_BINS,
    used_anchors: Int[np.ndarray, " bin"] = NO_BINS,
) -> Placed:
    """Samples by best fit, longest first, in bins that are partly `used` and in new ones."""
    free_anchors = (num_anchors - used_anchors).tolist()
    least = int(anchors.min(initial=num_anchors))
    # Bins with room for both, the one with the least room first: by free tokens, and by free anchors.
    open_bins = [(free, number) for number, free in enumerate((num_tokens - used_tokens).tolist())]
    open_bins = sorted((free, number) for free, number in open_bins if free > 0 and free_anchors[number] >= least)
    by_anchors = sorted((free_anchors[number], free, number) for free, number in open_bins)
    order, bins = np.argsort(-lengths, kind="stable"), []
    for length, need in zip(lengths[order].tolist(), anchors[order].tolist(), strict=True):
        found = _find_bin(open_bins, by_anchors, free_anchors, length, need)
        if found:
            free, number = found
            del open_bins[bisect_left(open_bins, found)]
            del by_anchors[bisect_left(by_anchors, (free_anchors[number], free, number))]
        else:
            free, number = num_tokens, len(free_anchors)
            free_anchors.append(num_anchors)
        bins.append(number)
        free_anchors[number] -= need
        if free > length and free_anchors[number] >= least:
            insort(open_bins, (free - length, number))
            insort(by_anchors, (free_anchors[number], free - length, number))
    return Placed(order, np.array(bins, dtype=np.int64), len(free_anchors))


def _find_bin(
    open_bins: list[tuple[int, int]],
    by_anchors: list[tuple[int, int, int]],
    free_anchors: list[int],
    length: int,
    need: int,
) -> tuple[int, int] | None:
    """An open bin where the sample fits, if one is found without looking at all.

    That with the least tokens left; where anchors run out first and so those say little, that with the least anchors
    left; or the emptiest.
    """
    at, at_anchors = bisect_left(open_bins, (length, -1)), bisect_left(by_anchors, (need, -1, -1))
    near = (found for found in open_bins[at : at + PROBES] if free_anchors[found[1]] >= need)
    near_by_anchors = (found[1:] for found in by_anchors[at_anchors : at_anchors + PROBES] if found[1] >= length)
    emptiest = (found for found in open_bins[: -PROBES - 1 : -1] if found[0] >= length)
    return next(chain(near, near_by_anchors, (found for found in emptiest if free_anchors[found[1]] >= need)), None)
