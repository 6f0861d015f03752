"""The sum of an optimizer step's gradients: over its lanes, then over the drafter ranks, in fp32.

Gradients are those of weighted *sums*, so nothing is divided here; the weight of the whole step travels along as one
more number and the optimizer divides once. A rank without a lane takes part with zeros.

One lane on one rank needs no sum: the gradients stay where backward put them. Otherwise each weight's gradient is added
to a flat fp32 buffer as soon as it is complete and then freed, and during the last lane's backward each finished bucket
is sent off while earlier layers are still being computed. With `canonical`, lanes are summed in the fixed tree of
`roles.summation` instead, within a rank and then between pairs of ranks: the same bits for 1, 2, 4, ... ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from draftsmith.ranks import Ranks, contact
from draftsmith.roles import Lane

BUCKET = 32 * 2**20
"""Numbers of one bucket: 128 MiB."""


class GradientSum:
    """Use: `with sums.lane(lane, is_last): loss.total.backward()` per lane, then `finish(weight)`."""

    def __init__(self, weights: dict[str, nn.Parameter], ranks: Ranks, *, lanes: int, canonical: bool) -> None:
        """`lanes` is the largest number of packs of a step."""
        self.weights, self.ranks = weights, ranks
        self.canonical = canonical and (lanes > 1)
        self.needed = lanes > 1 or ranks.roles.drafters > 1
        self._stack: list[Tensor] = []
        """Flat sums; more than one only in the canonical tree. The last number of each is its weight."""
        self._used = 0
        if not self.needed:
            return
        self._spans = _spans(weights)
        self._size = sum(w.numel() for w in weights.values()) + 1
        self._buckets = _buckets(self._spans, self._size)
        self._push()
        self._used = 0
        self._target, self._adds, self._sending = self._stack[0], False, False
        self._works: list = []
        for name, weight in weights.items():
            weight.register_post_accumulate_grad_hook(lambda w, name=name: self._collect(name, w))

    @contextmanager
    def lane(self, lane: Lane, is_last: bool, weight: Float[Tensor, ""]) -> Iterator[None]:
        """Around a lane's backward."""
        if self.needed:
            self._begin(is_last)
        yield
        if self.needed:
            self._weigh(weight)
            for _ in range(lane.merges if self.canonical else 0):
                self._used -= 1
                self._stack[self._used - 1].add_(self._stack[self._used])

    def finish(self, weight: Float[Tensor, ""], num_lanes: int) -> tuple[dict[str, Tensor] | None, Float[Tensor, ""]]:
        """The step's gradients by weight name (None: those at the weights), and its weight, over all ranks."""
        if not self.needed:
            return None, weight
        if not self._used:
            self._push().zero_()
        total = self._stack[0]
        with self.ranks.pulse("reduce"):
            if self.canonical:
                self._add_ranks(total, num_lanes)
            else:
                self._send_until(len(self._buckets))
                with contact(self.ranks):
                    for work in self._works:
                        work.wait()
        self._works.clear()
        self._used = 0
        return {n: total[a:b].view_as(self.weights[n]) for n, (a, b) in self._spans.items()}, total[-1].clone()

    def _push(self) -> Tensor:
        if self._used == len(self._stack):
            device = next(iter(self.weights.values())).device
            self._stack.append(torch.empty(self._size, dtype=torch.float32, device=device))
        self._used += 1
        return self._stack[self._used - 1]

    def _begin(self, is_last: bool) -> None:
        self._adds = not self.canonical and self._used > 0
        self._target = self._stack[0] if self._adds else self._push()
        self._sending = is_last and not self.canonical and self.ranks.roles.drafters > 1
        self._missing = [count for _, _, count in self._buckets]

    @torch.no_grad()
    def _collect(self, name: str, weight: nn.Parameter) -> None:
        """A weight's gradient is complete: add it, free it, and send its bucket off if that was the last one."""
        begin, end = self._spans[name]
        part = self._target[begin:end].view_as(weight)
        assert weight.grad is not None  # the hook runs after it was made
        if self._adds:
            part.add_(weight.grad)
        else:
            part.copy_(weight.grad)
        weight.grad = None
        if self._sending:
            bucket = next(i for i, (first, last, _) in enumerate(self._buckets) if first <= begin < last)
            self._missing[bucket] -= 1
            while len(self._works) < len(self._buckets) - 1 and not self._missing[len(self._works)]:
                self._send_until(len(self._works) + 1)

    def _weigh(self, weight: Float[Tensor, ""]) -> None:
        last = self._target[-1:]
        last.add_(weight) if self._adds else last.copy_(weight)

    def _send_until(self, number: int) -> None:
        """All ranks send the same buckets in the same order. The last one holds the weight, known after backward."""
        while len(self._works) < number:
            first, last, _ = self._buckets[len(self._works)]
            with contact(self.ranks):
                work = self.ranks.sum_later(self._stack[0][first:last])
            self._works.append(work or _Done())

    def _add_ranks(self, total: Tensor, num_lanes: int) -> None:
        """The rest of the tree: between pairs of ranks that are half the world apart, then a quarter, ..."""
        roles, me = self.ranks.roles, self.ranks.drafter
        assert me is not None
        stride, theirs = roles.drafters // 2, torch.empty_like(total) if roles.drafters > 1 else None
        while stride and theirs is not None:
            # A class with no lane takes no part in the tree: adding its zeros could turn -0 into 0.
            mine_empty, theirs_empty = (r % (2 * stride) >= num_lanes for r in (me, me ^ stride))
            self.ranks.swap(total, theirs, me ^ stride)
            if mine_empty:
                total.copy_(theirs)
            elif not theirs_empty:
                total.add_(theirs)
            stride //= 2


class _Done:
    def wait(self) -> None:
        """Nothing was sent."""


def _spans(weights: dict[str, nn.Parameter]) -> dict[str, tuple[int, int]]:
    """Where each weight's numbers are in the flat sum: those whose gradients come first stand first."""
    spans, at = {}, 0
    for name, weight in reversed(weights.items()):
        spans[name] = (at, at + weight.numel())
        at += weight.numel()
    return spans


def _buckets(spans: dict[str, tuple[int, int]], size: int) -> list[tuple[int, int, int]]:
    """(begin, end, number of weights) of runs of whole weights; the last holds the step's weight alone."""
    buckets, begin, count = [], 0, 0
    for _, end in spans.values():
        count += 1
        if end - begin >= BUCKET or end == size - 1:
            buckets.append((begin, end, count))
            begin, count = end, 0
    return [*buckets, (size - 1, size, 1)]
