"""Training: the loop, the same for every layout. From here to the loss is one call.

    schedule ─► packs ─► features (frozen target) ─► drafter ─► frozen-head loss ─► optimizer

An optimizer step is `packs_per_step` packs. Their losses are summed and divided once, by the weight of all of them.
On a device the host reads nothing back between two lines of metrics.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftsmith.acceptance import block_metrics
from draftsmith.compile import allow_compiling, forbid_recompiling
from draftsmith.config import OptimOptions, Recipe
from draftsmith.data.loader import pack_stream
from draftsmith.drafters.dflash import config_json
from draftsmith.errors import Diverged, Interrupted
from draftsmith.evaluate import Evaluation, evaluate
from draftsmith.job import Job, build_job
from draftsmith.losses import frozen_head_loss, take_rows
from draftsmith.meter import Meter, ratio
from draftsmith.optim import learning_rate
from draftsmith.randomness import keyed_seed
from draftsmith.signals import StopRequest
from draftsmith.telemetry import Console, TensorBoard
from draftsmith.types import Blocks, Draft, Features, Loss, Pack

WARM_UP_STEPS = 3  # after these, shapes have all been seen and a new compilation is a fault


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


def train(recipe: Recipe, console: Console) -> dict:
    """Run or continue the recipe; returns what `RUN/results.json` holds.

    Raises Interrupted after a signal (saved first), Diverged after too many non-finite gradients, and UserError for
    options or data that cannot work.
    """
    job = build_job(recipe, console)
    progress = Progress(**job.run.last.facts["progress"]) if job.run.last else Progress()
    with StopRequest() as stop:
        packs, board = pack_stream(job.builder, job.schedule, progress.step, recipe.data.workers), None
        try:
            if recipe.log.tensorboard:
                board = TensorBoard(job.run.path / "tensorboard", step=progress.step, warn=console.warn)
            _loop(job, progress, packs, stop, board, console)
        finally:
            allow_compiling()
            packs.close()
            console.close()
            job.run.close()
            if board:
                board.close()
    return _results(job, progress)


def _loop(
    job: Job, progress: Progress, packs: Iterator[Pack], stop: StopRequest, board: TensorBoard | None, console: Console
) -> None:
    recipe, run, schedule = job.recipe, job.run, job.schedule
    meter, clock = Meter(), _Clock()
    updates: list[tuple[int, Sequence[tuple[int, int]], Tensor]] = []  # (step, packs, skipped) since the last line
    if progress.step == 0 and recipe.evaluation.at_start and job.cases:
        progress.before = _evaluate(job, progress, console)

    warm = progress.step + WARM_UP_STEPS
    while progress.step < schedule.num_steps:
        lr = learning_rate(progress.step, schedule.num_steps, recipe.optim)
        last = progress.step + 1 == schedule.num_steps
        evaluate_now = bool(job.cases) and (last or (progress.step + 1) % recipe.evaluation.every == 0)
        save_now = evaluate_now or last or (progress.step + 1) % recipe.checkpoint.every == 0
        if job.compiled and progress.step == warm:
            forbid_recompiling()
        # A line of metrics does not span a checkpoint, so a continued run writes the same lines.
        report_now = save_now or (progress.step + 1) % recipe.log.every == 0
        weight = torch.zeros((), device=job.device)
        lane = schedule.step_packs(progress.step)
        sample_ids: list[str] = []
        num_rows = 0
        for _ in lane:
            pack = next(packs)
            clock.count(pack)
            sample_ids += pack.sample_ids
            num_rows += pack.blocks.num_rows
            pack = pack.to(job.device)
            loss = pack_loss(job, pack, topk=recipe.loss.topk if report_now else 0)
            loss.total.backward()
            weight = weight + loss.weight
            meter.add(loss.parts)
        norm, skipped = job.optimizer.step(weight, lr)
        job.optimizer.zero_grad()
        if not num_rows:
            clock.unsupervised += 1
            skipped = torch.zeros_like(skipped)  # left out by right: there was nothing to learn, and nothing is wrong
        meter.add(
            {"grad_norm": torch.where(skipped > 0, 0.0, norm), "skipped": skipped, "steps": torch.ones_like(norm)}
        )
        progress.step += 1
        updates.append((progress.step, lane, skipped))
        run.record_step(progress.step, lane, sample_ids)

        if report_now:
            record = _record(meter.read(), progress, lr, clock, schedule.num_steps)
            run.metrics.write(record)
            console.step(record)
            if board:
                board.write(record)
            _check_divergence(record, updates, progress, recipe.optim, console)
            updates.clear()
        if evaluate_now:
            progress.latest = _evaluate(job, progress, console)
        stopped_by = stop.name  # read once: a signal may arrive between the next lines
        if save_now or stopped_by:
            progress.seconds += clock.lap()
            _save(job, progress, evaluated=evaluate_now, last=last or bool(stopped_by))
        if stopped_by and not last:
            raise Interrupted(
                f"stopped by {stopped_by} after step {progress.step} of {schedule.num_steps}, saved; "
                f"continue with: draftsmith train {run.path / 'recipe.toml'}"
            )


def pack_loss(job: Job, pack: Pack, *, topk: int = 0) -> Loss:
    """The loss of one pack: features from the target, the drafter's blocks, the target's head."""
    features = job.source(pack)
    features = Features(context=add_noise(features.context.to(job.drafter.dtype), job, pack))
    embedded = job.target.embed(pack.blocks.tokens).to(job.drafter.dtype)
    draft = job.drafter(features, pack.position, embedded, pack.blocks)
    rows = pack.blocks.rows[: _num_rows(pack.blocks, job)]
    return block_loss(draft, pack.blocks, rows, job.target.head, chunk=job.recipe.loss.chunk, topk=topk)


def block_loss(
    draft: Draft,
    blocks: Blocks,
    rows: Int[Tensor, " row"],
    head: Float[Tensor, "voc hid"],
    *,
    chunk: int,
    topk: int = 0,
) -> Loss:
    """Weighted cross-entropy of a pack's blocks over the given slots, its weight, and sums for the metrics."""
    label, weight = blocks.label.flatten()[rows], blocks.weight.flatten()[rows]
    hidden = take_rows(draft.hidden.flatten(0, 1), rows)
    out = frozen_head_loss(hidden, head, label, weight, chunk=chunk, topk=topk)
    correct = torch.zeros_like(blocks.weight, dtype=torch.bool).flatten().index_copy(0, rows, out.correct)
    parts = block_metrics(correct.view_as(blocks.weight), blocks.weight)
    parts |= {"loss": out.total, "weight": weight.sum()}
    if topk:
        parts |= {"topk_hits": (out.in_topk & (weight > 0)).sum(), "topk_rows": (weight > 0).sum()}
    return Loss(total=out.total, weight=weight.sum(), parts=parts)


def _num_rows(blocks: Blocks, job: Job) -> int:
    """Rows for the head: those with weight, and on a GPU as many more as fill the last chunk, so that shapes recur."""
    if job.device.type == "cpu":
        return blocks.num_rows
    chunk = job.recipe.loss.chunk
    return min(-(-blocks.num_rows // chunk) * chunk, blocks.rows.shape[0])


def add_noise(context: Float[Tensor, "tok tap_hid"], job: Job, pack: Pack) -> Float[Tensor, "tok tap_hid"]:
    """Augmented context features, drawn on the device from a generator keyed by the pack."""
    optim = job.recipe.optim
    if optim.noise == "none":
        return context
    key = keyed_seed("noise", job.recipe.seed, pack.epoch, pack.index) >> 1
    generator = torch.Generator(context.device).manual_seed(key)
    noise = torch.empty_like(context)
    if optim.noise == "uniform":
        noise.uniform_(-1, 1, generator=generator)
    else:
        noise.normal_(generator=generator)
    return context + optim.noise_scale * job.channel_size.to(context.dtype) * noise


def _record(sums: dict, progress: Progress, lr: float, clock: _Clock, num_steps: int) -> dict:
    """One line of metrics, over the steps since the last one."""
    by_slot = [ratio(h, s) for h, s in zip(sums["hit_by_slot"], sums["scored_by_slot"], strict=True)]
    return {
        "step": progress.step,
        "steps": num_steps,
        "loss": ratio(sums["loss"], sums["weight"]),
        "accept": ratio(sums["accept_sum"], sums["accept_count"]),
        "whole_blocks": ratio(sums["accept_count"], sums["anchors"]),
        "accuracy": ratio(sum(sums["hit_by_slot"]), sum(sums["scored_by_slot"])),
        "accuracy_by_slot": by_slot,
        "topk_accuracy": ratio(sums.get("topk_hits", 0.0), sums.get("topk_rows", 0.0)),
        "lr": lr,
        "grad_norm": ratio(sums["grad_norm"], sums["steps"] - sums["skipped"]),
        "skipped": int(sums["skipped"]),
        **clock.read(num_steps - progress.step, sums["steps"]),
    }


def _check_divergence(record: dict, updates: list, progress: Progress, options: OptimOptions, console: Console) -> None:
    if record["unsupervised"]:
        console.warn(
            f"{record['unsupervised']} steps up to {record['step']} had nothing supervised and changed nothing"
        )
    if not record["skipped"]:
        return
    progress.skipped += record["skipped"]
    for step, lane, skipped in updates:
        if skipped:
            packs = ", ".join(f"pack {index} of epoch {epoch}" for epoch, index in lane)
            console.warn(
                f"step {step} changed nothing: a gradient was not finite ({packs}; its samples are in ledger.jsonl)"
            )
    if progress.skipped >= options.max_skipped:
        raise Diverged(
            f"{progress.skipped} steps were skipped (optim.max_skipped is {options.max_skipped}); the last checkpoint "
            "is intact. Look at the samples of those steps, or lower optim.lr"
        )


def _evaluate(job: Job, progress: Progress, console: Console) -> dict:
    options = job.recipe.evaluation
    job.drafter.eval()
    found: Evaluation = evaluate(job.target, job.drafter, job.cases, options, job.recipe.seed)
    job.drafter.train()
    summary = found.summary()
    job.run.metrics.write({"step": progress.step, "evaluation": summary})
    lossless = {True: "output equal to plain decoding", False: "OUTPUT DIFFERS from plain decoding", None: "sampled"}
    console.say(
        f"evaluation at step {progress.step}: accept length {found.accept_length:.2f} "
        f"(pooled {found.accept_length_pooled:.2f}) on {found.prompts} held-out prompts, {lossless[found.lossless]}"
    )
    return summary


def _save(job: Job, progress: Progress, *, evaluated: bool, last: bool) -> None:
    name, before = f"step-{progress.step:08d}", progress.best
    if evaluated and progress.latest:
        value = progress.latest["accept_length"]
        if progress.best is None or value > progress.best["accept_length"]:
            progress.best = {"checkpoint": name, "accept_length": value}
    model = {k: v.detach() for k, v in job.drafter.state_dict().items()}
    facts = {"progress": vars(progress).copy(), "best": progress.best}
    state = {**job.optimizer.tensors(), "channel_size": job.channel_size}
    if job.run.save(progress.step, model, state, config_json(job.drafter.config), facts, last=last) is None:
        progress.best = before


def _results(job: Job, progress: Progress) -> dict:
    """What the run came to; also written to RUN/results.json."""
    before, after = progress.before or {}, progress.latest or {}
    results = {
        "accept_length_before": before.get("accept_length"),
        "accept_length_after": after.get("accept_length"),
        "accept_length_pooled_before": before.get("accept_length_pooled"),
        "accept_length_pooled_after": after.get("accept_length_pooled"),
        "accept_length_by_tag": after.get("by_tag"),
        "lossless": after.get("lossless"),
        "prompts": after.get("prompts", 0),
        "steps": progress.step,
        "skipped": progress.skipped,
        "seconds": progress.seconds,
        "best": progress.best,
    }
    job.run.write_results(results)
    return results


@dataclass
class _Clock:
    """Host-side counts between two lines of metrics."""

    start: float = field(default_factory=time.perf_counter)
    lap_start: float = field(default_factory=time.perf_counter)
    tokens: int = 0
    budget: int = 0
    supervised: int = 0
    labelled: int = 0
    unsupervised: int = 0
    """Steps whose packs had not one scored slot."""

    def count(self, pack: Pack) -> None:
        self.tokens += pack.num_tokens
        self.budget += pack.tokens.shape[0]
        self.supervised += pack.num_supervised
        self.labelled += pack.num_labelled

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        seconds, self.lap_start = now - self.lap_start, now
        return seconds

    def read(self, steps_left: int, steps: float) -> dict:
        now = time.perf_counter()
        seconds = now - self.start
        values = {
            "tokens_per_second": self.tokens / seconds,
            "padding": 1 - self.tokens / max(1, self.budget),
            "labelled": self.labelled / max(1, self.supervised),
            "unsupervised": self.unsupervised,
            "eta": steps_left * seconds / max(1.0, steps),
        }
        self.start, self.tokens, self.budget, self.supervised, self.labelled = now, 0, 0, 0, 0
        self.unsupervised = 0
        return values
