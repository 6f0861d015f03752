"""Let a target that is already served answer prompts: any OpenAI-compatible server, or several of them.

The output is appended to, one whole line per answered row, as answers arrive; a row is known by its id, so a killed run
continues with what is missing, in whatever order the prompts then are. Servers are trusted with the prompts and, if
asked for, with the key, and with nothing else: no redirect is followed, what they send is bounded, and what they say
reaches the terminal shortened and without control characters.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.config import RegenerateOptions
from draftsmith.data.asking import check_common
from draftsmith.data.dialogue import Dialogue
from draftsmith.data.http import Client, Failure, Secret, Servers
from draftsmith.data.output import Output, open_output
from draftsmith.data.prompts import Prompt, content_id, read_prompts
from draftsmith.errors import EnvironmentFault, UserError

REPORT_SECONDS = 10.0
"""Between two lines of progress."""
HOPELESS = 20
"""Rows that may fail in sequence before the first answer; then the run stops."""
KEPT_FINISHES = ("stop", "length", "tool_calls")


@dataclass
class _Run:
    """What all workers share."""

    options: RegenerateOptions
    client: Client
    arguments: dict[str, Any]
    output: Output
    report: Callable[[str], None]
    counts: Counter = field(default_factory=Counter)
    failed: list[dict] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    reported: float = field(default_factory=time.perf_counter)


def regenerate_served(options: RegenerateOptions, report: Callable[[str], None]) -> dict[str, int | float]:
    """Answer the prompts of `options.prompts` by `options.servers`; appends to `options.output` as `regenerate` does.

    Returns counts: answered, skipped, duplicates, requests, retries, stop, length, tool_calls, other (finish reasons;
    other ones are dropped), dropped, failed (listed in OUTPUT.failed.jsonl, tried again by the next run), tokens (as
    the servers count them), seconds. Raises UserError for bad options, DataError for unusable prompts or a damaged
    output, EnvironmentFault when no server answers.
    """
    arguments, key = check_options(options)
    prompts = read_prompts(options.prompts, options.limit, answered=options.turns == "all")
    path = Path(options.output)
    with open_output(path, prompts, options.prompts) as output:
        run = asyncio.run(_answer_all(options, key, arguments, output, report)) if output.waiting else None
    counts: dict[str, int | float] = {"answered": 0, **output.counts}
    if run is not None:
        _write_failed(run.failed, path, report)
        counts |= {**run.counts, "seconds": time.perf_counter() - run.started}
    return counts


def check_options(options: RegenerateOptions) -> tuple[dict[str, Any], Secret]:
    """The template arguments and the key. UserError for options that make no sense."""
    arguments = check_common(options)
    if options.concurrency < 1 or options.retries < 0 or options.timeout <= 0:
        raise UserError(
            f"concurrency {options.concurrency}, retries {options.retries}, timeout {options.timeout}: at least 1, at "
            "least 0, more than 0."
        )
    if options.drafter or options.cuda_graph:
        raise UserError("drafter and cuda_graph are for answers on this machine; the servers decide how they decode.")
    return arguments, Secret.from_environment(options.api_key_env)


async def _answer_all(
    options: RegenerateOptions,
    key: Secret,
    arguments: dict[str, Any],
    output: Output,
    report: Callable[[str], None],
) -> _Run:
    servers = Servers(options.servers, key, timeout=options.timeout, connections=options.concurrency)
    async with servers:
        client = Client(servers, options.model or await servers.only_model(), options.retries)
        number = len(output.waiting)
        report(f"asking {', '.join(servers.names)} for {number} answers of {client.model}")
        run = _Run(options, client, arguments, output, report)
        queue = iter(output.waiting)  # shared by the workers, so that each row is taken once
        workers = [asyncio.create_task(_work(run, queue)) for _ in range(min(options.concurrency, number))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    run.counts["requests"], run.counts["retries"] = client.requests, client.retried
    return run


async def _work(run: _Run, queue: Iterator[Prompt]) -> None:
    for prompt in queue:
        try:
            dialogue = await _answer(run, prompt)
        except Failure as failure:
            run.counts["failed"] += 1
            run.failed.append({"id": prompt.id, "reason": str(failure)})
            if not run.counts["answered"] and run.counts["failed"] >= HOPELESS:
                raise EnvironmentFault(f"the first {HOPELESS} rows failed, the last: {failure}") from failure
            continue
        finish = dialogue.finish
        run.counts[finish if finish in KEPT_FINISHES else "other"] += 1
        if finish not in KEPT_FINISHES or (finish == "length" and run.options.unfinished == "drop"):
            run.counts["dropped"] += 1
        else:
            run.counts["answered"] += 1
            run.output.append(dialogue.row())
        _progress(run)


async def _answer(run: _Run, prompt: Prompt) -> Dialogue:
    """The dialogue, walked to its end."""
    dialogue = Dialogue(prompt, run.options.turns, run.arguments)
    while dialogue.ask():
        reply = await run.client.ask(_request(run, dialogue))
        run.counts["tokens"] += reply.tokens
        ids = None if reply.answer_ids is None else (reply.prompt_ids, reply.answer_ids)
        dialogue.answer(reply.message, reply.finish, ids)
    return dialogue


def _request(run: _Run, dialogue: Dialogue) -> dict[str, Any]:
    options, prompt, history, arguments = run.options, dialogue.prompt, dialogue.messages, dialogue.arguments
    # One seed per row, whatever its neighbours are, as in `regenerate`.
    seed = int(content_id([{"seed": options.seed, "id": prompt.id, "turn": len(history)}]), 16) >> 33
    body: dict[str, Any] = {
        "model": run.client.model,
        "messages": [{key: value for key, value in one.items() if key != "train"} for one in history],
        "max_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "seed": seed,
    }
    body |= {"top_k": options.top_k} if options.top_k else {}
    body |= prompt.sampling
    body |= {"tools": list(prompt.tools)} if prompt.tools else {}
    body |= {"chat_template_kwargs": arguments} if arguments else {}
    body |= {"return_token_ids": True} if options.token_ids else {}
    return body


def _progress(run: _Run) -> None:
    now, total = time.perf_counter(), len(run.output.waiting)
    done = run.counts["answered"] + run.counts["dropped"] + run.counts["failed"]
    if now - run.reported > REPORT_SECONDS or done == total:
        run.reported = now
        rate = run.counts["tokens"] / (now - run.started)
        failed = f", {run.counts['failed']} failed" if run.counts["failed"] else ""
        run.report(f"{done}/{total} answers{failed}, {run.counts['tokens']} tokens, {rate:.0f} tokens/s")


def _write_failed(failed: list[dict], output: Path, report: Callable[[str], None]) -> None:
    """The list of what failed in this run, or none."""
    path = output.with_name(output.name + ".failed.jsonl")
    path.unlink(missing_ok=True)
    if not failed:
        return
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in failed), encoding="utf-8")
    for reason, count in Counter(one["reason"] for one in failed).most_common(3):
        report(f"{count} rows failed: {reason}")
    report(f"{path} lists the {len(failed)} failed rows; the same command tries them again")
