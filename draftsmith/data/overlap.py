"""Training rows that share text with evaluation prompts: 13 tokens in a row, as is usual for such checks.

Only what the prompts' users say is compared, because every rendered conversation shares the template's own words. It is
tokenised by itself, and looked for anywhere in a row.

Any 13 tokens in a row hold 5 that begin at a multiple of 9. So only every ninth place of the rows is looked at, for 5
tokens in a row of a prompt, and the 13 are compared where those are found.
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
SEED = 5
"""Tokens in a row that are looked for first, at every `STRIDE`th place."""
STRIDE = LENGTH - SEED + 1
TABLE_BITS = 20
"""Of a seed's hash, that look up whether any prompt may have it; a second look compares all 64."""
SHOWN = 5
NONE = np.empty(0, np.uint64)


class Overlap(NamedTuple):
    rows: Bool[np.ndarray, " row"]
    """Rows of the training set that share text with a prompt."""
    prompts: int
    """Prompts that share text with a row."""
    short: int
    """Prompts with less than 13 tokens, which cannot be compared."""


class Grams(NamedTuple):
    """Every 13 tokens in a row of the prompts: their hashes, sorted, and whose they are; and every 5 of them."""

    hashes: UInt64[np.ndarray, " gram"]
    owner: Int[np.ndarray, " gram"]
    seeds: UInt64[np.ndarray, " seed"]
    """Hashes of 5 tokens, sorted."""
    short: int


def find_overlap(dataset: TrainingSet, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> Overlap:
    """All rows of the set, read once."""
    grams = prompt_grams(prompts, tokenizer)
    table = seed_table(grams)
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
    hashes, owners, seeds, short = [NONE], [np.empty(0, np.int64)], [NONE], 0
    for number, prompt in enumerate(prompts):
        said = [turn["content"] for turn in prompt.messages if turn["role"] == "user"]
        tokens = [np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in said]
        tokens = [one for one in tokens if len(one) >= LENGTH]
        short += not tokens
        hashes += [gram_hashes(one) for one in tokens]
        owners += [np.full(len(one) - LENGTH + 1, number) for one in tokens]
        seeds += [seed_hashes(one, 1) for one in tokens]
    every, owner = np.concatenate(hashes), np.concatenate(owners)
    order = np.argsort(every, kind="stable")
    return Grams(every[order], owner[order], np.unique(np.concatenate(seeds)), short)


def seed_table(grams: Grams) -> Bool[np.ndarray, " size"]:
    table = np.zeros(1 << TABLE_BITS, bool)
    table[grams.seeds >> np.uint64(64 - TABLE_BITS)] = True
    return table


def gram_hashes(tokens: Int[np.ndarray, "*rows n"]) -> UInt64[np.ndarray, "*rows gram"]:
    """A hash of each 13 tokens in a row, built from those of 1, 2, 4, 8 and 12."""
    powers = {count: np.uint64(pow(BASE, count, 1 << 64)) for count in (1, 2, 4)}
    one = tokens.astype(np.uint64) + np.uint64(1)
    two = one[..., :-1] * powers[1] + one[..., 1:]
    four = two[..., :-2] * powers[2] + two[..., 2:]
    eight = four[..., :-4] * powers[4] + four[..., 4:]
    twelve = eight[..., :-4] * powers[4] + four[..., 8:]
    # Once more by the base, so that the upper bits know all tokens.
    return (twelve[..., :-1] * powers[1] + one[..., 12:]) * np.uint64(BASE)


def seed_hashes(tokens: Int[np.ndarray, " n"], stride: int) -> UInt64[np.ndarray, " seed"]:
    """A hash of the 5 tokens at each `stride`th place."""
    count = max(0, len(tokens) - SEED + 1)
    hashes = np.zeros(-(-count // stride), np.uint64)
    for place in range(SEED):
        hashes = (hashes + tokens[place : count + place : stride].astype(np.uint64) + np.uint64(1)) * np.uint64(BASE)
    return hashes


def _matches(
    tokens: Int[np.ndarray, " n"], offsets: Int[np.ndarray, " bounds"], grams: Grams, table: Bool[np.ndarray, " size"]
) -> tuple[Int[np.ndarray, " match"], Int[np.ndarray, " match"]]:
    """Rows of the chunk with a gram of the prompts, and the number of that gram; a row as often as it has one."""
    first = int(offsets[0])
    tokens = tokens[first : int(offsets[-1])]
    seeds = seed_hashes(tokens, STRIDE)
    near = np.flatnonzero(table[seeds >> np.uint64(64 - TABLE_BITS)])
    near = near[_known(grams.seeds, seeds[near])[1]]
    # A gram with this seed begins up to 8 tokens before it. Places outside the rows hold any token, and are left out.
    at = near[:, None] * STRIDE + np.arange(1 - STRIDE, 1)
    around = near[:, None] * STRIDE + np.arange(1 - STRIDE, LENGTH)
    gram, known = _known(grams.hashes, gram_hashes(tokens[np.clip(around, 0, len(tokens) - 1)]).ravel())
    at, gram = at.ravel()[known], gram[known]
    row = np.searchsorted(offsets, at + first, side="right") - 1
    sound = (at >= 0) & (at + first + LENGTH <= offsets[row + 1])  # not across two rows
    return row[sound], gram[sound]


def _known(
    known: UInt64[np.ndarray, " some"], hashes: UInt64[np.ndarray, " many"]
) -> tuple[Int[np.ndarray, " many"], Bool[np.ndarray, " many"]]:
    """Where each of the hashes is among the known ones, which are sorted, and whether it is."""
    place = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    return place, known[place] == hashes


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
