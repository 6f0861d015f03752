"""The loop of a target rank in the split layout: packs in, features out, until the schedule or the drafters end.

Ranks that share a replica's weights all run this loop; their leader alone talks to drafters. Target 0 also decodes the
held-out prompts when rank 0 asks, with the drafter's weights of that moment.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import replace

import torch
import torch.distributed as dist

from draftsmith.anchors import BlockShape
from draftsmith.config import Recipe
from draftsmith.data.loader import PackBuilder, pack_stream
from draftsmith.drafters import DRAFTERS
from draftsmith.errors import Interrupted
from draftsmith.evaluate import Case, evaluate, is_due
from draftsmith.features.wire import END, ERROR, Idle, Sender, pack_number, receive_tensors, send_tensors
from draftsmith.job import channel_size, make_all_cases, read_inputs
from draftsmith.packing import Schedule
from draftsmith.ranks import Ranks, contact
from draftsmith.roles import Delivery
from draftsmith.signals import StopRequest
from draftsmith.speed import prepare_target
from draftsmith.targets import TARGETS, HFTarget
from draftsmith.targets.hf import choose_mask_token
from draftsmith.telemetry import Console
from draftsmith.types import Pack


def supply(recipe: Recipe, ranks: Ranks, console: Console) -> None:
    """Capture and send until everything is sent. Raises Interrupted when the drafters stop before that."""
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
        first_step = int(json.loads(ranks.get("step")))
        evaluates = ranks.target == 0 and bool(inputs.prompts) and first_step < schedule.num_steps
        cases = make_all_cases(recipe, target, inputs.prompts, console) if evaluates else []
        senders = make_senders(recipe, ranks, target)
    order = [d for d in ranks.roles.deliveries(schedule, first_step) if d.target == ranks.target]
    packs = pack_stream(builder, schedule, ((d.epoch, d.index) for d in order), recipe.data.workers)
    with StopRequest() as stop:
        try:
            told = _stream(recipe, ranks, target, schedule, cases, senders, order, packs, stop, first_step)
        except Exception as error:
            for sender in senders.values():
                sender.close(ERROR, f"{type(error).__name__}: {error}")
            raise
        finally:
            packs.close()
        for sender in senders.values():
            sender.close(END)
    if told:
        ranks.wait_for_all("stopped")
        raise Interrupted("stopped, saved")


def _stream(
    recipe: Recipe,
    ranks: Ranks,
    target: HFTarget,
    schedule: Schedule,
    cases: list[Case],
    senders: dict[int, Sender],
    order: list[Delivery],
    packs: Generator[Pack, None, None],
    stop: StopRequest,
    first_step: int,
) -> bool:
    """Everything in order; True when a drafter said to stop."""
    idle, ready = Idle(ranks.device.type == "cuda"), None
    evaluated = first_step  # evaluations after steps up to this one are over

    def announce() -> None:
        nonlocal ready
        if ready is not None:
            sender, slot, delivery, number, event = ready
            if event is not None:
                event.synchronize()
            idle.read()
            sender.send(slot, delivery, number, (int(idle.waited * 1e6), int(idle.busy * 1e6), int(bool(stop.name))))
            ready = None

    if (
        cases
        and first_step == 0
        and recipe.evaluation.at_start
        and not _evaluate(recipe, ranks, target, cases, senders)
    ):
        return True
    for delivery in [*order, None]:
        until = schedule.num_steps if delivery is None else delivery.step
        while cases and evaluated < until:
            evaluated += 1
            if is_due(evaluated, recipe.evaluation.every, schedule.num_steps):
                announce()
                if not _evaluate(recipe, ranks, target, cases, senders):
                    return True
        if delivery is None:
            break
        ranks.pulse.step = delivery.step
        sender = senders.get(delivery.drafter)
        if sender is not None and not sender.has_slot:
            announce()  # the drafter may be waiting for it
        slot = _take(ranks, sender, recipe, target)
        if slot is None:
            return True
        with ranks.pulse("load"):
            pack = next(packs)
            number = pack_number(pack)
            pack = pack.to(ranks.device)
        with ranks.pulse("capture"):
            idle.begin()
            target.capture(pack, slot)
            idle.end()
        announce()  # the pack before this one, so that the host is one capture ahead of the device
        if sender is not None:
            event = torch.cuda.Event() if ranks.device.type == "cuda" else None
            if event:
                event.record()
            ready = (sender, slot, delivery, number, event)
            if event is None:
                announce()
    announce()
    return False


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
    if ranks.target == 0 and ranks.links:
        ranks.put("target", json.dumps(facts))
    for number, drafter in ranks.links:
        if number == min(t for t, d in ranks.roles.links() if d == drafter):
            tensors = [table.detach(), size, *([] if facts["tied"] else [head.detach()])]
            send_tensors(ranks, ranks.roles.drafter_rank(drafter), tensors)


def make_senders(recipe: Recipe, ranks: Ranks, target: HFTarget) -> dict[int, Sender]:
    """One for each drafter of this cell; none on ranks that do not lead their replica."""
    shape = (recipe.pack.tokens, len(target.layer_ids) * target.config.hidden_size)
    depth = recipe.pipeline.queue_depth
    return {d: Sender(ranks, t, d, shape, target.head.dtype, depth) for t, d in sorted(ranks.links)}


def _take(ranks: Ranks, sender: Sender | None, recipe: Recipe, target: HFTarget) -> torch.Tensor | None:
    """A slot to capture into; the leader tells the other ranks of its replica whether there is one."""
    slot = sender.take() if sender is not None else None
    if ranks.replica is not None:
        going = torch.tensor([int(slot is not None)])
        _tell_replica(ranks, going)
        if going.item() and slot is None:
            shape = (recipe.pack.tokens, len(target.layer_ids) * target.config.hidden_size)
            slot = torch.empty(shape, dtype=target.head.dtype, device=ranks.device)
    return slot


def _tell_replica(ranks: Ranks, message: torch.Tensor) -> None:
    assert ranks.target is not None
    with contact(ranks), ranks.pulse("wait"):
        dist.broadcast(message, src=ranks.roles.target_ranks_of(ranks.target)[0], group=ranks.replica)


def _evaluate(recipe: Recipe, ranks: Ranks, target: HFTarget, cases: list[Case], senders: dict[int, Sender]) -> bool:
    """Decode with the weights that rank 0 sends, and send the figures back; False if it stops instead."""
    asked = torch.tensor([int(bool(senders) and senders[0].asked_to_evaluate())])
    if ranks.replica is not None:
        _tell_replica(ranks, asked)
    if not asked.item():
        return False
    drafter_class, build_config = DRAFTERS[recipe.drafter.kind]
    mask = choose_mask_token(target.tokenizer, target.config.vocab_size, recipe.drafter.mask_token_id)
    config = build_config(replace(recipe.drafter, mask_token_id=mask), target.config, target.layer_ids)
    drafter = drafter_class(config).to(device=ranks.device, dtype=target.head.dtype).eval()
    weights = [w.detach() for w in drafter.parameters()]
    if senders:
        receive_tensors(ranks, ranks.roles.drafter_rank(0), weights)
    if ranks.replica is not None:
        for weight in weights:
            _tell_replica(ranks, weight)
    with ranks.pulse("evaluate"):
        found = evaluate(target, drafter, cases, recipe.evaluation, recipe.seed)
    if senders:
        number = ranks.count("evaluations")
        ranks.put(f"evaluation/{number}", json.dumps(found.summary()))
    return True
