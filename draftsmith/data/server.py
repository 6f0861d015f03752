"""Let a target that is already served answer prompts: any OpenAI-compatible server, or several of them.

The output is appended to, one whole line per answered row, as answers arrive; a row is known by its id, so a killed run
continues with what is missing, in whatever order the prompts then are. Servers are trusted with the prompts and, if
asked for, with the key, and with nothing else: no redirect is followed, what they send is bounded, and what they say
reaches the terminal shortened and without control characters.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.config import RegenerateOptions
from draftsmith.data.http import Client, Failure, Secret, Servers
from draftsmith.data.output import recover, row_bytes
from draftsmith.data.prompts import Prompt, content_id, read_prompts
from draftsmith.data.template import check_arguments
from draftsmith.errors import DataError, EnvironmentFault, UserError

if TYPE_CHECKING:
    from io import BufferedWriter

REPORT_SECONDS = 10.0
"""Between two lines of progress."""
SYNC_SECONDS = 1.0
"""Answers of this many seconds may be lost by a crash of the machine; none by a kill of the process."""
HOPELESS = 20
"""Rows that may fail in sequence before the first answer; then the run stops."""
KEPT_FINISHES = ("stop", "length", "tool_calls")


@dataclass
class _Run:
    """What all workers share."""

    options: RegenerateOptions
    client: Client
    arguments: dict[str, Any]
    file: BufferedWriter
    report: Callable[[str], None]
    total: int
    counts: Counter = field(default_factory=Counter)
    failed: list[dict] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    reported: float = field(default_factory=time.perf_counter)
    synced: float = field(default_factory=time.perf_counter)


def regenerate_served(options: RegenerateOptions, report: Callable[[str], None]) -> dict[str, int | float]:
    """Answer the prompts of `options.prompts` by `options.servers`; appends to `options.output` as `regenerate` does.

    Returns counts: answered, skipped, duplicates, requests, retries, stop, length, tool_calls, other (finish reasons;
    other ones are dropped), dropped, failed (listed in OUTPUT.failed.jsonl, tried again by the next run), tokens (as
    the servers count them), seconds. Raises UserError for bad options, DataError for unusable prompts or a damaged
    output, EnvironmentFault when no server answers.
    """
    arguments, key = check_options(options)
    prompts = read_prompts(options.prompts, options.limit, answered=options.turns == "all")
    unique = {prompt.id: prompt for prompt in prompts}
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{output} is being written by another process; wait for it") from error
        done = recover(output)
        for name, asked in done.items():
            if name in unique and content_id(unique[name].messages) != asked:
                raise DataError(f"{output}: id {name!r} answers another prompt than the one in {options.prompts}.")
        waiting = [prompt for prompt in unique.values() if prompt.id not in done]
        counts: dict[str, int | float] = {"answered": 0, "skipped": len(unique) - len(waiting)}
        counts["duplicates"] = len(prompts) - len(unique)
        try:
            run = asyncio.run(_answer_all(options, key, arguments, waiting, file, report)) if waiting else None
        finally:
            if output.stat().st_size == 0:
                output.unlink()
    if run is not None:
        _write_failed(run.failed, output, report)
        counts |= {**run.counts, "seconds": time.perf_counter() - run.started}
    return counts


def check_options(options: RegenerateOptions) -> tuple[dict[str, Any], Secret]:
    """The template arguments and the key. UserError for options that make no sense."""
    if not options.prompts or not options.output:
        raise UserError("regenerate needs both 'prompts' and 'output', the paths of two JSONL files.")
    if options.concurrency < 1 or options.retries < 0 or options.timeout <= 0 or options.max_new_tokens < 1:
        raise UserError(
            f"concurrency {options.concurrency}, retries {options.retries}, timeout {options.timeout}, max_new_tokens "
            f"{options.max_new_tokens}: at least 1, at least 0, more than 0, at least 1."
        )
    if options.temperature < 0 or options.top_k < 0 or not 0 < options.top_p <= 1:
        raise UserError(
            f"temperature {options.temperature}, top_k {options.top_k}, top_p {options.top_p}: temperature and top_k "
            "must not be negative, and top_p must lie in (0, 1]."
        )
    return template_arguments(options), Secret.from_environment(options.api_key_env)


def template_arguments(options: RegenerateOptions) -> dict[str, Any]:
    try:
        arguments = json.loads(options.template_kwargs or "{}")
    except json.JSONDecodeError as error:
        raise UserError(f"regenerate.template_kwargs is not JSON ({error.msg})") from error
    if not isinstance(arguments, dict):
        raise UserError('regenerate.template_kwargs must be a JSON object, as in {"enable_thinking": false}')
    check_arguments(arguments)
    return arguments


async def _answer_all(
    options: RegenerateOptions,
    key: Secret,
    arguments: dict[str, Any],
    waiting: list[Prompt],
    file: BufferedWriter,
    report: Callable[[str], None],
) -> _Run:
    servers = Servers(options.servers, key, timeout=options.timeout, connections=options.concurrency)
    async with servers:
        client = Client(servers, options.model or await servers.only_model(), options.retries)
        report(f"asking {', '.join(servers.names)} for {len(waiting)} answers of {client.model}")
        run = _Run(options, client, arguments, file, report, len(waiting))
        queue = iter(waiting)  # shared by the workers, so that each row is taken once
        workers = [asyncio.create_task(_work(run, queue)) for _ in range(min(options.concurrency, len(waiting)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            file.flush()
            os.fsync(file.fileno())
    run.counts["requests"], run.counts["retries"] = client.requests, client.retried
    return run


async def _work(run: _Run, queue: Iterator[Prompt]) -> None:
    for prompt in queue:
        try:
            row, finish = await _answer(run, prompt)
        except Failure as failure:
            run.counts["failed"] += 1
            run.failed.append({"id": prompt.id, "reason": str(failure)})
            if not run.counts["answered"] and run.counts["failed"] >= HOPELESS:
                raise EnvironmentFault(f"the first {HOPELESS} rows failed, the last: {failure}") from failure
            continue
        run.counts[finish if finish in KEPT_FINISHES else "other"] += 1
        if finish not in KEPT_FINISHES or (finish == "length" and run.options.unfinished == "drop"):
            run.counts["dropped"] += 1
        else:
            run.counts["answered"] += 1
            run.file.write(row_bytes(row))
            run.file.flush()  # to the system: from here on a kill of the process loses nothing
        _progress(run)


async def _answer(run: _Run, prompt: Prompt) -> tuple[dict, str]:
    """The row of the output, and how its last answer ended."""
    arguments = {**run.arguments, **prompt.arguments}
    history: list[dict] = []
    served: list[dict] = []
    finish = "stop"
    for question in questions(prompt, run.options.turns):
        history += question
        reply = await run.client.ask(_request(run, prompt, history, arguments))
        run.counts["tokens"] += reply.tokens
        finish = reply.finish
        history.append(reply.message)
        if reply.answer_ids is not None:
            ids = {"prompt_ids": reply.prompt_ids, "answer_ids": reply.answer_ids}
            served.append({"message": len(history) - 1, **ids})
        if finish != "stop":  # a cut answer or a call without a result: nothing can follow
            break
    row = {"id": prompt.id, "messages": history, "tags": list(prompt.tags), "finish": finish}
    row |= {"tools": list(prompt.tools)} if prompt.tools else {}
    row |= {"chat_template_kwargs": arguments} if arguments else {}
    row |= {"served": served} if served else {}
    return {**row, "asked": content_id(prompt.messages)}, finish


def questions(prompt: Prompt, turns: str) -> Iterator[list[dict]]:
    """What is added to the conversation before each answer of the target.

    "last": all that is given. "all": up to the next answer that is not a tool call; the given answer is left out. Given
    answers that stay were not written by the target, and are marked so.
    """
    added: list[dict] = []
    for message in prompt.messages:
        given = message["role"] == "assistant"
        if given and turns == "all" and not message.get("tool_calls"):
            yield added
            added = []
        else:
            added.append({**message, "train": False} if given else message)
    if added and added[-1]["role"] in ("user", "tool"):
        yield added


def _request(run: _Run, prompt: Prompt, history: list[dict], arguments: dict[str, Any]) -> dict[str, Any]:
    options = run.options
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
    now = time.perf_counter()
    if now - run.synced > SYNC_SECONDS:
        os.fsync(run.file.fileno())
        run.synced = now
    done = run.counts["answered"] + run.counts["dropped"] + run.counts["failed"]
    if now - run.reported > REPORT_SECONDS or done == run.total:
        run.reported = now
        rate = run.counts["tokens"] / (now - run.started)
        failed = f", {run.counts['failed']} failed" if run.counts["failed"] else ""
        run.report(f"{done}/{run.total} answers{failed}, {run.counts['tokens']} tokens, {rate:.0f} tokens/s")


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
