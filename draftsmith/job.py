"""The parts of a training run, built from its recipe and checked against each other before the first step."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, tee
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from draftsmith.anchors import BlockShape, default_gamma
from draftsmith.capture import captured_features
from draftsmith.checkpoint import Checkpoint, load
from draftsmith.checks import check_tiles
from draftsmith.config import Recipe
from draftsmith.data.loader import PackBuilder, pack_stream
from draftsmith.data.mixture import TrainingSet
from draftsmith.data.plan import Plan, make_plan
from draftsmith.data.prepare import tokenizer_fingerprint
from draftsmith.data.prompts import Prompt, read_prompts
from draftsmith.data.template import chat_arguments
from draftsmith.drafters import DRAFTERS, DFlashDrafter
from draftsmith.drafters.dflash import misfits
from draftsmith.errors import UserError
from draftsmith.evaluate import Case, make_cases
from draftsmith.export.read import find_drafter, read_folder, refuse_other_conventions
from draftsmith.features.wire import Receiver, receive_tensors
from draftsmith.gradients import GradientSum
from draftsmith.optim import MasterAdamW
from draftsmith.packing import Schedule
from draftsmith.randomness import keyed_seed
from draftsmith.ranks import Ranks
from draftsmith.roles import Delivery
from draftsmith.run import RunFolder
from draftsmith.speed import Speed, apply_speed, prepare_target
from draftsmith.targets import TARGETS, Target
from draftsmith.targets.hf import choose_mask_token, load_tokenizer, read_config, tap_ids
from draftsmith.targets.remote import RemoteTarget
from draftsmith.telemetry import Console
from draftsmith.types import Features, Pack

SCALE_PACKS = 4  # packs from which the channels' sizes are estimated

Source = Callable[[Pack], Features]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything the loop of a drafter rank uses."""

    recipe: Recipe
    ranks: Ranks
    run: RunFolder | None
    """The run's folder, on rank 0."""
    device: torch.device
    target: Target
    builder: PackBuilder
    schedule: Schedule
    deliveries: Iterator[Delivery]
    """This rank's packs from the first step on, in its order."""
    source: Callable[[Pack], Features]
    drafter: DFlashDrafter
    optimizer: MasterAdamW
    sums: GradientSum
    channel_size: Float[Tensor, " tap_hid"]
    """Root mean square of each feature channel."""
    speed: Speed
    cases: list[Case]
    progress: dict
    """What the last checkpoint says about progress; empty at the start of a run."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What every rank reads and checks before anything heavy is loaded."""

    plan: Plan
    prompts: list[Prompt]


def read_inputs(recipe: Recipe, ranks: Ranks, report: Callable[[str], None] = lambda line: None) -> Inputs:
    """Cheap checks first. Raises UserError or DataError with one clear message."""
    if ranks.device.type == "cuda":
        check_tiles(recipe)
    data, path = recipe.data, recipe.evaluation.prompts
    if data.overlap == "warn" and not ranks.is_first:  # one process looks and says it
        data = replace(data, overlap="ignore")
    prompts = read_prompts(path) if path else []
    plan = make_plan(data, recipe.pack, recipe.optim, recipe.seed, prompts, load_tokenizer(recipe.target), report)
    return Inputs(plan=plan, prompts=prompts[: recipe.evaluation.limit])


def build_job(recipe: Recipe, ranks: Ranks, console: Console) -> Job:
    """Build and check all parts of a drafter rank. Raises UserError or DataError with one clear message."""
    device, inputs = ranks.device, read_inputs(recipe, ranks, console.say)
    plan, dataset = inputs.plan, inputs.plan.dataset
    if ranks.roles.targets:
        target, channel_size = receive_target(recipe, ranks)
    else:
        target, channel_size = TARGETS["hf"](recipe.target, device, recipe.drafter.num_layers), None
        prepare_target(recipe, device, target)
    tokenizer_hash = tokenizer_fingerprint(target.tokenizer)
    _check_tokenizer(dataset, tokenizer_hash)
    torch.manual_seed(keyed_seed("weights", recipe.seed) >> 1)
    drafter = new_drafter(recipe, target, device).train()
    builder = PackBuilder(dataset, recipe.pack, block_shape(recipe, drafter.config), recipe.seed)
    _introduce(recipe, plan, drafter, drafter.config.dflash_config["mask_token_id"], console)
    if recipe.init and not any((Path(recipe.run) / "checkpoints").glob("step-*")):
        warm_start(
            drafter, find_drafter(recipe.init)
        )  # before the run folder exists, so that a mistake leaves none behind
    prints = {"data": plan.fingerprint, "target": target.fingerprint, "tokenizer": tokenizer_hash}
    if any(part.weight != 1 for part in dataset.parts):  # the recipe names them by folder, and folders may move
        prints["mix"] = hashlib.sha256(json.dumps([part.weight for part in dataset.parts]).encode()).hexdigest()
    run = RunFolder(recipe, prints, console.warn) if ranks.is_first else None
    try:
        return _assemble(recipe, ranks, run, target, builder, inputs, drafter, channel_size, console)
    except BaseException:
        if run:
            run.close()
        raise


def new_drafter(recipe: Recipe, target: Target, device: torch.device) -> DFlashDrafter:
    """The recipe's drafter for a target, with random weights. Raises UserError for a mask token that cannot be one."""
    mask = choose_mask_token(target.tokenizer, target.config.vocab_size, recipe.drafter.mask_token_id)
    drafter_class, build_config = DRAFTERS[recipe.drafter.kind]
    config = build_config(replace(recipe.drafter, mask_token_id=mask), target.config, target.layer_ids)
    return drafter_class(config).to(device=device, dtype=target.head.dtype)


def _assemble(
    recipe: Recipe, ranks: Ranks, run: RunFolder | None, target: Target, builder, inputs: Inputs, drafter, size, console
) -> Job:
    """What depends on the run's state: features on disk, the drafter's weights, the optimizer."""
    device, schedule, last = ranks.device, inputs.plan.schedule, run.last if run else None
    step = int(ranks.share(run.step if run else 0, with_targets=True))
    mine = (d for d in ranks.roles.deliveries(schedule, step) if d.drafter == ranks.drafter)
    ahead, deliveries = tee(mine)
    speed = apply_speed(recipe, device, target, drafter, console.say, drafters=ranks.roles.drafters)
    source = LAYOUTS[recipe.layout](recipe, ranks, target, builder, ahead, console)
    if size is None:
        size = channel_size(recipe, last, target, source, builder, schedule, device)
    scales = {"fc.weight": size} if recipe.optim.feature_scale else {}
    ranks.take_from_first([size])
    if scales and not recipe.init:
        with torch.no_grad():
            drafter.fc.weight.div_(size)
    optimizer = MasterAdamW(drafter, recipe.optim, scales)
    if last:
        _check_names(drafter, weights := last.tensors("model"), last.path)
        drafter.load_state_dict(weights)
        optimizer.load(last.tensors("optimizer"))
    if run and run.last:
        if step == schedule.num_steps:
            console.say(f"{run.path} is finished: all {step} steps are done")
        else:
            console.say(f"continuing {run.path} from step {step} of {schedule.num_steps}")
    ranks.take_from_first([*optimizer.tensors().values(), *(w.detach() for w in drafter.parameters())])
    decodes = ranks.is_first and not ranks.roles.targets and step < schedule.num_steps
    return Job(
        recipe=recipe,
        ranks=ranks,
        run=run,
        device=device,
        target=target,
        builder=builder,
        schedule=schedule,
        deliveries=deliveries,
        source=source,
        drafter=drafter,
        optimizer=optimizer,
        sums=GradientSum(
            optimizer.weights, ranks, lanes=recipe.optim.packs_per_step, canonical=recipe.pipeline.canonical
        ),
        channel_size=size,
        speed=speed,
        cases=make_all_cases(recipe, target, inputs.prompts, console) if decodes else [],
        progress=dict(ranks.share(last.facts["progress"] if last else {})),
    )


def receive_target(recipe: Recipe, ranks: Ranks) -> tuple[RemoteTarget, Float[Tensor, " tap_hid"]]:
    """The target of a drafter rank in the split layout: config and tokenizer from its folder, tensors by wire."""
    config, tokenizer = read_config(recipe.target), load_tokenizer(recipe.target)
    layer_ids = tap_ids(recipe.target, config, recipe.drafter.num_layers)
    assert ranks.store is not None and ranks.drafter is not None
    target = min(target for target, _ in ranks.links)
    peer = ranks.roles.target_rank(target)
    facts = json.loads(ranks.hear(peer))
    dtype = getattr(torch, facts["dtype"])
    table = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=ranks.device)
    head = table if facts["tied"] else torch.empty_like(table)
    size = torch.empty(len(layer_ids) * config.hidden_size, device=ranks.device)
    receive_tensors(ranks, peer, [table, size] if facts["tied"] else [table, size, head])
    remote = RemoteTarget(
        config=config,
        tokenizer=tokenizer,
        layer_ids=layer_ids,
        eos_ids=frozenset(facts["eos_ids"]),
        fingerprint=facts["fingerprint"],
        table=table,
        head=head,
    )
    return remote, size


def block_shape(recipe: Recipe, config) -> BlockShape:
    """What blocks look like, from the drafter's config and the loss options."""
    return BlockShape(
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        gamma=recipe.loss.gamma or default_gamma(config.block_size),
        window=config.sliding_window,
        causal_full=config.causal("full_attention"),
        causal_sliding=config.causal("sliding_attention"),
    )


def warm_start(drafter: DFlashDrafter, folder: Path) -> None:
    """Weights from a run's checkpoint, or from a drafter's folder in z-lab's or Speculators' layout.

    Raises UserError naming the tensors or the conventions that do not fit.
    """
    if not folder.is_dir():
        raise UserError(
            f"init {str(folder)!r} is no folder; give a checkpoint folder, RUN/checkpoints/step-..., or a drafter's"
        )
    if (folder / "manifest.json").is_file():
        weights = load(folder).tensors("model")
    else:
        found = read_folder(folder)
        refuse_other_conventions(found, drafter.config)
        weights = found.tensors
    _check_names(drafter, weights, folder)
    drafter.load_state_dict(weights)


def _check_names(drafter: DFlashDrafter, weights: dict[str, Tensor], folder: Path) -> None:
    wrong = misfits(drafter.state_dict(), weights)
    if wrong:
        raise UserError(f"the drafter in {folder} does not fit this recipe: {'; '.join(wrong[:5])}")


def _check_tokenizer(dataset: TrainingSet, tokenizer_hash: str) -> None:
    if dataset.parts[0].dataset.manifest["inputs"]["tokenizer"] != tokenizer_hash:
        raise UserError(
            f"{dataset.parts[0].name} was made with another tokenizer or chat template than the target's; "
            "run `draftsmith prepare` again with this target"
        )


def _introduce(recipe: Recipe, plan: Plan, drafter: DFlashDrafter, mask: int, console: Console) -> None:
    """Say what was understood; nothing that matters happens silently."""
    dataset, schedule = plan.dataset, plan.schedule
    tokens, anchors = schedule.fill()
    trained = sum(p.numel() for p in drafter.parameters())
    config = drafter.config
    console.say(
        f"drafter: {config.num_hidden_layers} layers, block {config.block_size}, {trained / 1e6:.1f} M weights; "
        f"taps {config.target_layer_ids}, mask token {mask}"
    )
    console.say(
        f"data: {len(dataset):,} samples, {int(schedule.lengths.sum()):,} tokens; packs of {recipe.pack.tokens:,} "
        f"tokens filled to {tokens:.1%}, anchor slots to {anchors:.1%}; {schedule.num_steps} steps"
    )
    for line in plan.remarks:
        console.say(line)
    for line in plan.warnings:
        console.warn(line)
    occurrences = dataset.count_token(mask)
    if occurrences:
        console.warn(f"mask token {mask} occurs {occurrences} times in the data; choose one that never does")


def _colocated(recipe: Recipe, ranks: Ranks, target: Target, builder, ahead, console: Console) -> Source:
    def capture(pack: Pack) -> Features:
        with ranks.pulse("capture"):
            return target.capture(pack)

    return capture


def _offline(recipe: Recipe, ranks: Ranks, target: Target, builder, ahead, console: Console) -> Source:
    """One file for each host; its first rank makes it before the others open it."""
    console.say("features are captured when a pack first asks for them, and kept: the first epoch is slower")
    host = int(os.environ.get("GROUP_RANK", "0")) if ranks.roles.world > 1 else 0
    folder = Path(recipe.run) / (f"features-{host}" if host else "features")
    if int(os.environ.get("LOCAL_RANK", "0")) and ranks.roles.world > 1:
        ranks.wait_for_all("features")
        return captured_features(target, builder, folder, ranks.device)
    source = captured_features(target, builder, folder, ranks.device)
    ranks.wait_for_all("features")
    return source


def _split(recipe: Recipe, ranks: Ranks, target: Target, builder, ahead, console: Console) -> Source:
    shape = (recipe.pack.tokens, len(target.layer_ids) * target.config.hidden_size)
    return Receiver(ranks, ahead, shape, target.head.dtype)


LAYOUTS = {"colocated": _colocated, "split": _split, "offline": _offline}


def channel_size(
    recipe: Recipe,
    last: Checkpoint | None,
    target: Target,
    source,
    builder: PackBuilder,
    schedule: Schedule,
    device: torch.device,
) -> Float[Tensor, " tap_hid"]:
    """Root mean square of every feature channel over the first packs; taken from the checkpoint when resuming."""
    if last:
        return last.tensors("optimizer")["channel_size"].to(device)
    if not recipe.optim.feature_scale and recipe.optim.noise == "none":
        return torch.ones(len(target.layer_ids) * target.config.hidden_size, device=device)
    squares, count = torch.zeros((), device=device), 0
    for pack in pack_stream(builder, schedule, islice(schedule.places(), SCALE_PACKS), workers=0):
        context = source(pack.to(device)).context[: pack.num_tokens].float()
        sound = context.isfinite().all(dim=1, keepdim=True)  # the step that meets the others is skipped and says so
        squares = squares + torch.where(sound, context, 0.0).square().sum(dim=0)
        count = count + sound.sum()
    size = (squares / count).sqrt()
    return size.clamp_min(1e-6 * float(size.max()))


def make_all_cases(recipe: Recipe, target: Target, prompts: list, console: Console) -> list[Case]:
    if not prompts:
        return []
    console.say(f"decoding {len(prompts)} held-out prompts without a drafter, for comparison")
    arguments = chat_arguments(recipe.evaluation, recipe.data)
    return make_cases(target, prompts, recipe.evaluation, lambda done: None, arguments, recipe.seed)
