"""How a token is chosen from logits: the likeliest, or where a number in [0, 1) falls in the cumulative distribution.

A row's numbers come from its seed, its id and the place in its answer alone. So the same tokens come out whatever its
neighbours are, where a killed run was resumed, and whether a drafter helps: a draft stands when it is the very token
that the target draws with the number of that place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which distribution is sampled."""

    temperature: float
    """0: greedy; the rest is of no consequence then."""
    top_k: int
    top_p: float
    min_p: float


@lru_cache(maxsize=1024)
def warpers(choice: Choice) -> LogitsProcessorList:
    processors = LogitsProcessorList([TemperatureLogitsWarper(choice.temperature)])
    if choice.top_k > 0:
        processors.append(TopKLogitsWarper(choice.top_k))
    if choice.top_p < 1:
        processors.append(TopPLogitsWarper(choice.top_p))
    if choice.min_p > 0:
        processors.append(MinPLogitsWarper(choice.min_p))
    return processors


def numbers(seed: int, name: str, turn: int, length: int) -> Float[Tensor, " place"]:
    """One for each token of the answer number `turn` (from 0) to the row of this id."""
    text = f"{seed}\n{name}" + (f"\n{turn}" if turn else "")
    key = hashlib.blake2b(text.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
    return torch.empty(length, dtype=torch.float64).uniform_(generator=generator)


def choose(
    logits: Float[Tensor, "row step voc"], uniform: Float[Tensor, "row step"], choices: Sequence[Choice | None]
) -> Int[Tensor, "row step"]:
    """A token for each place. `choices`: by row; None is greedy, like a temperature of 0."""
    chosen = logits.argmax(-1)
    nothing: Any = None  # no warper looks at what is written so far
    sampled = [choice if choice is not None and choice.temperature > 0 else None for choice in choices]
    for choice in dict.fromkeys(sampled):
        if choice is not None:
            rows = [row for row, own in enumerate(sampled) if own == choice]
            scores = warpers(choice)(nothing, logits[rows].flatten(0, 1).float())
            chosen[rows] = invert(scores, uniform[rows].flatten()).view(len(rows), -1)
    return chosen


def choose_along(
    logits: Float[Tensor, "row step voc"],
    uniform: Float[Tensor, "row step"],
    choices: Sequence[Choice | None],
    draft: Int[Tensor, "row drafted"],
) -> tuple[Int[Tensor, "row step"], Int[Tensor, " row"]]:
    """Tokens as by `choose`, up to the first place of each row that differs from the draft; and which place that is.

    Sampling is done no further: behind a wrong draft the logits are of no use.
    """
    chosen = logits.argmax(-1)
    rows = [row for row, choice in enumerate(choices) if choice is not None and choice.temperature > 0]
    for place in range(logits.shape[1]):
        if not rows:
            break
        own = [choices[row] for row in rows]
        chosen[rows, place] = choose(logits[rows, place, None], uniform[rows, place, None], own)[:, 0]
        if place < draft.shape[1]:
            same = (chosen[rows, place] == draft[rows, place]).tolist()
            rows = [row for row, right in zip(rows, same, strict=True) if right]
    return chosen, (draft == chosen[:, :-1]).long().cumprod(dim=1).sum(dim=1)


def invert(scores: Float[Tensor, "n voc"], uniform: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Where the cumulative distribution passes the number."""
    # float64: over 100,000 ids a float32 sum loses the tail.
    cumulative = scores.double().softmax(-1).cumsum(-1)
    level = uniform[:, None] * cumulative[:, -1:]
    # right=True: never an id of probability zero, whose step of the sum has no height.
    return torch.searchsorted(cumulative, level, right=True)[:, 0]
