"""What each verb does, in the order a newcomer meets them. Every verb ends with the next command."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch

from draftsmith import commands, config
from draftsmith.adopt import adopt, refuse_other_target
from draftsmith.anchors import BlockShape, build_blocks, default_gamma, draw_anchors
from draftsmith.checkpoint import Checkpoint
from draftsmith.checks import check_recipe, choose_device
from draftsmith.data.cache import Cache
from draftsmith.data.chat import prompt_tokens, render_prompt
from draftsmith.data.dataset import PreparedDataset, open_prepared
from draftsmith.data.mixture import TrainingSet, make_mix, open_training_set
from draftsmith.data.prepare import prepare as prepare_set
from draftsmith.data.prepare import tokenizer_fingerprint
from draftsmith.data.prompts import read_prompts
from draftsmith.data.regenerate import check_options
from draftsmith.data.regenerate import regenerate as answer
from draftsmith.data.remote import shown
from draftsmith.data.server import regenerate_served
from draftsmith.data.statistics import anchors_of, first_epoch
from draftsmith.data.statistics import measure as measure_set
from draftsmith.data.template import chat_arguments
from draftsmith.decode import Decoded, Sampling, decode_speculative
from draftsmith.drafters import DRAFTERS, DFlashDrafter
from draftsmith.errors import EnvironmentFault, UserError
from draftsmith.export import EXPORTS
from draftsmith.export.publish import publish
from draftsmith.export.record import synthetic_prompts
from draftsmith.export.serve import serve_commands, vllm_remarks
from draftsmith.findings import CheckFailed, conclude
from draftsmith.launch import launch, number_of_processes, started_by_us
from draftsmith.on_policy import check_target, describe_agreement
from draftsmith.preview import (
    BlockRow,
    PageRow,
    mixture,
    origin,
    preview_block,
    preview_page,
    preview_rows,
    statistics,
    write_page,
)
from draftsmith.ranks import started_by_launcher
from draftsmith.recipe import read_recipe
from draftsmith.run import find_checkpoint
from draftsmith.targets import HFTarget, load_target
from draftsmith.targets.hf import choose_mask_token, end_ids, load_tokenizer, read_config
from draftsmith.telemetry import Console
from draftsmith.train import train as run_training
from draftsmith.types import Sample
from draftsmith.verify import verify_folder


def regenerate(command: commands.RegenerateCommand) -> None:
    console, options = Console(), command.regenerate
    if options.servers:
        counts = regenerate_served(options, console.say)
    else:
        device = choose_device(command.device)
        target, drafter = open_helped(command, device, console)
        counts = answer(target.model, target.tokenizer, options, device=device, report=console.say, drafter=drafter)
    told = (f"{name} {value:,.{2 if name == 'accept_length' else 0}f}" for name, value in counts.items())
    console.say(", ".join(told))
    console.say(
        f"next: draftsmith prepare --target.path {command.target.path or 'TARGET'} "
        f"--data.conversations {options.output} --data.prepared FOLDER"
    )


def open_helped(
    command: commands.RegenerateCommand, device: torch.device, console: Console
) -> tuple[HFTarget, DFlashDrafter | None]:
    """The target that answers here and, if one is named, a drafter of it. What can be refused is, before loading."""
    options = command.regenerate
    arguments = check_options(options, device)
    prompts = read_prompts(options.prompts, min(4, options.limit or 4), answered=options.turns == "all")
    if not options.drafter:
        return load_target(command.target, device), None
    path = Path(options.drafter)
    if (path / "checkpoints").is_dir():
        path = find_checkpoint(path, "best", console.warn).path
    prompts = [one for one in prompts if one.messages[-1]["role"] != "assistant"]
    measured = config.EvaluationOptions(max_new_tokens=options.max_new_tokens)
    target, drafter = adopt(path, command.target, device, prompts, measured, arguments, console.say)
    refuse_other_target(path, target)
    return target, drafter


def prepare(command: commands.PrepareCommand) -> None:
    console = Console()
    tokenizer = load_tokenizer(command.target)
    prepare_set(
        tokenizer,
        tokenizer_fingerprint(tokenizer),
        command.data,
        console.say,
        end_ids=end_ids(command.target, tokenizer),
    )
    if command.check_target:
        target = load_target(command.target, choose_device(command.device))
        found = check_target(open_set(command.data, console), target, command.check_target, console.say)
        lines, warnings = describe_agreement(found)
        console.say("\n".join(lines))
        for line in warnings:
            console.warn(line)
    console.say(f"next: draftsmith preview --target.path {command.target.path} --data.prepared {command.data.prepared}")


def open_set(data: config.DataOptions, console: Console) -> PreparedDataset:
    return open_prepared(data.prepared, Cache.of(data.cache, data.cache_gb), console.say)


def preview(command: commands.PreviewCommand) -> None:
    console = Console()
    dataset = open_training_set(command.data, command.pack.tokens, console.say)
    tokenizer = load_tokenizer(command.target)
    schedule = first_epoch(dataset, command.pack, make_mix(dataset, command.data), command.seed)
    console.show("\n".join([statistics(dataset), *mixture(dataset, schedule)]))
    for row in preview_rows(dataset, tokenizer, command.rows, colour=console.colour):
        console.show(row)
    sample, block = first_block(command, dataset, tokenizer)
    console.show(preview_block(tokenizer, sample.tokens, block, colour=console.colour))
    if command.html:
        shown = str(preview_block(tokenizer, sample.tokens, block, colour=False))
        figures = measure_set(dataset, tokenizer, schedule)
        name = command.data.prepared or ", ".join(command.data.mix)
        page = preview_page(f"Preview of {name}", figures, page_rows(command, dataset), shown, tokenizer)
        write_page(command.html, page)
        console.say(f"wrote {command.html}")
    console.say("next: draftsmith train RECIPE")


def page_rows(command: commands.PreviewCommand, dataset: TrainingSet) -> list[PageRow]:
    rows = []
    for row in dataset.first_rows(command.rows):
        sample, legal = dataset[row], int(dataset.legal_counts[row])
        anchors = anchors_of(sample, command.pack, legal, command.seed)
        rows.append(PageRow(sample=sample, anchors=anchors, limit=command.pack.tokens, origin=origin(dataset, row)))
    return rows


def first_block(command: commands.PreviewCommand, dataset: TrainingSet, tokenizer) -> tuple[Sample, BlockRow]:
    """A block of the first row that has a legal anchor, exactly as the loader makes it in the first epoch."""
    sample = dataset[int((dataset.legal_counts > 0).argmax())]
    size, options = command.drafter.block_size, command.drafter
    mask = choose_mask_token(tokenizer, read_config(command.target).vocab_size, options.mask_token_id)
    shape = BlockShape(
        block_size=size, mask_token_id=mask, gamma=command.loss.gamma or default_gamma(size), window=None
    )
    anchor = draw_anchors(sample, 1, command.seed, epoch=0)
    start, end = anchor * 0, anchor * 0 + len(sample.tokens)
    blocks = build_blocks(sample.tokens, sample.supervised, anchor, start, end, 1, shape)
    row = BlockRow(
        anchor=int(anchor[0]),
        context_start=0,
        tokens=blocks.tokens[0].numpy(),
        position=blocks.position[0].numpy(),
        label=blocks.label[0].numpy(),
        weight=blocks.weight[0].numpy(),
    )
    return sample, row


def train(recipe: config.Recipe) -> None:
    console = Console()
    check_recipe(recipe)
    world = number_of_processes(recipe, console.warn)
    watched = started_by_launcher() and not started_by_us()
    if watched and recipe.pipeline.max_restarts:
        raise UserError(
            f"pipeline.max_restarts is {recipe.pipeline.max_restarts}, but torchrun has started this process and "
            "would start it again: leave pipeline.max_restarts out and give torchrun --max-restarts"
        )
    if world > 1 or (recipe.pipeline.max_restarts and not started_by_us()):
        launch(recipe, world, console)
        results = json.loads((Path(recipe.run) / "results.json").read_text())
    else:
        results = run_training(recipe, console)
        if results is None or started_by_us():
            return  # one of several processes; the first one, or whoever started them, goes on
    if results["accept_length_after"] is not None:
        console.say(f"accept length {results['accept_length_after']:.2f} on held-out prompts (1.00 would be no help)")
    finish(recipe, console)
    console.say(f'run folder: {recipe.run}\nnext: draftsmith generate {recipe.run} "your question"')


def export(command: commands.ExportCommand) -> None:
    """Write a checkpoint in the layouts asked for, and say how each is served and verified."""
    console = Console()
    folder, target = export_run(command, console)
    console.say(f"to publish it, card included: hf upload ORG/NAME {folder}")
    console.say(f"next: draftsmith verify {folder} --target.path {target}")


def export_run(command: commands.ExportCommand, console: Console) -> tuple[Path, str]:
    """Write the exports; returns the first one's folder and the target's path."""
    recipe, target, drafter, found = open_run(command.run, command.checkpoint, command.device, command.target, console)
    layouts = list(EXPORTS) if command.to == "all" else [command.to]
    parent = Path(command.output) if command.output else Path(command.run) / "export"
    single = command.output and command.to != "all"
    folders = {layout: parent if single else parent / layout for layout in layouts}
    recipe = replace(recipe, run=command.run)
    prompts = recorded_prompts(recipe, target, command, console)
    publish(folders, recipe, found, target, drafter, prompts, command.license)
    served_target = recipe.target.path, recipe.target.revision
    for layout, folder in folders.items():
        console.say(f"wrote {folder}: {layout} layout of {found.path.name}, bf16")
        served = json.loads((folder / "config.json").read_text())
        for engine, line in serve_commands(served, str(folder), *served_target).items():
            console.say(f"  {engine}: {line}")
        for remark in vllm_remarks(served):
            console.warn(remark)
    return folders[layouts[0]], recipe.target.path


def finish(recipe: config.Recipe, console: Console, recorded_prompts: int = 4) -> None:
    """At the end of a run: export its best checkpoint and check it in a fresh process, as `at_end` says.

    Raises CheckFailed if the export is not the trained drafter, EnvironmentFault if that could not be found out; the
    run itself is complete by then.
    """
    if recipe.at_end == "nothing":
        return
    release_memory()
    place = commands.Place(trust_remote_code=recipe.target.trust_remote_code)
    command = commands.ExportCommand(
        run=recipe.run, device=recipe.device, recorded_prompts=recorded_prompts, target=place
    )
    folder, target = export_run(command, console)
    if recipe.at_end == "export":
        return
    words = ["verify", str(folder), "--target.path", target, "--target.dtype", recipe.target.dtype]
    words += ["--device", recipe.device, "--target.trust_remote_code", str(recipe.target.trust_remote_code)]
    if recipe.target.revision:
        words += ["--target.revision", recipe.target.revision]
    release_memory()  # the child loads a target of its own
    ended = subprocess.run([sys.executable, "-m", "draftsmith", *words], capture_output=True, text=True)
    for line in ended.stdout.splitlines():
        if not line.startswith("next:"):
            console.say(line)
    if ended.returncode:
        reason = (ended.stderr.strip().splitlines() or [f"verify ended with {ended.returncode}"])[-1]
        reason = reason.removeprefix("draftsmith: ")
        if ended.returncode == CheckFailed.exit_code:
            raise CheckFailed(f"the run is complete, but its export is not as trained: {reason}")
        raise EnvironmentFault(
            f"the run is complete and exported, but the export could not be verified: {reason}. Try again with: "
            f"draftsmith {' '.join(words[:4])}"
        )


def release_memory() -> None:
    """Give back what models that nobody uses any more hold on the GPU."""
    gc.collect()
    torch.cuda.empty_cache()


def verify(command: commands.VerifyCommand) -> None:
    """Check an exported folder against its target; a failed check ends with exit code 4."""
    console = Console()

    def load(layer_ids: tuple[int, ...]) -> HFTarget:
        return load_target(replace(command.target, layer_ids=layer_ids), choose_device(command.device))

    found = verify_folder(command, load, console.say)
    if found.figures:
        console.say("\n".join(found.side_by_side()))
    conclude(command, found)
    console.say(f"verified {command.folder}: it drafts as it did in training")
    served = json.loads((Path(command.folder) / "config.json").read_text())
    line = next(iter(serve_commands(served, command.folder, command.target.path, command.target.revision).values()))
    console.say(f"next: {line}")


def recorded_prompts(
    recipe: config.Recipe, target: HFTarget, command: commands.ExportCommand, console: Console
) -> list[torch.Tensor]:
    """Held-out prompts of the run, rendered; random text if it has none or they shall stay private. Says which.

    Raises DataError if the recipe's prompts cannot be read.
    """
    path, count = recipe.evaluation.prompts, command.recorded_prompts
    if not count or not path:
        why = "as asked" if path else "the run's recipe names no evaluation.prompts"
        console.say(f"recorded for verify: the drafter on random text ({why})")
        return synthetic_prompts(target, 2)
    try:
        prompts = read_prompts(path, count)
    except UserError as error:
        hint = "to record the drafter on random text instead, give --recorded_prompts 0"
        raise type(error)(f"the prompts to record with the export cannot be read: {error} ({hint})") from error
    console.say(f"recorded for verify: the drafter on {len(prompts)} prompts of {shown(path)}, as token ids")
    arguments = chat_arguments(recipe.evaluation, recipe.data)
    return [torch.from_numpy(prompt_tokens(target.tokenizer, p, arguments)).to(target.device) for p in prompts]


def generate(command: commands.GenerateCommand) -> None:
    console = Console()
    recipe, target, drafter, found = open_run(command.run, command.checkpoint, command.device, command.target, console)
    arguments = chat_arguments(recipe.evaluation, recipe.data)
    prompt = render_prompt(target.tokenizer, [{"role": "user", "content": command.prompt}], arguments=arguments)
    decoded = decode_speculative(
        target,
        drafter,
        torch.from_numpy(prompt).to(target.device),
        command.max_new_tokens,
        Sampling(temperature=command.temperature, top_k=command.top_k, top_p=command.top_p),
        torch.Generator().manual_seed(command.seed),
    )
    show_answer(target, decoded, console)
    console.say(f"next: draftsmith evaluate {command.run}")


def show_answer(target: HFTarget, decoded: Decoded, console: Console) -> None:
    """The answer with accepted tokens marked, and how many cycles it took."""
    told = [(t, d) for t, d in zip(decoded.tokens, decoded.drafted, strict=True) if t not in target.eos_ids]
    runs = [(mark, [token for token, _ in run]) for mark, run in groupby(told, key=lambda pair: pair[1])]
    pieces = [(target.tokenizer.decode(tokens, skip_special_tokens=False), mark) for mark, tokens in runs]
    console.marked(pieces)
    console.say(
        f"({sum(decoded.drafted)} of {len(decoded.tokens)} tokens came from the drafter; {len(decoded.cycles)} cycles, "
        f"{decoded.accept_length or 1:.2f} tokens each)"
    )


def require_run(run: str) -> Path:
    """The folder, if it is a run's."""
    if not (Path(run) / "recipe.toml").is_file():
        raise UserError(f"{run!r} is no run folder (it holds no recipe.toml); give the folder that train printed")
    return Path(run)


def open_run(
    run: str, name: str, device: str, place: commands.Place | config.TargetOptions, console: Console
) -> tuple[config.Recipe, HFTarget, DFlashDrafter, Checkpoint]:
    """A run's recipe, its target (at `place`, if it has moved), and the drafter of one of its checkpoints."""
    folder = require_run(run)
    recipe = read_recipe(str(folder / "recipe.toml"))
    recipe = replace(recipe, target=replace(recipe.target, trust_remote_code=place.trust_remote_code))
    if place.path:
        recipe = replace(recipe, target=replace(recipe.target, path=place.path, revision=None))
    found = find_checkpoint(folder, name, console.warn)
    drafter_class, _ = DRAFTERS[recipe.drafter.kind]
    weights = found.tensors("model")
    drafter = drafter_class.from_files(found.document("config.json"), weights)
    options = replace(recipe.target, layer_ids=tuple(drafter.config.target_layer_ids))
    target = load_target(options, choose_device(device))
    recorded = found.facts.get("fingerprints", {}).get("target", target.fingerprint).removesuffix("-fp8")
    comparable = next(iter(weights.values())).dtype == target.head.dtype  # fingerprints are of the weights as loaded
    if comparable and recorded != target.fingerprint:
        message = f"the target in {recipe.target.path} is not the one that {run} was trained for (other fingerprint)"
        if place.path:
            raise UserError(f"{message}; give the place of that one")
        console.warn(message)
    return recipe, target, drafter.to(device=target.device, dtype=target.head.dtype).eval(), found
