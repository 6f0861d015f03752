"""The schedule on a clock: how long the steps of many processes take, from seconds measured on one GPU.

Every process does its work in the order of `roles.deliveries`, so one pass over the deliveries finds every moment
exactly; there is no queue of events. The rules are those of the code:

    supply     a target captures a pack once it is done with the one before and the link has a free slot
    wire       a pack lands once it is captured, the drafter's landing before it is over, and one of two buffers is
               free: the buffer of the pack before last, which is given back when the next pack is asked for.
               Its slot is free again when it has landed
    train      a drafter computes its packs in turn; without targets it captures each itself, first
    gradients  buckets are summed over the drafters during the backward pass of their last packs; all go on together

Not modelled: loading, evaluation, checkpoints, packs of unequal cost, and what transfers take from computing on a GPU.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from itertools import groupby
from math import ceil, log2

import numpy as np

from draftsmith.errors import UserError
from draftsmith.packing import Schedule
from draftsmith.roles import Delivery, Roles

BUCKET_BYTES = 128 * 2**20
"""As in `gradients`."""
BACKWARD = 0.5
"""Share of a drafter's pack that is its backward pass through weights: the head's gradient is made in the forward."""
PACKS = 12_000
"""Packs simulated, but 36 to 90 steps: the first two thirds of them fill the slots, the rest is what is reported."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds and bytes of one pack on one GPU, and of an optimizer step."""

    target: float
    drafter: float
    optimizer: float = 0.0
    feature_bytes: int = 0
    gradient_bytes: int = 0
    tokens: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < float("inf") or (name == "drafter" and not value):
                raise UserError(f"{name} is {value}; give a positive number of seconds or bytes")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Bytes per second between two GPUs, and seconds until the first one arrives."""

    within: float = float("inf")
    """Sending inside a host."""
    sums: float = float("inf")
    """Summing inside a host (the ring's rate, `busbw` of nccl-tests)."""
    between: float = float("inf")
    """Between hosts, for each GPU."""
    latency_within: float = 0.0
    latency_between: float = 0.0
    gpus_per_host: int = 8

    def send_seconds(self, roles: Roles, link: tuple[int, int], size: float | int) -> float:
        ends = roles.target_rank(link[0]), roles.drafter_rank(link[1])
        if ends[0] // self.gpus_per_host == ends[1] // self.gpus_per_host:
            return self.latency_within + size / self.within
        return self.latency_between + size / self.between

    def sum_seconds(self, roles: Roles, size: float | int) -> float:
        """A ring over all drafters: each byte goes around nearly twice, and meets every link of the ring."""
        num = roles.drafters
        hosts = Counter(roles.drafter_rank(d) // self.gpus_per_host for d in range(num))
        apart = len(hosts) if len(hosts) > 1 else 0
        rate = min(self.sums, self.between * min(hosts.values())) if apart else self.sums
        latency = max(0, num - 1 - apart) * self.latency_within + apart * self.latency_between
        if roles.canonical:  # whole sums are swapped between pairs, one after the other
            rate = self.between if apart else self.within
            return log2(num) * (size / rate + (self.latency_between if apart else self.latency_within))
        return 2 * (num - 1) / num * size / rate + 2 * latency


@dataclass(frozen=True, kw_only=True)
class Outcome:
    step_seconds: float
    tokens_per_s: float
    target_wait: float
    """Share of the targets' time: until a slot is free."""
    drafter_wait: float
    """Share of the drafters' time: until features have landed."""
    sum_wait: float
    """Share of the drafters' time: for each other, from the own last pack to the end of the gradient sum."""
    share_of_slower_stage: float
    """Throughput as a share of what the slower side would do alone, packs divided evenly and nothing waited for."""
    slower: str
    """target, drafter, or both where every process does both."""


def simulate(
    roles: Roles,
    costs: Costs,
    network: Network | None = None,
    *,
    packs_per_step: int = 1,
    queue_depth: int = 2,
    steps: int | None = None,
) -> Outcome:
    """What a long run comes to."""
    steps = steps or min(90, max(36, PACKS // packs_per_step))
    warm = 2 * steps // 3
    clock = _Clock(roles, costs, network or Network(), queue_depth)
    ones = np.ones(packs_per_step * steps, np.int64)
    schedule = Schedule(
        lengths=ones, anchors=ones, num_tokens=1, num_anchors=1, window=len(ones), packs_per_step=packs_per_step,
        epochs=1, seed=0,
    )  # fmt: skip
    for step, deliveries in groupby(roles.deliveries(schedule, 0), key=lambda delivery: delivery.step):
        if step == warm:
            clock.forget()
        for delivery in deliveries:
            clock.pack(delivery)
        clock.step()
    return clock.outcome(packs_per_step, steps - warm)


class _Clock:
    """When each process and each buffer is free."""

    def __init__(self, roles: Roles, costs: Costs, network: Network, queue_depth: int) -> None:
        self.roles, self.costs = roles, costs
        self.targets, self.drafters = [0.0] * roles.targets, [0.0] * roles.drafters
        self.slots = {link: deque([0.0] * queue_depth) for link in roles.links()}
        self.sending = {link: network.send_seconds(roles, link, costs.feature_bytes) for link in roles.links()}
        self.landings = [0.0] * roles.drafters
        self.buffers = [deque([0.0, 0.0]) for _ in range(roles.drafters)]
        self.reading = [False] * roles.drafters
        # Buckets become ready one by one during the backward pass; their sums follow each other.
        num = 1 if roles.canonical else max(1, ceil(costs.gradient_bytes / BUCKET_BYTES))
        each = network.sum_seconds(roles, costs.gradient_bytes / num) if roles.drafters > 1 else 0.0
        self.exposed = max(each, num * each - (num - 1) / num * BACKWARD * costs.drafter)
        self.forget()

    def forget(self) -> None:
        """Waits are counted, and time is taken, from here on."""
        self.since = max(self.drafters)
        self.target_waited = self.drafter_waited = self.sum_waited = 0.0

    def pack(self, delivery: Delivery) -> None:
        drafter, own = delivery.drafter, self.costs.drafter
        free = self.drafters[drafter]
        start = free
        if self.roles.targets:
            start = max(free, self._landed(delivery.target, drafter))
            if self.reading[drafter]:
                self.buffers[drafter].append(free)
            self.reading[drafter] = True
        else:
            own += self.costs.target
        self.drafter_waited += start - free
        self.drafters[drafter] = start + own

    def _landed(self, target: int, drafter: int) -> float:
        """When the target's next pack has landed."""
        slots = self.slots[target, drafter]
        begin = max(self.targets[target], slots.popleft())
        self.target_waited += begin - self.targets[target]
        self.targets[target] = captured = begin + self.costs.target
        begin = max(captured, self.landings[drafter], self.buffers[drafter].popleft())
        self.landings[drafter] = landed = begin + self.sending[target, drafter]
        slots.append(landed)
        return landed

    def step(self) -> None:
        summed = max(self.drafters) + self.exposed
        self.sum_waited += sum(summed - free for free in self.drafters)
        self.drafters = [summed + self.costs.optimizer] * self.roles.drafters

    def outcome(self, packs_per_step: int, steps: int) -> Outcome:
        roles, costs = self.roles, self.costs
        seconds, packs = max(self.drafters) - self.since, packs_per_step * steps
        own = costs.drafter + costs.optimizer * roles.drafters / packs_per_step
        alone = {
            "target": roles.targets / costs.target if costs.target else float("inf"),
            "drafter": roles.drafters / own,
        }
        if not roles.targets:
            alone = {"both": roles.drafters / (own + costs.target)}
        slower = min(alone, key=lambda side: alone[side])
        captures = packs * costs.target
        return Outcome(
            step_seconds=seconds / steps,
            tokens_per_s=packs * costs.tokens / seconds,
            target_wait=self.target_waited / (self.target_waited + captures) if captures else 0.0,
            drafter_wait=self.drafter_waited / (seconds * roles.drafters),
            sum_wait=self.sum_waited / (seconds * roles.drafters),
            share_of_slower_stage=packs / seconds / alone[slower],
            slower=slower,
        )
