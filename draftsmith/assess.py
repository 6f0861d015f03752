"""The verb `evaluate`: a drafter on suites of prompts, by decoding with and without it, and its figures as files."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith import commands
from draftsmith.acceptance import told_counts
from draftsmith.adopt import adopt
from draftsmith.checks import choose_device
from draftsmith.config import EvaluationOptions, TargetOptions
from draftsmith.data.prompts import read_prompts
from draftsmith.data.sources import open_source
from draftsmith.data.suites import Suite, read_suite
from draftsmith.data.template import chat_arguments
from draftsmith.drafters import DFlashDrafter
from draftsmith.errors import UserError
from draftsmith.evaluate import evaluate as measure
from draftsmith.evaluate import make_cases, warm_up
from draftsmith.export.folder import measure as measure_file
from draftsmith.export.read import find_drafter
from draftsmith.findings import CheckFailed
from draftsmith.results import LATER, rescore, sample_of, score, write_evaluation
from draftsmith.run import versions
from draftsmith.targets import HFTarget
from draftsmith.telemetry import Console
from draftsmith.verbs import open_run, require_run


@dataclass(frozen=True, kw_only=True)
class Contender:
    """What is measured, and how it is asked."""

    name: str
    target: HFTarget
    drafter: DFlashDrafter
    options: EvaluationOptions
    arguments: dict[str, Any]
    """Of the chat template."""
    seed: int
    facts: dict
    """Of its origin, for the results."""


def evaluate(command: commands.EvaluateCommand) -> None:
    """Decode prompts with a run's drafter (its recipe says what is not given, see `cli`) or with any other."""
    console = Console()
    if command.rescore:
        again(command, console)
        return
    if bool(command.run) == bool(command.drafter):
        raise UserError("give either the folder of a run, or --drafter FOLDER with --target.path")
    if command.run:
        require_run(command.run)
        if idle := [
            k
            for k, v in vars(command.target).items()
            if k not in ("path", "trust_remote_code") and v != getattr(TargetOptions(), k)
        ]:
            raise UserError(
                f"target.{idle[0]} has no effect here: it is as in the recipe of {command.run}; leave it out"
            )
    suites = choose_suites(command)
    contender = open_contender(command, suites, console)
    reports, samples = {}, []
    for suite in suites:
        console.say(f"{contender.name}, {len(suite.prompts)} of {suite.total} prompts of {suite.name}")
        reports[suite.name], answered = run_suite(suite, contender)
        samples += answered
        show_figures(reports[suite.name], console)
    output = Path(command.output or (Path(command.run) / "evaluation" if command.run else ""))
    if command.output or command.run:
        report = {"suites": reports, "block_size": contender.drafter.config.block_size, **contender.facts}
        write_evaluation(output, report, samples)
        console.say(f"wrote {output}/results.json and samples.jsonl")
    following = f'generate {command.run} "your question"' if command.run else f"train RECIPE --init {command.drafter}"
    console.say(f"next: draftsmith {following}")


def choose_suites(command: commands.EvaluateCommand) -> list[Suite]:
    """Those named, or the prompts file as the only one."""
    if command.suite:
        suites = [read_suite(name, command.evaluation.limit) for name in command.suite]
        names = [suite.name for suite in suites]
        if len(set(names)) < len(names):
            raise UserError(f"two suites have one name ({', '.join(names)}); rename a file, or leave one out")
        return suites
    name = command.evaluation.prompts
    if not name:
        raise UserError(
            "evaluation.prompts is not given and the run's recipe names none; give --evaluation.prompts FILE or --suite"
        )
    prompts, path = read_prompts(name), Path(name)
    measured = measure_file(path) if path.is_file() else {"sha256": open_source(name).fingerprint()}
    chosen = prompts[: command.evaluation.limit]
    return [Suite(name=path.stem, prompts=chosen, total=len(prompts), source={"file": path.name, **measured})]


def open_contender(command: commands.EvaluateCommand, suites: list[Suite], console: Console) -> Contender:
    options, seed, facts = command.evaluation, 0, {}
    if command.run:
        recipe, target, drafter, found = open_run(
            command.run, command.checkpoint, command.device, command.target, console
        )
        seed, name, arguments = recipe.seed, f"{found.path.name} of {command.run}", chat_arguments(options, recipe.data)
        facts = {"checkpoint": found.path.name, "fingerprints": found.facts.get("fingerprints", {})}
    else:
        device, name, arguments = choose_device(command.device), command.drafter, chat_arguments(options)
        first = suites[0].prompts
        folder = find_drafter(name)
        target, drafter = adopt(folder, command.target, device, first, options, arguments, console.say)
        files = sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors"))
        facts = {"files": {path.name: measure_file(path) for path in files}}
    facts |= {
        "drafter": name,
        "target": command.target.path if command.drafter else recipe.target.path,
        "target_fingerprint": target.fingerprint,
        "dtype": str(target.head.dtype).removeprefix("torch."),
        "device": target.device.type,
        "chat_template": arguments,
        "options": vars(options),
        "versions": versions(),
    }
    return Contender(
        name=name, target=target, drafter=drafter, options=options, arguments=arguments, seed=seed, facts=facts
    )


def run_suite(suite: Suite, contender: Contender) -> tuple[dict, list[dict]]:
    """The suite's report and its samples."""
    target, drafter, options = contender.target, contender.drafter, contender.options
    warm_up(target, drafter, make_cases(target, suite.prompts[:1], options, lambda done: None, contender.arguments)[0])
    start = time.perf_counter()
    cases = make_cases(target, suite.prompts, options, lambda done: None, contender.arguments, contender.seed)
    plain_seconds = time.perf_counter() - start
    result = measure(target, drafter, cases, options, contender.seed)
    rows = zip(cases, result.answers, result.agreements, strict=True)
    samples = [sample_of(suite.name, *row) for row in rows]
    speed = None
    if options.temperature == 0:  # of this loop, one conversation at a time: no figure of a server
        plain_tokens = sum(len(case.plain or ()) for case in cases)
        speed = {"plain": plain_tokens / plain_seconds, "speculative": result.tokens / result.seconds}
    source = suite.source | {"prompts": len(suite.prompts), "of": suite.total}
    report = score(samples, drafter.config.block_size)
    return report | {"source": source, "reference_loop_tokens_per_second": speed}, samples


def show_figures(report: dict, console: Console) -> None:
    def told(figure: dict) -> str:
        low, high = figure["interval"] or (math.nan, math.nan)
        between = "" if math.isnan(low) else f", 95 % between {low:.3f} and {high:.3f}"
        return f"{figure['value']:.3f}  ({figure['count']} responses{between})"

    console.say(f"accept length          {told(report['accept_length'])}, mean over responses")
    console.say(f"accept length, pooled  {report['accept_length_pooled']:.3f}  (all tokens over all cycles)")
    console.say("accepted by slot       " + " ".join(f"{slot['value']:.2f}" for slot in report["by_slot"]))
    for tag, figure in report["by_tag"].items():
        console.say(f"  {tag:<20} {told(figure)}")
    if len(report["by_context"]) > 1:
        for name, figure in report["by_context"].items():
            console.say(f"  {'context ' + name:<20} {figure['value']:.3f}  ({figure['count']} cycles), pooled")
    if report["lossless"] is not None:
        counts = report["num_equal"], report["num_near_ties"], report["answers"]
        console.say(f"lossless               {told_counts(*counts, 'plain decoding')}")
    if speed := report.get("reference_loop_tokens_per_second"):
        console.say(
            f"reference loop         {speed['speculative']:.1f} tokens a second, plain {speed['plain']:.1f}; batch 1, "
            "no figure of a server"
        )


def again(command: commands.EvaluateCommand, console: Console) -> None:
    """Score an evaluation's samples once more. Raises CheckFailed if its results.json says something else."""
    if command.run or command.drafter or command.suite or command.output:
        raise UserError("--rescore takes the folder of an evaluation and nothing else")
    report, found = rescore(Path(command.rescore))
    differing = []
    for name, figures in found.items():
        console.say(f"{name}, {figures['answers']} answers")
        show_figures(figures, console)
        written = report["suites"][name]
        differing += [
            f"{name}: {key}"
            for key, value in figures.items()
            if written.get(key, value if key in LATER else None) != value
        ]
    if differing:
        raise CheckFailed(f"{command.rescore}/results.json does not follow from its samples: {', '.join(differing)}")
    console.say(f"{command.rescore}/results.json follows from its samples")
