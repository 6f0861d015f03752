"""Thirteen tokens in a row, found by hashes, as the slow comparison finds them."""

import numpy as np
import pytest

from draftsmith.data.overlap import LENGTH, TABLE_BITS, Grams, _matches, gram_hashes


def grams_of(tokens: list[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[i : i + LENGTH]) for i in range(len(tokens) - LENGTH + 1)}


@pytest.mark.parametrize("seed", range(20))
def test_rows_with_shared_grams_are_those_of_the_slow_comparison(seed):
    """Rows of a two-letter alphabet, so that much is shared, and nothing across the border of two rows."""
    random = np.random.default_rng(seed)
    prompt = random.integers(0, 2, 40)
    hashes = np.sort(gram_hashes(prompt))
    grams = Grams(hashes, np.zeros(len(hashes), np.int64), 0)
    table = np.zeros(1 << TABLE_BITS, bool)
    table[hashes >> np.uint64(64 - TABLE_BITS)] = True
    rows = [random.integers(0, 2, random.integers(1, 60)).astype(np.int32) for _ in range(200)]
    before = np.zeros(7, np.int32)  # a chunk may begin anywhere in its buffer
    tokens = np.concatenate([before, *rows])
    offsets = np.cumsum([7, *(len(row) for row in rows)]).astype(np.int32)
    found, _ = _matches(tokens, offsets, grams, table)
    expected = [i for i, row in enumerate(rows) if grams_of(row.tolist()) & grams_of(prompt.tolist())]
    assert sorted(set(found.tolist())) == expected and 0 < len(expected) < 200


def test_a_hash_is_of_its_thirteen_tokens_alone():
    tokens = np.random.default_rng(0).integers(0, 150_000, 1_000)
    hashes = gram_hashes(tokens)
    assert len(hashes) == 1_000 - LENGTH + 1 == len(set(hashes.tolist()))
    assert hashes[500] == gram_hashes(tokens[500 : 500 + LENGTH])[0]
    for place in range(LENGTH):
        other = tokens[500 : 500 + LENGTH].copy()
        other[place] += 1
        assert gram_hashes(other)[0] != hashes[500]


@pytest.mark.parametrize("length", range(LENGTH))
def test_what_is_too_short_has_no_gram(length):
    assert len(gram_hashes(np.arange(length))) == 0
