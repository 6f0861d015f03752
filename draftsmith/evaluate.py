"""Acceptance by real speculative decoding on held-out prompts, and the lossless check.

Accept length is the mean over responses of the mean tokens committed per cycle, bonus included, prefill's token
excluded (as the DFlash paper reports it); the pooled figure, all committed tokens over all cycles, stands beside it,
because short answers lift the former.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from draftsmith.acceptance import Agreement, agreement, near_ties
from draftsmith.config import EvaluationOptions
from draftsmith.data.chat import prompt_tokens
from draftsmith.data.prompts import Prompt
from draftsmith.decode import Decoded, Sampling, decode_plain, decode_speculative
from draftsmith.drafters import DFlashDrafter
from draftsmith.errors import DataError
from draftsmith.randomness import keyed_seed
from draftsmith.targets import Target


def is_due(step: int, every: int, num_steps: int) -> bool:
    """Whether a thing that happens every so many steps, and at the end, happens after step number `step` (from 1)."""
    return step == num_steps or step % every == 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A held-out prompt, rendered, and the target's own greedy answer to it."""

    prompt: Prompt
    tokens: Int[Tensor, " n"]
    plain: list[int] | None
    """None with sampling: then there is no single right answer."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a drafter does on a set of cases."""

    accept_length: float
    """Mean over responses."""
    accept_length_pooled: float
    accept_rate_by_slot: list[float]
    """Of the cycles that proposed a token in slot k (from 1), the share in which it was accepted."""
    by_tag: dict[str, float]
    """Mean accept length of the responses that carry the tag."""
    lossless: bool | None
    """Every output equals the target's own greedy output, in bf16 but for near ties; None with sampling."""
    num_equal: int
    num_near_ties: int
    """Outputs whose first difference is a near tie of the target's logits."""
    prompts: int
    tokens: int
    seconds: float
    answers: list[Decoded]
    agreements: list[Agreement | None]
    """Of each answer with the target's own."""

    def summary(self) -> dict:
        """The figures as JSON, without the answers."""
        return {k: v for k, v in vars(self).items() if k not in ("answers", "agreements")}


def make_cases(
    target: Target,
    prompts: Iterable[Prompt],
    options: EvaluationOptions,
    report: Callable[[int], None],
    arguments: dict[str, Any] | None = None,
    seed: int = 0,
) -> list[Case]:
    """Render the prompts and, for greedy evaluation, decode each once without a drafter.

    `arguments` are the chat template's. Every turn of a prompt with followups is a case; the target's own answers stand
    between them. Raises DataError for a prompt that leaves the target no room to answer.
    """
    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    cases = []
    for number, prompt in enumerate(prompts, 1):
        turn, last = prompt, len(prompt.followups)
        for index in range(last + 1):
            tokens = torch.from_numpy(prompt_tokens(target.tokenizer, turn, arguments or {})).to(target.head.device)
            _check_room(target, turn, len(tokens), options.max_new_tokens)
            answer = None
            if options.temperature == 0 or index < last:
                generator = torch.Generator().manual_seed(keyed_seed("plain", seed, turn.id) >> 1)
                answer = decode_plain(target, tokens, options.max_new_tokens, sampling, generator)
            cases.append(Case(prompt=turn, tokens=tokens, plain=answer if options.temperature == 0 else None))
            if index < last:
                turn = _next_turn(target, prompt, turn, index, answer or [])
        report(number)
    return cases


def _check_room(target: Target, prompt: Prompt, length: int, max_new_tokens: int) -> None:
    longest = getattr(target.config, "max_position_embeddings", None)
    if longest is not None and length + max_new_tokens > longest:
        raise DataError(
            f"prompt {prompt.id!r} has {length} tokens; with evaluation.max_new_tokens {max_new_tokens} that is more "
            f"than the target's {longest} positions; lower the latter or leave the prompt out"
        )


def _next_turn(target: Target, prompt: Prompt, turn: Prompt, index: int, answer: list[int]) -> Prompt:
    """The conversation so far, the target's answer, and what the user says next."""
    said = target.tokenizer.decode([token for token in answer if token not in target.eos_ids], skip_special_tokens=True)
    told = ({"role": "assistant", "content": said}, {"role": "user", "content": prompt.followups[index]})
    return replace(turn, id=f"{prompt.id}, turn {index + 2}", messages=(*turn.messages, *told))


def warm_up(target: Target, drafter: DFlashDrafter, case: Case) -> None:
    """Decode a little both ways, so that what only happens once is not timed."""
    few = 2 * drafter.config.block_size
    decode_plain(target, case.tokens, few, Sampling(), torch.Generator())
    decode_speculative(target, drafter, case.tokens, few, Sampling(), torch.Generator())


def evaluate(
    target: Target, drafter: DFlashDrafter, cases: list[Case], options: EvaluationOptions, seed: int = 0
) -> Evaluation:
    """Decode every case with the drafter. Sampling is keyed by seed and prompt, so order does not matter."""
    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    start = time.perf_counter()
    answers = []
    for case in cases:
        generator = torch.Generator().manual_seed(keyed_seed("evaluate", seed, case.prompt.id) >> 1)
        answers.append(decode_speculative(target, drafter, case.tokens, options.max_new_tokens, sampling, generator))
    seconds = time.perf_counter() - start
    agreements: list[Agreement | None] = [
        _agreement(target, case, answer) for case, answer in zip(cases, answers, strict=True)
    ]
    return _summarise(cases, answers, agreements, drafter.config.block_size, seconds)


def _agreement(target: Target, case: Case, answer: Decoded) -> Agreement | None:
    plain = case.plain

    def ties(place: int) -> set[int]:
        if plain is None or target.head.dtype == torch.float32:
            return set()
        text = torch.cat([case.tokens, case.tokens.new_tensor(plain[:place])])
        return near_ties(target.extend(text, target.new_cache())[0][-1:])[0]

    return None if plain is None else agreement(plain, answer.tokens, ties)


def _summarise(
    cases: list[Case],
    answers: list[Decoded],
    agreements: list[Agreement | None],
    block_size: int,
    seconds: float,
) -> Evaluation:
    lengths = [a.accept_length for a in answers if a.accept_length is not None]
    cycles = [committed for a in answers for committed in a.cycles]
    drafts = [(accepted, offered) for a in answers for accepted, offered in zip(a.accepted, a.offered, strict=True)]
    by_tag: dict[str, list[float]] = {}
    for case, answer in zip(cases, answers, strict=True):
        if answer.accept_length is not None:
            for tag in case.prompt.tags:
                by_tag.setdefault(tag, []).append(answer.accept_length)
    return Evaluation(
        accept_length=sum(lengths) / max(1, len(lengths)),
        accept_length_pooled=sum(cycles) / max(1, len(cycles)),
        accept_rate_by_slot=[
            sum(accepted >= slot for accepted, _ in drafts) / max(1, sum(offered >= slot for _, offered in drafts))
            for slot in range(1, block_size)
        ],
        by_tag={tag: sum(values) / len(values) for tag, values in sorted(by_tag.items())},
        lossless=None if None in agreements else "differs" not in agreements,
        num_equal=agreements.count("equal"),
        num_near_ties=agreements.count("near tie"),
        prompts=len(cases),
        tokens=sum(len(a.tokens) for a in answers),
        seconds=seconds,
        answers=answers,
        agreements=agreements,
    )
