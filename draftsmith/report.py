"""What a drafter rank knows about its own training, and what rank 0 says about everybody's.

Sums stay on the device until a line of metrics is due; then one transfer reads them, over all ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from draftsmith.acceptance import block_metrics, verdict
from draftsmith.errors import Diverged
from draftsmith.evaluate import evaluate
from draftsmith.features.wire import Receiver, send_tensors
from draftsmith.job import Job
from draftsmith.meter import Meter, ratio
from draftsmith.telemetry import Console, TensorBoard
from draftsmith.types import Pack

STARVING = 0.1
"""A side of the split layout that waits for so large a share of its time is named."""


@dataclass
class Progress:
    """What a run remembers besides weights; saved with every checkpoint."""

    step: int = 0
    skipped: int = 0
    """Steps whose update was left out because a gradient was not finite."""
    before: dict | None = None
    """The evaluation before the first step."""
    latest: dict | None = None
    best: dict | None = None
    """`{"checkpoint": name, "accept_length": value}`, by decoded acceptance length."""
    seconds: float = 0.0


class Report:
    """Collects, and at lines of metrics tells."""

    def __init__(self, job: Job, console: Console, board: TensorBoard | None) -> None:
        self.job, self.console, self.board = job, console, board
        self._meter = Meter(_zeros(job))
        self._packs = PackCounts()
        self._updates: list[tuple[int, Sequence[tuple[int, int]], Tensor]] = []  # since the last line
        self._start = self._lap = time.perf_counter()
        self._advised = False

    def count(self, pack: Pack) -> None:
        self._packs.add(pack)

    def add(self, parts: dict[str, Tensor]) -> None:
        self._meter.add(parts)

    def step(
        self,
        progress: Progress,
        places: Sequence[tuple[int, int]],
        weight: Float[Tensor, ""],
        norm: Float[Tensor, ""],
        skipped: Float[Tensor, ""],
    ) -> None:
        """An optimizer step on these packs is done. Without anything supervised it is left out by right."""
        fault = skipped * (weight > 0)
        sums = {"grad_norm": torch.where(skipped > 0, 0.0, norm), "skipped": fault, "unsupervised": weight <= 0}
        sums["steps"] = torch.ones_like(norm)
        if self.job.ranks.is_first:  # all ranks know the same
            self._meter.add(sums)
        self._updates.append((progress.step, places, fault))
        if self.job.run:
            schedule, dataset = self.job.schedule, self.job.builder.dataset
            visits = [visit for epoch, index in places for visit in schedule.packs(epoch)[index].tolist()]
            samples = [dataset.id(visit % len(dataset)) for visit in visits]
            self.job.run.record_step(progress.step, places, samples)

    def line(self, progress: Progress, lr: float) -> None:
        """Read the sums, write a line of metrics, and stop a run that diverges (on all ranks)."""
        with self.job.ranks.pulse("exchange"):  # on a GPU the host waits here, for other ranks too
            sums = self._meter.read(self.job.ranks.sum_)
        record = self._record(sums, progress, lr)
        if self.job.run:
            self.job.run.metrics.write(record)
            self.console.step(record)
        if self.board:
            self.board.write(record)
        self._advise(record)
        self._check_divergence(record, progress)
        self._updates.clear()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done here is no training: it counts in no rate."""
        begin = time.perf_counter()
        yield
        self._start += time.perf_counter() - begin

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._lap = now - self._lap, now
        return seconds

    def evaluation(self, progress: Progress) -> dict | None:
        """Decode held-out prompts, on rank 0 or on target 0; None on other ranks."""
        job = self.job
        if job.run is None:
            return None
        with job.ranks.pulse("evaluate"), self.aside():
            summary = self._remote_evaluation() if isinstance(job.source, Receiver) else self._own_evaluation()
        job.run.metrics.write({"step": progress.step, "evaluation": summary})
        if self.board:
            self.board.write({"step": progress.step} | {f"evaluation/{key}": value for key, value in summary.items()})
        self.console.say(
            f"evaluation at step {progress.step}: accept length {summary['accept_length']:.2f} "
            f"(pooled {summary['accept_length_pooled']:.2f}) on {summary['prompts']} held-out prompts, "
            f"{verdict(summary['lossless'], summary['num_near_ties'])}"
        )
        return summary

    def _own_evaluation(self) -> dict:
        job = self.job
        job.drafter.eval()
        found = evaluate(job.target, job.drafter, job.cases, job.recipe.evaluation, job.recipe.seed)
        job.drafter.train()
        return found.summary()

    def _remote_evaluation(self) -> dict:
        job, ranks = self.job, self.job.ranks
        assert isinstance(job.source, Receiver)
        job.source.ask_to_evaluate(0)
        weights = [w.detach() for w in job.drafter.parameters()]
        send_tensors(ranks, ranks.roles.target_rank(0), weights)
        return json.loads(ranks.hear(ranks.roles.target_rank(0)))

    def _record(self, sums: dict, progress: Progress, lr: float) -> dict:
        """One line of metrics, over the steps since the last one and over all ranks."""
        by_slot = [ratio(h, s) for h, s in zip(sums["hit_by_slot"], sums["scored_by_slot"], strict=True)]
        num_steps = self.job.schedule.num_steps
        return {
            "step": progress.step,
            "steps": num_steps,
            "loss": ratio(sums["loss"], sums["weight"]),
            "accept": ratio(sums["accept_sum"], sums["accept_count"]),
            "whole_blocks": ratio(sums["accept_count"], sums["anchors"]),
            "accuracy": ratio(sum(sums["hit_by_slot"]), sum(sums["scored_by_slot"])),
            "accuracy_by_slot": by_slot,
            "topk_accuracy": ratio(sums["topk_hits"], sums["topk_rows"]),
            "lr": lr,
            "grad_norm": ratio(sums["grad_norm"], sums["steps"] - sums["skipped"] - sums["unsupervised"]),
            "skipped": int(sums["skipped"]),
            "unsupervised": int(sums["unsupervised"]),
            **self._rates(num_steps - progress.step, sums["steps"]),
        }

    def _rates(self, steps_left: int, steps: float) -> dict:
        now = time.perf_counter()
        seconds, self._start = now - self._start, now
        counts = self._packs.take() | self._waits()
        names = list(counts)
        total = self.job.ranks.sum_(torch.tensor([counts[name] for name in names], dtype=torch.float64)).tolist()
        all_ranks = dict(zip(names, total, strict=True))
        waits = {}
        if isinstance(self.job.source, Receiver):
            for side in ("target", "drafter"):
                waited, busy = all_ranks[f"{side}_waited"], all_ranks[f"{side}_busy"]
                waits[f"{side}_wait"] = waited / max(1e-9, waited + busy)
        return {
            "tokens_per_second": all_ranks["tokens"] / seconds,
            "padding": 1 - all_ranks["tokens"] / max(1, all_ranks["budget"]),
            "labelled": all_ranks["labelled"] / max(1, all_ranks["supervised"]),
            "load_wait": all_ranks["load"] / (seconds * self.job.ranks.roles.drafters),
            **waits,
            "eta": steps_left * seconds / max(1.0, steps),
        }

    def _waits(self) -> dict[str, float]:
        """Seconds since the last line: in the loader, and at both ends of the wire."""
        waits, source = {"load": self.job.ranks.pulse.take().get("load", 0.0)}, self.job.source
        if isinstance(source, Receiver):
            source.idle.read()
            waits |= {"drafter_waited": source.idle.waited, "drafter_busy": source.idle.busy}
            source.idle.waited = source.idle.busy = 0.0
            waited, busy = source.take_notes()
            waits |= {"target_waited": waited, "target_busy": busy}
        return waits

    def _advise(self, record: dict) -> None:
        """Name the side that starves, once, and the layout that would balance."""
        roles, sides = self.job.ranks.roles, ("target", "drafter")
        waits = {side: record.get(f"{side}_wait", 0.0) for side in sides}
        side = max(sides, key=lambda name: waits[name])
        if self._advised or record["step"] <= 2 * self.job.recipe.log.every or waits[side] < STARVING:
            return
        self._advised = True
        # Work per pack is proportional to what a side was busy, times its number.
        work = {"target": roles.targets * (1 - waits["target"]), "drafter": roles.drafters * (1 - waits["drafter"])}
        num = roles.targets + roles.drafters
        targets = min(num - 1, max(1, round(num * work["target"] / (work["target"] + work["drafter"]))))
        better = f"{targets} targets and {num - targets} drafters would balance better"
        if targets == roles.targets:
            better = "no other split of these processes would balance better"
        self.console.say(f"the {side}s wait {waits[side]:.0%} of their time for the other side: {better}")

    def _check_divergence(self, record: dict, progress: Progress) -> None:
        console, options = self.console, self.job.recipe.optim
        if record["unsupervised"]:
            console.warn(
                f"{record['unsupervised']} steps up to {record['step']} had nothing supervised and changed nothing"
            )
        if not record["skipped"]:
            return
        progress.skipped += record["skipped"]
        for step, places, skipped in self._updates:
            if skipped:
                packs = ", ".join(f"pack {index} of epoch {epoch}" for epoch, index in places)
                console.warn(
                    f"step {step} changed nothing: a gradient was not finite ({packs}; its samples are in ledger.jsonl)"
                )
        if progress.skipped >= options.max_skipped:
            raise Diverged(
                f"{progress.skipped} steps were skipped (optim.max_skipped is {options.max_skipped}); the last "
                "checkpoint is intact. Look at the samples of those steps, or lower optim.lr"
            )


@dataclass
class PackCounts:
    """Host-side counts of packs."""

    tokens: int = 0
    budget: int = 0
    supervised: int = 0
    labelled: int = 0

    def add(self, pack: Pack) -> None:
        self.tokens += pack.num_tokens
        self.budget += pack.tokens.shape[0]
        self.supervised += pack.num_supervised
        self.labelled += pack.num_labelled

    def take(self) -> dict[str, float]:
        taken = {name: float(value) for name, value in vars(self).items()}
        self.tokens = self.budget = self.supervised = self.labelled = 0
        return taken


def _zeros(job: Job) -> dict[str, Tensor]:
    """What a pack adds to the meter, all zero."""
    size = job.builder.shape.block_size
    nothing = torch.zeros(1, size, device=job.device)
    parts = block_metrics(nothing > 0, nothing)
    names = ("loss", "weight", "topk_hits", "topk_rows", "grad_norm", "skipped", "unsupervised", "steps")
    return parts | {name: torch.zeros((), device=job.device) for name in names}
