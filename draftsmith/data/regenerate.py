"""Let the target answer prompts, so that the drafter learns to continue what the target itself writes.

Every prompt is rendered with the target's own chat template and answered by its plain distribution: the sampling
defaults and penalties that some models carry in their generation config are switched off, because speculative decoding
verifies drafts against the plain distribution too.

Sampling draws one uniform number per row and step, from a generator seeded with (seed, id) alone, and inverts the
cumulative distribution at it: a row's draws do not depend on its neighbours in the batch, nor on where a killed run was
resumed. What remains is rounding: another batch composition pads differently, and logits that nearly tie may then
resolve differently, greedy or sampled.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.config import RegenerateOptions
from draftsmith.data.chat import render_prompt
from draftsmith.data.output import recover, row_bytes
from draftsmith.data.prompts import Prompt, content_id, read_prompts
from draftsmith.data.server import questions as turns_of
from draftsmith.data.server import template_arguments
from draftsmith.data.template import check_arguments
from draftsmith.errors import DataError, UserError

WINDOW = 16
"""Batches that are sorted by length together: little padding, yet every stretch of the output mixes all lengths."""


@dataclass(frozen=True, kw_only=True)
class Question:
    prompt: Prompt
    tokens: list[int]
    """The rendered prompt up to where the answer begins."""
    arguments: dict[str, Any]
    """Of the chat template."""


def regenerate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: RegenerateOptions,
    *,
    device: torch.device,
    report: Callable[[str], None],
) -> dict[str, int | float]:
    """Answer the prompts of `options.prompts` and append the conversations to `options.output`.

    A line of the output holds {"id", "messages", "tags", "finish"}; finish is "stop" (the target ended its answer) or
    "length" (cut after max_new_tokens). Rows whose id the output already holds are skipped, so a killed run continues
    when called again, with whatever order or limit; answers that `unfinished = "drop"` left out are tried again. The
    options that shape an answer are not stored: give another output when they change.

    Returns counts: answered (rows appended), skipped (there already), duplicates (prompts that occur again in the
    input), stop and length (how the answers ended), dropped (of length, not appended), retokenised (of answered: the
    text encodes to other tokens than those the target wrote), tokens (generated, end tokens included), seconds. Raises
    UserError for bad options and DataError for unusable prompts or a damaged output.
    """
    _check(options)
    prompts = read_prompts(options.prompts, options.limit)
    arguments = template_arguments(options)
    output = Path(options.output)
    unique = {prompt.id: prompt for prompt in prompts}
    done = recover(output)
    for name, answered in done.items():
        if name in unique and content_id(unique[name].messages) != answered:
            raise DataError(f"{output}: id {name!r} answers another prompt than the one in {options.prompts}.")
    waiting = [prompt for prompt in unique.values() if prompt.id not in done]
    positions = model.config.get_text_config().max_position_embeddings
    questions = [_render(prompt, tokenizer, positions, options, arguments) for prompt in waiting]

    counts = {"answered": 0, "skipped": len(unique) - len(waiting), "duplicates": len(prompts) - len(unique)}
    counts |= {"stop": 0, "length": 0, "dropped": 0, "retokenised": 0, "tokens": 0, "seconds": 0.0}
    start, asked = time.perf_counter(), 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("ab") as file:
        for batch in _batches(questions, options.batch):
            for question, tokens, finish in _answer(batch, model, tokenizer, options, device):
                counts[finish] += 1
                counts["tokens"] += len(tokens) + (finish == "stop")
                if finish == "length" and options.unfinished == "drop":
                    counts["dropped"] += 1
                    continue
                counts["answered"] += 1
                text = str(tokenizer.decode(tokens))
                counts["retokenised"] += tokenizer(text, add_special_tokens=False)["input_ids"] != tokens
                file.write(row_bytes(_row(question, text, finish)))
            file.flush()
            os.fsync(file.fileno())
            asked += len(batch)
            counts["seconds"] = time.perf_counter() - start
            rate = counts["tokens"] / counts["seconds"]
            report(f"{asked}/{len(questions)} answers, {counts['tokens']} tokens, {rate:.0f} tokens/s")
    return counts


def _check(options: RegenerateOptions, whose: str = "") -> None:
    if not options.prompts or not options.output:
        raise UserError("regenerate needs both 'prompts' and 'output', the paths of two JSONL files.")
    if Path(options.prompts).resolve() == Path(options.output).resolve():
        raise UserError(f"'prompts' and 'output' are the same file, {options.output}. Choose another output.")
    if options.servers or options.model or options.api_key_env or options.token_ids or options.turns != "last":
        raise UserError(
            "model, api_key_env, token_ids and turns 'all' need 'servers'; without, the target answers here."
        )
    if options.batch < 1 or options.max_new_tokens < 1:
        raise UserError(
            f"{whose}batch {options.batch}, max_new_tokens {options.max_new_tokens}: both must be at least 1."
        )
    if options.temperature < 0 or options.top_k < 0 or not 0 < options.top_p <= 1:
        raise UserError(
            f"{whose}temperature {options.temperature}, top_k {options.top_k}, top_p {options.top_p}: temperature and "
            "top_k must not be negative, and top_p must lie in (0, 1]."
        )


def _row(question: Question, answer: str, finish: str) -> dict:
    prompt = question.prompt
    (given,) = turns_of(prompt, "last")  # earlier answers are marked: the target did not write them
    messages = [*given, {"role": "assistant", "content": answer}]
    row = {"id": prompt.id, "messages": messages, "tags": list(prompt.tags), "finish": finish}
    row |= {"tools": list(prompt.tools)} if prompt.tools else {}
    row |= {"chat_template_kwargs": question.arguments} if question.arguments else {}
    return row | ({"asked": content_id(prompt.messages)} if given != list(prompt.messages) else {})


def _row_options(options: RegenerateOptions, prompt: Prompt) -> RegenerateOptions:
    """The run's options with the row's own sampling."""
    own: dict[str, Any] = {NAMES.get(key, key): value for key, value in prompt.sampling.items() if key != "min_p"}
    for name in ("top_k", "max_new_tokens", "seed"):
        own |= {name: int(own[name])} if name in own else {}
    for name in ("temperature", "top_p"):
        own |= {name: float(own[name])} if name in own else {}
    changed = replace(options, **own)
    _check(changed, f"Prompt {prompt.id!r}: ")
    return changed


NAMES = {"max_tokens": "max_new_tokens"}
"""What a server calls options that have another name here."""


def _render(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    positions: int,
    options: RegenerateOptions,
    arguments: dict[str, Any],
) -> Question:
    longest = positions - _row_options(options, prompt).max_new_tokens
    arguments = {**arguments, **prompt.arguments}
    try:
        check_arguments(arguments)
        found = render_prompt(tokenizer, list(prompt.messages), tools=list(prompt.tools) or None, arguments=arguments)
        tokens = found.tolist()
    except DataError as error:
        raise DataError(f"Prompt {prompt.id!r}: {error}") from error
    if len(tokens) > longest:
        raise DataError(
            f"Prompt {prompt.id!r} has {len(tokens)} tokens; the target has room for {longest} before the answer. "
            "Shorten it or lower max_new_tokens."
        )
    return Question(prompt=prompt, tokens=tokens, arguments=arguments)


def _batches(questions: list[Question], size: int) -> Iterator[list[Question]]:
    """In order, but sorted by length within each window; the longest first, so that memory runs out early or never.

    Rows of one batch are sampled in the same way.
    """

    def sampling(question: Question) -> str:
        return json.dumps(question.prompt.sampling, sort_keys=True)

    for begin in range(0, len(questions), WINDOW * size):
        window = sorted(questions[begin : begin + WINDOW * size], key=lambda one: (sampling(one), -len(one.tokens)))
        for _, alike in groupby(window, key=sampling):
            rows = list(alike)
            for start in range(0, len(rows), size):
                yield rows[start : start + size]


def _answer(
    batch: list[Question],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: RegenerateOptions,
    device: torch.device,
) -> Iterator[tuple[Question, list[int], str]]:
    """Each question with its answer's tokens (the end token left out) and how the answer ended."""
    options = _row_options(options, batch[0].prompt)
    stop_ids = _stop_ids(model, tokenizer)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_ids[0]
    width = max(len(question.tokens) for question in batch)
    padding = [width - len(question.tokens) for question in batch]  # on the left: all answers begin in one column
    tokens = [[pad_id] * pad + question.tokens for pad, question in zip(padding, batch, strict=True)]
    mask = [[0] * pad + [1] * (width - pad) for pad in padding]
    own_defaults = model.generation_config
    model.generation_config = GenerationConfig()  # `generate` would fill every gap of ours with the model's defaults
    try:
        with torch.inference_mode():
            written = model.generate(  # pyright: ignore[reportCallIssue]: the type stub of PreTrainedModel lacks it
                input_ids=torch.tensor(tokens, device=device),
                attention_mask=torch.tensor(mask, device=device),
                generation_config=GenerationConfig(
                    max_new_tokens=options.max_new_tokens, do_sample=False, eos_token_id=stop_ids, pad_token_id=pad_id
                ),
                logits_processor=_sampling(batch, options, width, device),
            )
    finally:
        model.generation_config = own_defaults
    for question, row in zip(batch, written[:, width:].tolist(), strict=True):
        end = next((index for index, token in enumerate(row) if token in stop_ids), None)
        yield question, row[:end], "length" if end is None else "stop"


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end an answer: those of the generation config (several for some models) and the tokenizer's eos."""
    own = model.generation_config.eos_token_id
    ids = [*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id]
    stop_ids = sorted({token for token in ids if isinstance(token, int)})
    if not stop_ids:
        raise UserError("The target names no end token, in its generation config or its tokenizer. Set eos_token_id.")
    return stop_ids


class InverseSampling(LogitsProcessor):
    """Leaves one token per row possible: where the cumulative distribution passes the row's number for this step."""

    def __init__(self, uniform: Float[Tensor, "row step"], prompt_width: int):
        self.uniform, self.prompt_width = uniform, prompt_width

    def __call__(self, input_ids: Int[Tensor, "row tok"], scores: Float[Tensor, "row voc"]) -> Float[Tensor, "row voc"]:
        step = input_ids.shape[1] - self.prompt_width
        # float64: over 100,000 ids a float32 sum loses the tail.
        cumulative = scores.double().softmax(-1).cumsum(-1)
        level = self.uniform[:, step : step + 1] * cumulative[:, -1:]
        # right=True: never an id of probability zero, whose step of the sum has no height.
        chosen = torch.searchsorted(cumulative, level, right=True)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)


def _sampling(
    batch: list[Question], options: RegenerateOptions, prompt_width: int, device: torch.device
) -> LogitsProcessorList:
    """Empty when greedy. Otherwise the warpers and the draw, after which the greedy choice is the sample."""
    if options.temperature == 0:
        return LogitsProcessorList()
    processors = LogitsProcessorList([TemperatureLogitsWarper(float(options.temperature))])
    if options.top_k > 0:
        processors.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        processors.append(TopPLogitsWarper(options.top_p))
    if min_p := batch[0].prompt.sampling.get("min_p"):
        processors.append(MinPLogitsWarper(float(min_p)))
    uniform = torch.empty(len(batch), options.max_new_tokens, dtype=torch.float64)
    for row, question in zip(uniform, batch, strict=True):
        key = hashlib.blake2b(f"{options.seed}\n{question.prompt.id}".encode(), digest_size=8).digest()
        row.uniform_(generator=torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1))
    processors.append(InverseSampling(uniform.to(device), prompt_width))
    return processors
