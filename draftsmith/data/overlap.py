"""Training rows that share text with evaluation prompts: 13 tokens in a row, as is usual for such checks.

Only what the prompts' users say is compared, because every rendered conversation shares the template's own words. It is
tokenised by itself, and looked for anywhere in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt64
from transformers import PreTrainedTokenizerBase

from draftsmith.data.mixture import TrainingSet
from draftsmith.data.prompts import Prompt

LENGTH = 13
"""Tokens in a row that count as shared text."""
BASE = 0x9E3779B97F4A7C15
"""Odd; of the polynomial hash modulo 2^64."""
TABLE_BITS = 20
"""Of a hash, that look up whether any prompt may have it; a second look compares all 64."""
SHOWN = 5


class Overlap(NamedTuple):
    rows: Bool[np.ndarray, " row"]
    """Rows of the training set that share text with a prompt."""
    prompts: int
    """Prompts that share text with a row."""
    short: int
    """Prompts with less than 13 tokens, which cannot be compared."""


class Grams(NamedTuple):
    """Every 13 tokens in a row of the prompts: their hashes, sorted, and whose they are."""

    hashes: UInt64[np.ndarray, " gram"]
    owner: Int[np.ndarray, " gram"]
    short: int


def find_overlap(dataset: TrainingSet, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> Overlap:
    """All rows of the set, read once."""
    grams = prompt_grams(prompts, tokenizer)
    table = np.zeros(1 << TABLE_BITS, bool)
    table[grams.hashes >> np.uint64(64 - TABLE_BITS)] = True
    rows, owners, start = [], set(), 0
    for part in dataset.parts:
        for tokens, offsets in part.dataset.token_chunks():
            found, gram = _matches(tokens, offsets, grams, table)
            rows.append(found + start)
            owners.update(grams.owner[gram].tolist())
            start += len(offsets) - 1
    shared = np.zeros(start, bool)
    shared[np.concatenate([*rows, np.empty(0, np.int64)])] = True
    return Overlap(shared[dataset.base], len(owners), grams.short)


def prompt_grams(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> Grams:
    hashes, owners, short = [np.empty(0, np.uint64)], [np.empty(0, np.int64)], 0
    for number, prompt in enumerate(prompts):
        said = [turn["content"] for turn in prompt.messages if turn["role"] == "user"]
        tokens = [np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in said]
        found = [gram_hashes(one) for one in tokens if len(one) >= LENGTH]
        short += not found
        hashes += found
        owners += [np.full(len(one), number) for one in found]
    every, owner = np.concatenate(hashes), np.concatenate(owners)
    order = np.argsort(every, kind="stable")
    return Grams(every[order], owner[order], short)


def gram_hashes(tokens: Int[np.ndarray, " n"]) -> UInt64[np.ndarray, " gram"]:
    """A hash of each 13 tokens in a row, built from those of 1, 2, 4, 8 and 12."""
    powers = {count: np.uint64(pow(BASE, count, 1 << 64)) for count in (1, 2, 4)}
    one = tokens.astype(np.uint64) + np.uint64(1)
    two = one[:-1] * powers[1] + one[1:]
    four = two[:-2] * powers[2] + two[2:]
    eight = four[:-4] * powers[4] + four[4:]
    twelve = eight[:-4] * powers[4] + four[8:]
    return (twelve[:-1] * powers[1] + one[12:]) * np.uint64(BASE)  # once more, so that the upper bits know all tokens


def _matches(
    tokens: Int[np.ndarray, " n"], offsets: Int[np.ndarray, " bounds"], grams: Grams, table: Bool[np.ndarray, " size"]
) -> tuple[Int[np.ndarray, " match"], Int[np.ndarray, " match"]]:
    """Rows of the chunk with a gram of the prompts, and the number of that gram; a row as often as it has one."""
    first = int(offsets[0])
    hashes = gram_hashes(tokens[first : int(offsets[-1])])
    at = np.flatnonzero(table[hashes >> np.uint64(64 - TABLE_BITS)])
    gram = np.minimum(np.searchsorted(grams.hashes, hashes[at]), len(grams.hashes) - 1)
    row = np.searchsorted(offsets, at + first, side="right") - 1
    sound = (grams.hashes[gram] == hashes[at]) & (at + first + LENGTH <= offsets[row + 1])  # not across two rows
    return row[sound], gram[sound]


def describe_overlap(dataset: TrainingSet, found: Overlap, num_prompts: int, *, dropped: bool) -> str:
    """One line for the user; empty if nothing is shared."""
    rows = np.flatnonzero(found.rows)
    if not len(rows):
        return ""
    ids = ", ".join(dataset[row].id for row in rows[:SHOWN])
    more = f" and {len(rows) - SHOWN:,} more" if len(rows) > SHOWN else ""
    end = (
        "they are left out"
        if dropped
        else "figures on these prompts flatter; data.overlap = 'drop' leaves the rows out"
    )
    return (
        f"{len(rows):,} of {len(dataset):,} training rows share {LENGTH} tokens in a row with {found.prompts} of "
        f"{num_prompts} evaluation prompts ({ids}{more}): {end}"
    )
