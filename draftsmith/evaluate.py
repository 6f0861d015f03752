"""Acceptance by real speculative decoding on held-out prompts, and the lossless check.

Accept length is the mean over responses of the mean tokens committed per cycle, bonus included, prefill's token
excluded (as the DFlash paper reports it); the pooled figure, all committed tokens over all cycles, stands beside it,
because short answers lift the former.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from draftsmith.config import EvaluationOptions
from draftsmith.data.chat import prompt_tokens
from draftsmith.data.prompts import Prompt
from draftsmith.decode import Decoded, Sampling, decode_plain, decode_speculative
from draftsmith.drafters import DFlashDrafter
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
    """Every output equals the target's own greedy output; None with sampling."""
    num_equal: int
    prompts: int
    tokens: int
    seconds: float
    answers: list[Decoded]

    def summary(self) -> dict:
        """The figures as JSON, without the answers."""
        return {k: v for k, v in vars(self).items() if k != "answers"}


def make_cases(
    target: Target, prompts: Iterable[Prompt], options: EvaluationOptions, report: Callable[[int], None]
) -> list[Case]:
    """Render the prompts and, for greedy evaluation, decode each once without a drafter."""
    cases = []
    for number, prompt in enumerate(prompts, 1):
        tokens = torch.from_numpy(prompt_tokens(target.tokenizer, prompt)).to(target.head.device)
        plain = None
        if options.temperature == 0:
            plain = decode_plain(target, tokens, options.max_new_tokens, Sampling(), torch.Generator())
        cases.append(Case(prompt=prompt, tokens=tokens, plain=plain))
        report(number)
    return cases


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
    return _summarise(cases, answers, drafter.config.block_size, time.perf_counter() - start)


def _summarise(cases: list[Case], answers: list[Decoded], block_size: int, seconds: float) -> Evaluation:
    lengths = [a.accept_length for a in answers if a.accept_length is not None]
    cycles = [committed for a in answers for committed in a.cycles]
    drafts = [(accepted, offered) for a in answers for accepted, offered in zip(a.accepted, a.offered, strict=True)]
    by_tag: dict[str, list[float]] = {}
    for case, answer in zip(cases, answers, strict=True):
        if answer.accept_length is not None:
            for tag in case.prompt.tags:
                by_tag.setdefault(tag, []).append(answer.accept_length)
    greedy = all(case.plain is not None for case in cases)
    num_equal = sum(case.plain == answer.tokens for case, answer in zip(cases, answers, strict=True))
    return Evaluation(
        accept_length=sum(lengths) / max(1, len(lengths)),
        accept_length_pooled=sum(cycles) / max(1, len(cycles)),
        accept_rate_by_slot=[
            sum(accepted >= slot for accepted, _ in drafts) / max(1, sum(offered >= slot for _, offered in drafts))
            for slot in range(1, block_size)
        ],
        by_tag={tag: sum(values) / len(values) for tag, values in sorted(by_tag.items())},
        lossless=num_equal == len(cases) if greedy else None,
        num_equal=num_equal,
        prompts=len(cases),
        tokens=sum(len(a.tokens) for a in answers),
        seconds=seconds,
        answers=answers,
    )
