"""The loop of a target rank in the split layout: packs in, features out, until the schedule or the drafters end.

Target 0 also decodes the held-out prompts when rank 0 asks, with the drafter's weights of that moment. Targets that
share one copy of the weights run in step: each block's weights are gathered by all of them together.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import torch
import torch.distributed as dist

from draftsmith.anchors import BlockShape
from draftsmith.config import Recipe
from draftsmith.data.loader import PackBuilder, PackOrder, pack_stream
from draftsmith.errors import Interrupted
from draftsmith.evaluate import Case, evaluate, is_due
from draftsmith.features.wire import END, ERROR, Idle, Sender, pack_number, receive_tensors, send_tensors
from draftsmith.job import channel_size, make_all_cases, new_drafter, read_inputs
from draftsmith.packing import Schedule
from draftsmith.ranks import Ranks, contact
from draftsmith.roles import Delivery
from draftsmith.signals import StopRequest
from draftsmith.speed import prepare_target
from draftsmith.targets import TARGETS, HFTarget
from draftsmith.telemetry import Console
from draftsmith.trace import Trace
from draftsmith.types import Pack

EVALUATE, KEEP_STEP = "evaluate", "keep step"


def supply(recipe: Recipe, ranks: Ranks, console: Console) -> None:
    """Capture and send until everything is sent. Raises Interrupted when the drafters stop before that."""
    assert ranks.target is not None
    with ranks.pulse("setup"):
        inputs = read_inputs(recipe, ranks)
        schedule = inputs.plan.schedule
        target = TARGETS["hf"](recipe.target, ranks.device, recipe.drafter.num_layers, mesh=ranks.mesh)
        prepare_target(recipe, ranks.device, target)
        shape = BlockShape(block_size=recipe.drafter.block_size, mask_token_id=0, gamma=1.0, window=None)
        builder = PackBuilder(inputs.plan.dataset, recipe.pack, shape, recipe.seed, with_anchors=False)
        introduce_target(recipe, ranks, target, builder, schedule)
        if ranks.device.type == "cuda" and recipe.compile != "off":
            target.compile_layers()
        first_step = int(ranks.share(with_targets=True))
        evaluates = ranks.roles.target_rank(0) in ranks.roles.sharers(ranks.target) and first_step < schedule.num_steps
        cases = make_all_cases(recipe, target, inputs.prompts, console) if evaluates else []
        senders = make_senders(recipe, ranks, target)
        order = PackOrder(epoch=0, index=0, samples=schedule.packs(0)[0])
        spare = (builder[order].to(ranks.device), torch.empty_like(senders[min(senders)].slots[0]))
        if ranks.device.type == "cuda" and recipe.compile != "off":
            with ranks.in_turn("compile"):
                target.capture(*spare)
    agenda = make_agenda(recipe, ranks, schedule, first_step)
    places = [(item.epoch, item.index) for item in agenda if isinstance(item, Delivery)]
    packs = pack_stream(builder, schedule, places, recipe.data.workers)
    with StopRequest() as stop:
        try:
            trace = Trace(ranks, recipe.pipeline.trace, first_step, Path(recipe.run))
            told = _stream(recipe, ranks, target, cases, senders, agenda, packs, spare, stop, trace)
        except Exception as error:
            for sender in senders.values():
                sender.close(ERROR, f"{type(error).__name__}: {error}")
            raise
        finally:
            packs.close()
        for sender in senders.values():
            sender.close(END)
        trace.finish()
    if told:
        ranks.wait_for_all("stopped")
        raise Interrupted("stopped, saved")


def _stream(
    recipe: Recipe,
    ranks: Ranks,
    target: HFTarget,
    cases: list[Case],
    senders: dict[int, Sender],
    agenda: list[Delivery | str],
    packs: Generator[Pack, None, None],
    spare: tuple[Pack, torch.Tensor],
    stop: StopRequest,
    trace: Trace,
) -> bool:
    """Everything in order; True when a drafter said to stop."""
    idle, ready = Idle(ranks.device.type == "cuda"), None

    def announce() -> None:
        nonlocal ready
        if ready is not None:
            sender, slot, delivery, number, event = ready
            if event is not None:
                event.synchronize()
            idle.read()
            sender.send(slot, delivery, number, (int(idle.waited * 1e6), int(idle.busy * 1e6), int(bool(stop.name))))
            ready = None

    for item in agenda:
        if item == EVALUATE:
            announce()
            if cases and not _evaluate(recipe, ranks, target, cases, senders):
                return True
            continue
        if item == KEEP_STEP:
            if _any_stopped(ranks, False):
                return True
            target.capture(*spare)
            continue
        assert isinstance(item, Delivery)
        trace.at(item.step)
        ranks.pulse.step = item.step
        sender = senders[item.drafter]
        if not sender.has_slot:
            announce()  # the drafter may be waiting for it
        slot = sender.take()
        if _any_stopped(ranks, slot is None) or slot is None:
            return True
        idle.begin()  # a slow loader of this rank is no wait for a drafter
        with ranks.pulse("load"):
            pack = next(packs)
            number = pack_number(pack)
            pack = pack.to(ranks.device)
        with ranks.pulse("capture"):
            target.capture(pack, slot)
            idle.end()
        announce()  # the pack before this one, so that the host is one capture ahead of the device
        event = torch.cuda.Event() if ranks.device.type == "cuda" else None
        if event:
            event.record()
        ready = (sender, slot, item, number, event)
        if event is None:
            announce()
    announce()
    return False


def make_agenda(recipe: Recipe, ranks: Ranks, schedule: Schedule, first_step: int) -> list[Delivery | str]:
    """What this target does: its packs in order, evaluations, and captures for nothing.

    Targets that share weights run in step, so between two evaluations those with fewer packs capture some for nothing.
    """
    assert ranks.target is not None
    due: list[int] = []
    if recipe.evaluation.prompts:
        steps = range(first_step + 1, schedule.num_steps + 1)
        due = [step for step in steps if is_due(step, recipe.evaluation.every, schedule.num_steps)]
        due = [0, *due] if recipe.evaluation.at_start and first_step == 0 < schedule.num_steps else due
    agendas: dict[int, list[Delivery | str]] = {r: [] for r in ranks.roles.sharers(ranks.target)}

    def evaluate_after(step: float) -> None:
        while due and due[0] <= step:
            due.pop(0)
            longest = max(map(len, agendas.values()))
            for agenda in agendas.values():
                agenda += [KEEP_STEP] * (longest - len(agenda)) + [EVALUATE]

    for delivery in ranks.roles.deliveries(schedule, first_step):
        evaluate_after(delivery.step)
        rank = ranks.roles.target_rank(delivery.target)
        if rank in agendas:
            agendas[rank].append(delivery)
    evaluate_after(schedule.num_steps)
    longest = max(map(len, agendas.values()))
    return agendas[ranks.rank] + [KEEP_STEP] * (longest - len(agendas[ranks.rank]))


def introduce_target(recipe: Recipe, ranks: Ranks, target: HFTarget, builder: PackBuilder, schedule: Schedule) -> None:
    """Give the drafters what they need of the target: facts, embedding, head, sizes of the channels."""
    table, head = target.model.get_input_embeddings().weight, target.head
    facts = {
        "dtype": str(head.dtype).removeprefix("torch."),
        "tied": table.data_ptr() == head.data_ptr(),
        "fingerprint": target.fingerprint,
        "eos_ids": sorted(target.eos_ids),
    }
    size = channel_size(recipe, None, target, target.capture, builder, schedule, ranks.device)
    for number, drafter in ranks.links:
        if number == min(t for t, d in ranks.roles.links() if d == drafter):
            ranks.tell(json.dumps(facts), [ranks.roles.drafter_rank(drafter)])
            tensors = [table.detach(), size, *([] if facts["tied"] else [head.detach()])]
            send_tensors(ranks, ranks.roles.drafter_rank(drafter), tensors)


def make_senders(recipe: Recipe, ranks: Ranks, target: HFTarget) -> dict[int, Sender]:
    """One for each drafter of this cell."""
    shape = (recipe.pack.tokens, len(target.layer_ids) * target.config.hidden_size)
    depth = recipe.pipeline.queue_depth
    return {d: Sender(ranks, t, d, shape, target.head.dtype, depth) for t, d in sorted(ranks.links)}


def _any_stopped(ranks: Ranks, stopped: bool) -> bool:
    """Targets that share weights run in step, so they stop together."""
    if ranks.sharers is None:
        return stopped
    flag = torch.tensor([int(stopped)])
    with contact(ranks), ranks.pulse("wait"):
        dist.all_reduce(flag, group=ranks.sharers)
    return bool(flag.item())


def _from_first(ranks: Ranks, message: torch.Tensor) -> None:
    """A message of target 0 to those that share its weights."""
    if ranks.sharers is not None:
        with contact(ranks), ranks.pulse("wait"):
            dist.broadcast(message, src=ranks.roles.target_rank(0), group=ranks.sharers)


def _evaluate(recipe: Recipe, ranks: Ranks, target: HFTarget, cases: list[Case], senders: dict[int, Sender]) -> bool:
    """Decode with the weights that rank 0 sends, and send the figures back; False if it stops instead.

    Targets that share weights with target 0 decode the same, since they run in step.
    """
    first = ranks.target == 0
    asked = torch.tensor([int(first and senders[0].asked_to_evaluate())])
    _from_first(ranks, asked)
    if not asked.item():
        return False
    drafter = new_drafter(recipe, target, ranks.device).eval()
    weights = [w.detach() for w in drafter.parameters()]
    if first:
        receive_tensors(ranks, ranks.roles.drafter_rank(0), weights)
    for weight in weights:
        _from_first(ranks, weight)
    with ranks.pulse("evaluate"):
        found = evaluate(target, drafter, cases, recipe.evaluation, recipe.seed)
    if first:
        ranks.tell(json.dumps(found.summary()), [ranks.roles.drafter_rank(0)])
    return True
