"""Let the target answer prompts, so that the drafter learns to continue what the target itself writes.

Every prompt is rendered with the target's own chat template and answered by its plain distribution: the sampling
defaults and penalties that some models carry in their generation config are not applied, because speculative decoding
verifies drafts against the plain distribution too.

A row's answer depends on its prompt, its sampling options and its seed (see `sampling`), not on its neighbours, nor on
where a killed run was resumed, nor on a drafter. What remains is rounding: another width of the cache adds in another
order, and logits that nearly tie may then resolve differently, greedy or sampled.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.config import RegenerateOptions
from draftsmith.data.asking import check_common, check_sampling
from draftsmith.data.chat import render_prompt
from draftsmith.data.dialogue import Dialogue
from draftsmith.data.output import Output, open_output
from draftsmith.data.prompts import Prompt, read_prompts
from draftsmith.data.sampling import Choice
from draftsmith.data.slots import attending_by_slots
from draftsmith.data.template import check_arguments
from draftsmith.data.writer import Answer, Writer
from draftsmith.drafters import DFlashDrafter
from draftsmith.errors import DataError, EnvironmentFault, UserError

WINDOW = 16
"""Batches whose prompts are sorted by length: little padding, yet every stretch of the output mixes all lengths."""
REPORT_SECONDS = 10.0
"""Between two lines of progress."""
NAMES = {"max_tokens": "max_new_tokens"}
"""What a row's sampling calls options that have another name here."""


def regenerate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: RegenerateOptions,
    *,
    device: torch.device,
    report: Callable[[str], None],
    drafter: DFlashDrafter | None = None,
) -> dict[str, int | float]:
    """Answer the prompts of `options.prompts` and append the conversations to `options.output`.

    A line of the output holds {"id", "messages", "tags", "finish", "asked"}; finish is "stop" (the target ended its
    last answer) or "length" (cut after max_new_tokens). Rows whose id the output already holds are skipped, so a killed
    run continues when called again, with whatever order or limit; answers that `unfinished = "drop"` left out are tried
    again. The options that shape an answer are not stored: give another output when they change.

    Returns counts: answered (rows appended), skipped (there already), duplicates (prompts that occur again in the
    input), stop and length (how their last answers ended), dropped (of length, not appended), shortened (turns
    'all', of answered: no room for a further turn), retokenised (answers whose text encodes to other tokens than those
    the target wrote), tokens (generated, end tokens included), seconds; with a drafter, cycles and accept_length
    (tokens a cycle). Raises UserError for bad options and DataError for unusable prompts or a damaged output,
    EnvironmentFault for a full disk or GPU.
    """
    arguments = check_options(options, device)
    prompts = read_prompts(options.prompts, options.limit, answered=options.turns == "all")
    with open_output(Path(options.output), prompts, options.prompts) as output:
        run = _Run(model, tokenizer, options, output, report)
        waiting = deque(in_order([run.begin(prompt, arguments) for prompt in output.waiting], options.batch))
        if waiting:
            slots = min(options.batch, len(waiting))
            writer = Writer(model, run.stop_ids, slots, drafter, graphs=options.cuda_graph)
            try:
                with attending_by_slots(model):
                    run.go(writer, waiting)
            except torch.OutOfMemoryError as error:
                raise EnvironmentFault(
                    f"no memory left on the GPU with regenerate.batch {options.batch}; the rows in {options.output} "
                    "are kept: give the same command with a smaller batch"
                ) from error
    return run.counts


def check_options(options: RegenerateOptions, device: torch.device) -> dict[str, Any]:
    """The chat template's arguments. UserError for options that make no sense on this machine."""
    arguments = check_common(options)
    if options.batch < 1:
        raise UserError(f"regenerate.batch {options.batch}: must be at least 1.")
    if options.servers or options.model or options.api_key_env:
        raise UserError("model and api_key_env need 'servers'; without, the target answers here.")
    if options.cuda_graph and device.type != "cuda":
        raise UserError("regenerate.cuda_graph needs a GPU; leave it out, or give --device cuda")
    return arguments


def in_order(answers: list[Answer], batch: int) -> list[Answer]:
    """As given, but sorted by length within each window; the longest first, so that memory runs out early or never."""
    size = WINDOW * batch
    windows = (answers[begin : begin + size] for begin in range(0, len(answers), size))
    return [answer for window in windows for answer in sorted(window, key=lambda one: -len(one.prompt))]


class _Run:
    """What is the same for all rows, and the counts."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        options: RegenerateOptions,
        output: Output,
        report: Callable[[str], None],
    ) -> None:
        self.tokenizer, self.options, self.output, self.report = tokenizer, options, output, report
        self.stop_ids = _stop_ids(model, tokenizer)
        self.positions = model.config.get_text_config().max_position_embeddings
        counted = ["stop", "length", "dropped", *(["shortened"] if options.turns == "all" else [])]
        counted += ["retokenised", "tokens", "seconds"]
        self.counts: dict[str, int | float] = {"answered": 0, **output.counts, **dict.fromkeys(counted, 0)}

    def begin(self, prompt: Prompt, arguments: dict[str, Any]) -> Answer:
        """The first answer of a row. DataError if the target has no room for it."""
        dialogue = Dialogue(prompt, self.options.turns, arguments)
        dialogue.ask()
        answer = self.asked(dialogue)
        if (room := self.positions - answer.limit) < len(answer.prompt):
            raise DataError(
                f"Prompt {prompt.id!r} has {len(answer.prompt)} tokens; the target has room for {room} before the "
                "answer. Shorten it or lower max_new_tokens."
            )
        return answer

    def asked(self, dialogue: Dialogue) -> Answer:
        """The answer that the dialogue waits for."""
        prompt, arguments = dialogue.prompt, dialogue.arguments
        own = row_options(self.options, prompt)
        try:
            check_arguments(arguments)
            tools = list(prompt.tools) or None
            tokens = render_prompt(self.tokenizer, dialogue.messages, tools=tools, arguments=arguments)
        except DataError as error:
            raise DataError(f"Prompt {prompt.id!r}: {error}") from error
        choice = Choice(
            temperature=float(own.temperature),
            top_k=own.top_k,
            top_p=float(own.top_p),
            min_p=float(prompt.sampling.get("min_p", 0)),
        )
        tokens = tokens.astype(np.int32)
        return Answer(dialogue=dialogue, prompt=tokens, limit=own.max_new_tokens, choice=choice, seed=own.seed)

    def go(self, writer: Writer, waiting: deque[Answer]) -> None:
        start, reported = time.perf_counter(), 0.0
        ended, total = Counter(), len(waiting)
        for answer in writer.write(waiting):
            self.keep(answer)
            if not (following := self.next_turn(answer.dialogue)):
                ended["rows"] += 1
                self.end(answer.dialogue)
            else:
                waiting.appendleft(following)
            self.counts["seconds"] = seconds = time.perf_counter() - start
            if writer.drafter and writer.cycles:
                self.counts |= {"cycles": writer.cycles, "accept_length": writer.committed / writer.cycles}
            if seconds - reported > REPORT_SECONDS or ended["rows"] == total:
                reported, tokens = seconds, self.counts["tokens"]
                self.report(f"{ended['rows']}/{total} answers, {tokens} tokens, {tokens / seconds:.0f} tokens/s")

    def keep(self, answer: Answer) -> None:
        """The answer becomes a message of its dialogue."""
        tokens = answer.tokens[:-1] if answer.finish == "stop" else answer.tokens
        text = str(self.tokenizer.decode(tokens))
        ids = (answer.prompt.tolist(), answer.tokens) if self.options.token_ids else None
        answer.dialogue.answer({"role": "assistant", "content": text}, answer.finish, ids)
        self.counts["tokens"] += len(answer.tokens)
        self.counts["retokenised"] += self.tokenizer(text, add_special_tokens=False)["input_ids"] != tokens

    def next_turn(self, dialogue: Dialogue) -> Answer | None:
        """The answer to what is said next, if there is anything, and room for an answer."""
        said = dialogue.ask()
        if not said:
            return None
        following = self.asked(dialogue)
        if len(following.prompt) + following.limit <= self.positions:
            return following
        del dialogue.messages[-len(said) :]
        self.counts["shortened"] += 1
        return None

    def end(self, dialogue: Dialogue) -> None:
        self.counts[dialogue.finish] += 1
        if dialogue.finish == "length" and self.options.unfinished == "drop":
            self.counts["dropped"] += 1
        else:
            self.output.append(dialogue.row())
            self.counts["answered"] += 1


def row_options(options: RegenerateOptions, prompt: Prompt) -> RegenerateOptions:
    """The run's options with the row's own sampling."""
    own: dict[str, Any] = {NAMES.get(key, key): value for key, value in prompt.sampling.items() if key != "min_p"}
    for name in ("top_k", "max_new_tokens", "seed"):
        own |= {name: int(own[name])} if name in own else {}
    for name in ("temperature", "top_p"):
        own |= {name: float(own[name])} if name in own else {}
    if not 0 <= prompt.sampling.get("min_p", 0) <= 1:
        raise UserError(f"Prompt {prompt.id!r}: min_p {prompt.sampling['min_p']} must lie in [0, 1].")
    if not own:
        return options
    changed = replace(options, **own)
    check_sampling(changed, f"Prompt {prompt.id!r}: ")
    return changed


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end an answer: those of the generation config (several for some models) and the tokenizer's eos."""
    own = model.generation_config.eos_token_id
    ids = [*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id]
    if not (stop_ids := frozenset(token for token in ids if isinstance(token, int))):
        raise UserError("The target names no end token, in its generation config or its tokenizer. Set eos_token_id.")
    return stop_ids
