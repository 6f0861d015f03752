"""Did the target write these answers? How often its own first choice equals the supervised token.

A drafter is to guess what the target writes. Answers of another model, or rendered by another template than they were
written under, lie off that path: the target would have gone on otherwise, and so will the drafter's verifier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int

from draftsmith.data.dataset import PreparedDataset
from draftsmith.randomness import keyed_generator
from draftsmith.targets import Target
from draftsmith.types import Sample

CHUNK = 512
"""Tokens whose logits exist at one time."""
ENOUGH = 0.6
"""A smaller share is a warning."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Supervised tokens that were looked at, and how many of them the target would have chosen."""

    tokens: int = 0
    equal: int = 0
    rows: int = 0

    @property
    def share(self) -> float:
        return self.equal / max(1, self.tokens)

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(tokens=self.tokens + other.tokens, equal=self.equal + other.equal, rows=self.rows + other.rows)


def check_target(
    dataset: PreparedDataset, target: Target, num_rows: int, report: Callable[[str], None]
) -> dict[str, Agreement]:
    """By tag, and of all rows under the empty name: what the target makes of `num_rows` rows, drawn evenly."""
    drawn = np.sort(keyed_generator("check target").permutation(len(dataset))[:num_rows])
    found: dict[str, Agreement] = {"": Agreement()}
    for number, row in enumerate(drawn, 1):
        sample = dataset[row]
        places, choices = target_choices(target, sample)
        equal = int((sample.tokens[places] == choices).sum())
        one = Agreement(tokens=len(places), equal=equal, rows=1)
        for tag in ("", *sample.tags):
            found[tag] = found.get(tag, Agreement()) + one
        if number % 20 == 0 and number < len(drawn):
            report(f"{number} of {len(drawn)} rows: {found[''].share:.1%} so far")
    return found


def target_choices(target: Target, sample: Sample) -> tuple[Int[np.ndarray, " place"], Int[np.ndarray, " place"]]:
    """Supervised positions, but not the very first token, and the token that the target finds likeliest there."""
    places = np.flatnonzero(sample.supervised)
    places = places[places > 0]
    tokens = torch.from_numpy(sample.tokens[: places.max(initial=0)]).to(target.head.device)
    cache, choices = target.new_cache(), []
    for start in range(0, len(tokens), CHUNK):
        logits, _ = target.extend(tokens[start : start + CHUNK], cache)
        choices.append(logits.argmax(dim=-1).cpu().numpy())
    return places, np.concatenate([np.empty(0, np.int64), *choices])[places - 1]


def describe_agreement(found: dict[str, Agreement]) -> tuple[list[str], list[str]]:
    """Lines for the user, and those that warn."""
    whole = found[""]
    lines = [
        f"on policy: the target's own first choice equals {whole.share:.1%} of {whole.tokens:,} supervised tokens in "
        f"{whole.rows:,} rows"
    ]
    lines += [
        f"  {tag}: {one.share:.1%} of {one.tokens:,} tokens in {one.rows:,} rows"
        for tag, one in sorted(found.items())
        if tag
    ]
    poor = [(tag, one) for tag, one in sorted(found.items()) if one.share < ENOUGH]
    warnings = [
        f"only {one.share:.1%} of the supervised tokens{f' of rows tagged {tag!r}' if tag else ''} are the target's "
        f"own first choice, less than {ENOUGH:.0%}: was this target the one that wrote them, under this chat template? "
        "`draftsmith regenerate` lets it answer; answers sampled at a high temperature agree less than greedy ones"
        for tag, one in poor
    ]
    return lines, warnings
