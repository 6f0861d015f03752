"""Training: the loop, the same for every layout. From here to the loss is one call.

    schedule ─► packs ─► features (frozen target) ─► drafter ─► frozen-head loss ─► optimizer

An optimizer step is `packs_per_step` packs. Their losses are summed and divided once, by the weight of all of them.
On a device the host reads nothing back between two lines of metrics.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftsmith.acceptance import block_metrics
from draftsmith.checks import check_recipe, choose_device
from draftsmith.compile import allow_compiling
from draftsmith.config import Recipe
from draftsmith.data.loader import PackOrder, pack_stream
from draftsmith.drafters.dflash import config_json
from draftsmith.errors import Interrupted, UserError
from draftsmith.evaluate import is_due
from draftsmith.features.wire import Receiver
from draftsmith.fp8 import Head
from draftsmith.graph import StepGraphs
from draftsmith.job import Job, build_job
from draftsmith.joining import join
from draftsmith.losses import drafted_rows, frozen_head_loss
from draftsmith.optim import learning_rate
from draftsmith.randomness import keyed_seed
from draftsmith.ranks import Ranks, alone, started_by_launcher
from draftsmith.report import Progress, Report
from draftsmith.roles import roles_of
from draftsmith.run import agreed, flat, refuse_other_recipe, versions
from draftsmith.signals import StopRequest
from draftsmith.speed import check_speed, memory_faults
from draftsmith.supply import supply
from draftsmith.telemetry import Console, Silent, TensorBoard
from draftsmith.trace import Trace
from draftsmith.types import Blocks, Draft, Features, Loss, Pack

WARM_UP_STEPS = 3  # after these, shapes have all been seen and a new compilation is a fault


def train(recipe: Recipe, console: Console) -> dict | None:
    """Run or continue the recipe, as one of its processes; rank 0 returns what `RUN/results.json` holds.

    Raises Interrupted after a signal (saved first), Diverged after too many non-finite gradients, and UserError for
    options or data that cannot work.
    """
    with take_part(recipe) as ranks, memory_faults(recipe, ranks):
        check_speed(recipe, ranks.device, ranks.roles.world)
        console = console if ranks.is_first else Silent()
        if ranks.target is not None:
            supply(recipe, ranks, console)
            return None
        return _train(recipe, ranks, console)


def take_part(recipe: Recipe) -> AbstractContextManager[Ranks]:
    """This process's place: alone, or among those that torchrun or `launch` started."""
    options = recipe.pipeline
    try:
        check_recipe(recipe)
        refuse_other_recipe(recipe)
        roles = roles_of(recipe, int(os.environ["WORLD_SIZE"]) if started_by_launcher() else 1)
    except UserError as error:
        if os.environ.get("RANK", "0") != "0":
            raise SystemExit(error.exit_code) from error  # rank 0 says the same
        raise
    device = choose_device(recipe.device)
    if not started_by_launcher():
        return nullcontext(alone(device, options.hang_seconds))
    facts = {name: str(value) for name, value in agreed(flat(recipe)).items()} | versions()
    return join(roles, device, facts, hang_seconds=options.hang_seconds)


def _train(recipe: Recipe, ranks: Ranks, console: Console) -> dict | None:
    with ranks.pulse("setup"):
        job = build_job(recipe, ranks, console)
    if job.speed.marker and ranks.roles.world > 1:
        with ranks.in_turn("compile"):
            _warm_up(job)
    progress = Progress(**job.progress)
    with StopRequest() as stop:
        places = ((d.epoch, d.index) for d in job.deliveries)
        packs, board = pack_stream(job.builder, job.schedule, places, recipe.data.workers), None
        try:
            if job.run and recipe.log.tensorboard:
                board = TensorBoard(job.run.path / "tensorboard", step=progress.step, warn=console.warn)
            _loop(job, progress, packs, stop, Report(job, console, board))
        finally:
            allow_compiling()
            packs.close()
            console.close()
            if job.run:
                job.run.close()
            if board:
                board.close()
    return _results(job, progress)


def _warm_up(job: Job) -> None:
    """Compile what a step compiles, on features of zeros, and forget the gradients."""
    place = next(job.schedule.places())
    samples = job.schedule.packs(place[0])[place[1]]
    pack = job.builder[PackOrder(epoch=place[0], index=place[1], samples=samples)].to(job.device)
    if not job.ranks.roles.targets and job.recipe.layout == "colocated":
        job.target.capture(pack)
    width = len(job.target.layer_ids) * job.target.config.hidden_size
    context = torch.zeros(pack.tokens.shape[0], width, dtype=job.drafter.dtype, device=job.device)
    features_loss(job, pack, Features(context=context)).total.backward()
    job.optimizer.zero_grad()


def _loop(job: Job, progress: Progress, packs: Iterator[Pack], stop: StopRequest, report: Report) -> None:
    recipe, ranks, schedule = job.recipe, job.ranks, job.schedule
    pulse = ranks.pulse
    graphs = StepGraphs(job.device, partial(_whole_step, job)) if recipe.cuda_graph else None
    if progress.step == 0 and recipe.evaluation.at_start and recipe.evaluation.prompts:
        progress.before = report.evaluation(progress)

    warm = progress.step + WARM_UP_STEPS
    trace = Trace(ranks, recipe.pipeline.trace, progress.step, Path(recipe.run))
    while progress.step < schedule.num_steps:
        trace.at(progress.step)
        step, pulse.step = progress.step + 1, progress.step + 1
        evaluate_now = bool(recipe.evaluation.prompts) and is_due(step, recipe.evaluation.every, schedule.num_steps)
        save_now = evaluate_now or is_due(step, recipe.checkpoint.every, schedule.num_steps)
        # A line of metrics does not span a checkpoint, so a continued run writes the same lines.
        report_now = save_now or step % recipe.log.every == 0
        if progress.step == warm:
            job.speed.warmed_up()
        lr = learning_rate(progress.step, schedule.num_steps, recipe.optim)
        places = schedule.step_packs(progress.step)
        topk = recipe.loss.topk if report_now else 0
        if graphs:
            weight, norm, skipped = _replayed_step(job, graphs, packs, lr, topk, report)
        else:
            weight, norm, skipped = _step(job, packs, places, lr, topk, report)
        progress.step = step
        report.step(progress, places, weight, norm, skipped)

        if report_now:
            report.line(progress, lr)
        if evaluate_now:
            progress.latest = report.evaluation(progress)
        stopped = ranks.agree_to_stop(bool(stop.name) or getattr(job.source, "stop_wanted", False))
        if job.run and (save_now or stopped):
            with pulse("save"), report.aside():
                _save(job, progress, report, evaluated=evaluate_now, last=step == schedule.num_steps or stopped)
        if stopped and step < schedule.num_steps:
            _end_early(job, progress, stop)
    if isinstance(job.source, Receiver):
        job.source.stop()
    trace.finish()


def _step(
    job: Job, packs: Iterator[Pack], places: Sequence[tuple[int, int]], lr: float, topk: int, report: Report
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's packs of a step, the sum over all ranks, the update: its weight, gradient norm, and if skipped."""
    pulse, ranks = job.ranks.pulse, job.ranks
    lanes = ranks.roles.lanes(ranks.drafter, len(places))
    weight = torch.zeros((), device=job.device)
    for lane in lanes:
        with pulse("load"):
            pack = next(packs)
            report.count(pack)
            pack = pack.to(job.device)
        loss = pack_loss(job, pack, topk=topk)
        with job.sums.lane(lane, lane is lanes[-1], loss.weight), pulse("backward"):
            loss.total.backward()
        weight = weight + loss.weight
        report.add(loss.parts)
    gradients, weight = job.sums.finish(weight, len(places))
    with pulse("step"):
        norm, skipped = job.optimizer.step(weight, lr, gradients)
        job.optimizer.zero_grad()
    return weight, norm, skipped


def _replayed_step(
    job: Job, graphs: StepGraphs, packs: Iterator[Pack], lr: float, topk: int, report: Report
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for one pack on one rank, as a CUDA graph."""
    with job.ranks.pulse("load"):
        pack = next(packs)
        report.count(pack)
    job.optimizer.rate.fill_(lr)
    done = graphs.run(pack, _num_rows(pack.blocks, job), topk)
    norm, skipped = done.pop("norm"), done.pop("skipped")
    report.add(done)
    return done["weight"], norm, skipped


def _whole_step(job: Job, pack: Pack, topk: int) -> dict[str, Tensor]:
    """What a graph holds: a step at the optimizer's own rate; its sums for the metrics."""
    loss = pack_loss(job, pack, topk=topk)
    loss.total.backward()
    norm, skipped = job.optimizer.step(loss.weight, None)
    job.optimizer.zero_grad()
    return {**loss.parts, "norm": norm, "skipped": skipped}


def _end_early(job: Job, progress: Progress, stop: StopRequest) -> None:
    """All ranks together, once rank 0 has saved."""
    if isinstance(job.source, Receiver):
        job.source.stop()
    job.ranks.wait_for_all("stopped")
    raise Interrupted(
        f"stopped by {stop.name or 'a signal to another process'} after step {progress.step} of "
        f"{job.schedule.num_steps}, saved; continue with: draftsmith train {Path(job.recipe.run) / 'recipe.toml'}"
    )


def pack_loss(job: Job, pack: Pack, *, topk: int = 0) -> Loss:
    """The loss of one pack: features from the target, the drafter's blocks, the target's head."""
    features = job.source(pack)
    features = Features(context=add_noise(features.context.to(job.drafter.dtype), job, pack))
    return features_loss(job, pack, features, topk=topk)


def features_loss(job: Job, pack: Pack, features: Features, *, topk: int = 0) -> Loss:
    """The loss of a pack's blocks, given its features."""
    pulse = job.ranks.pulse
    with pulse("forward"):
        embedded = job.target.embed(pack.blocks.tokens).to(job.drafter.dtype)
        draft = job.drafter(features, pack.position, embedded, pack.blocks)
    with pulse("loss"):
        rows = pack.blocks.rows[: _num_rows(pack.blocks, job)]
        chunk, fp8_head = job.recipe.loss.chunk, job.speed.fp8_head
        return block_loss(draft, pack.blocks, rows, job.target.head, chunk=chunk, topk=topk, fp8_head=fp8_head)


def block_loss(
    draft: Draft,
    blocks: Blocks,
    rows: Int[Tensor, " row"],
    head: Float[Tensor, "voc hid"],
    *,
    chunk: int,
    topk: int = 0,
    fp8_head: Head | None = None,
) -> Loss:
    """Weighted cross-entropy of a pack's blocks over the given slots, its weight, and sums for the metrics."""
    label, weight = blocks.label.flatten()[rows], blocks.weight.flatten()[rows]
    hidden = drafted_rows(draft, rows)
    out = frozen_head_loss(hidden, head, label, weight, chunk=chunk, topk=topk, fp8_head=fp8_head)
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


def _save(job: Job, progress: Progress, report: Report, *, evaluated: bool, last: bool) -> None:
    assert job.run is not None
    progress.seconds += report.lap()
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


def _results(job: Job, progress: Progress) -> dict | None:
    """What the run came to, on rank 0; also written to RUN/results.json."""
    if job.run is None:
        return None
    before, after = progress.before or {}, progress.latest or {}
    results = {
        "accept_length_before": before.get("accept_length"),
        "accept_length_after": after.get("accept_length"),
        "accept_length_pooled_before": before.get("accept_length_pooled"),
        "accept_length_pooled_after": after.get("accept_length_pooled"),
        "accept_length_by_tag": after.get("by_tag"),
        "lossless": after.get("lossless"),
        "num_near_ties": after.get("num_near_ties"),
        "prompts": after.get("prompts", 0),
        "steps": progress.step,
        "skipped": progress.skipped,
        "seconds": progress.seconds,
        "best": progress.best,
    }
    job.run.write_results(results)
    return results
