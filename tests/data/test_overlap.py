"""Thirteen tokens in a row, found by hashes, as the slow comparison finds them."""

import numpy as np
import pytest

from draftsmith.data.overlap import LENGTH, SEED, STRIDE, Grams, _matches, gram_hashes, seed_hashes, seed_table


def grams_of(tokens: list[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[i : i + LENGTH]) for i in range(len(tokens) - LENGTH + 1)}


def grams_of_prompt(prompt: np.ndarray) -> Grams:
    hashes = np.sort(gram_hashes(prompt))
    return Grams(hashes, np.zeros(len(hashes), np.int64), np.unique(seed_hashes(prompt, 1)), 0)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("alphabet", [2, 3, 50])
def test_rows_with_shared_grams_are_those_of_the_slow_comparison(seed, alphabet):
    """Rows of few letters, so that much is shared, or with a piece of the prompt; nothing across two rows' border."""
    random = np.random.default_rng(seed)
    prompt = random.integers(0, alphabet, 40)
    rows = [random.integers(0, alphabet, random.integers(1, 60)).astype(np.int32) for _ in range(200)]
    for row in rows[::3]:
        at, begin = (int(random.integers(0, len(some))) for some in (row, prompt))
        size = min(int(random.integers(5, 20)), len(row) - at, len(prompt) - begin)
        row[at : at + size] = prompt[begin : begin + size]
    before = np.zeros(7, np.int32)  # a chunk may begin anywhere in its buffer
    tokens = np.concatenate([before, *rows])
    offsets = np.cumsum([7, *(len(row) for row in rows)]).astype(np.int32)
    grams = grams_of_prompt(prompt)
    found, _ = _matches(tokens, offsets, grams, seed_table(grams))
    expected = [i for i, row in enumerate(rows) if grams_of(row.tolist()) & grams_of(prompt.tolist())]
    assert sorted(set(found.tolist())) == expected and 0 < len(expected) < 200


@pytest.mark.parametrize("place", range(2 * STRIDE))
def test_a_gram_is_found_at_any_place_but_not_across_two_rows(place):
    prompt, rest = np.arange(100, 100 + LENGTH), np.arange(place)
    grams = grams_of_prompt(prompt)

    def found(row: np.ndarray, *borders: int) -> list[int]:
        offsets = np.array([0, *borders, len(row)], np.int32)
        return _matches(row.astype(np.int32), offsets, grams, seed_table(grams))[0].tolist()

    for before, after in ((rest, rest), (rest, rest[:0]), (rest[:0], rest)):
        row = np.concatenate([before, prompt, after])
        assert found(row) == [0]
        assert found(row, len(before), len(before) + LENGTH) == [1]
        assert found(row, len(before) + 6) == []
        assert found(np.concatenate([before, prompt[:-1], after])) == []


def test_seeds_of_every_place_and_of_every_ninth():
    tokens = np.random.default_rng(0).integers(0, 150_000, 100)
    assert seed_hashes(tokens, STRIDE).tolist() == seed_hashes(tokens, 1)[::STRIDE].tolist()
    assert len(set(seed_hashes(tokens, 1).tolist())) == 100 - SEED + 1
    assert [len(seed_hashes(tokens[:size], STRIDE)) for size in (0, 4, 5, 13, 14)] == [0, 0, 1, 1, 2]


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
