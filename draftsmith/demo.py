"""The demo: a real drafter for a real, small chat model, trained and measured on this machine in minutes."""

from __future__ import annotations

import gzip
import json
import shutil
import time
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import torch

from draftsmith.commands import DemoCommand, Place
from draftsmith.config import Recipe
from draftsmith.data.chat import prompt_tokens
from draftsmith.data.prepare import prepare, tokenizer_fingerprint
from draftsmith.data.prompts import read_prompts
from draftsmith.data.template import chat_arguments
from draftsmith.decode import Sampling, decode_speculative
from draftsmith.errors import UserError
from draftsmith.recipe import read_recipe
from draftsmith.run import refuse_other_recipe
from draftsmith.targets.gguf import SMOLLM2_SHA256, convert, find_smollm2
from draftsmith.targets.hf import end_ids, load_tokenizer
from draftsmith.telemetry import Console
from draftsmith.train import train
from draftsmith.verbs import finish, open_run, show_answer

TARGET = "SmolLM2-135M-Instruct"
ROWS = 400  # of the bundled conversations; capturing their features is what takes time on a CPU
SMALLEST = {"rows": 120, "steps": 20, "prompts": 4, "max_new_tokens": 24}


def demo(command: DemoCommand) -> None:
    """Convert the target, prepare the bundled answers, train, evaluate, show a sample. Writes RUN/results.json."""
    console = Console()
    start = time.perf_counter()
    cache = Path(command.cache)
    console.say(
        "A drafter guesses the next tokens at once; the target checks them in one pass and keeps what is right.\n"
        f"target: {TARGET}, fp32. Data: answers it wrote itself, bundled. At most 10 minutes on 2 cores."
    )
    folder = cache / TARGET
    if not (folder / "config.json").is_file():
        console.say(f"converting the target once, to {folder}")
        convert(find_smollm2(), folder, sha256=SMOLLM2_SHA256)
    recipe = demo_recipe(command, folder)
    _set_finished_run_aside(recipe, console)
    _unpack_data(command, recipe, cache)
    tokenizer = load_tokenizer(recipe.target)
    ends = end_ids(recipe.target, tokenizer)
    prepare(tokenizer, tokenizer_fingerprint(tokenizer), recipe.data, console.say, end_ids=ends)
    results = train(recipe, console)
    assert results is not None, "the demo is one process"

    console.say("a held-out question, answered with the drafter's help; accepted guesses are marked:")
    _show_sample(recipe, console)
    finish(recipe, console, recorded_prompts=2)
    results |= {"seconds": time.perf_counter() - start}
    (Path(recipe.run) / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    _conclude(command, results, console)


def demo_recipe(command: DemoCommand, target: Path) -> Recipe:
    """The bundled recipe with this machine's folders; smaller in every respect for `--size smallest`."""
    recipe = read_recipe("smollm2-demo")
    cache = Path(command.cache)
    recipe = replace(
        recipe,
        run=command.run,
        target=replace(recipe.target, path=str(target)),
        data=replace(
            recipe.data,
            conversations=str(cache / f"conversations-{command.size}.jsonl"),
            prepared=str(cache / f"prepared-{command.size}"),
        ),
        evaluation=replace(recipe.evaluation, prompts=str(cache / "heldout.jsonl")),
    )
    if command.size == "smallest":
        steps = SMALLEST["steps"]
        recipe = replace(
            recipe,
            optim=replace(recipe.optim, steps=steps),
            checkpoint=replace(recipe.checkpoint, every=steps),
            evaluation=replace(
                recipe.evaluation,
                every=steps,
                limit=SMALLEST["prompts"],
                max_new_tokens=SMALLEST["max_new_tokens"],
            ),
        )
    return recipe


def _set_finished_run_aside(recipe: Recipe, console: Console) -> None:
    """An unfinished demo of the same recipe is continued; any other demo makes room, and the last one is kept."""
    folder = Path(recipe.run)
    if not folder.exists():
        return
    try:
        refuse_other_recipe(recipe)
        unfinished = not (folder / "results.json").exists()
    except UserError:
        unfinished = False
    if unfinished:
        return
    if not (folder / "recipe.toml").is_file():
        raise UserError(f"{folder} exists and is no run folder; give another one: draftsmith demo --run FOLDER")
    previous = folder.with_name(folder.name + ".previous")
    if (previous / "recipe.toml").is_file():
        shutil.rmtree(previous)
    folder.rename(previous)
    console.say(f"the last demo's run folder is now {previous}")


def _unpack_data(command: DemoCommand, recipe: Recipe, cache: Path) -> None:
    bundled = files("draftsmith") / "demo_data"
    cache.mkdir(parents=True, exist_ok=True)
    rows = gzip.decompress((bundled / "conversations.jsonl.gz").read_bytes()).decode().splitlines(keepends=True)
    kept = rows[: SMALLEST["rows"] if command.size == "smallest" else ROWS]
    Path(recipe.data.conversations).write_text("".join(kept))
    Path(recipe.evaluation.prompts).write_text((bundled / "heldout.jsonl").read_text())


def _show_sample(recipe: Recipe, console: Console) -> None:
    _, target, drafter, _ = open_run(recipe.run, "best", recipe.device, Place(), console)
    prompt = read_prompts(Path(recipe.evaluation.prompts), 1)[0]
    console.say(f"  {prompt.messages[-1]['content']}")
    arguments = chat_arguments(recipe.evaluation, recipe.data)
    tokens = torch.from_numpy(prompt_tokens(target.tokenizer, prompt, arguments)).to(target.device)
    decoded = decode_speculative(
        target, drafter, tokens, recipe.evaluation.max_new_tokens, Sampling(), torch.Generator()
    )
    show_answer(target, decoded, console)


def _conclude(command: DemoCommand, results: dict, console: Console) -> None:
    console.say(
        f"accept length before training {results['accept_length_before']:.2f}, after "
        f"{results['accept_length_after']:.2f} (pooled {results['accept_length_pooled_after']:.2f}), on "
        f"{results['prompts']} held-out prompts of the families trained on: in-domain, other seeds. 1.00 is no help."
    )
    equal = "equal to plain decoding on all prompts" if results["lossless"] else "NOT EQUAL to plain decoding"
    console.say(f"lossless check: output with the drafter is {equal}")
    console.say(f"{results['seconds']:.0f} seconds. CPU time is no speed claim. Run folder: {command.run}")
    console.say(f'next: draftsmith generate {command.run} "What is 17 + 25?"')
