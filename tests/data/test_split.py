"""A long document in pieces: every supervised token once, with context before it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.data.split import context_size, split, take
from draftsmith.errors import UserError
from draftsmith.types import Sample


@settings(max_examples=300, deadline=None)
@given(st.lists(st.booleans(), max_size=200), st.integers(2, 60), st.data())
def test_every_supervised_token_is_supervised_once(flags, max_length, data):
    context = data.draw(st.integers(0, max_length - 2))
    supervised = np.array(flags, bool)
    document = Sample(id="row", tokens=np.arange(len(flags)), supervised=supervised)
    pieces = split(supervised, max_length, context)
    samples = [take(document, piece) for piece in pieces]
    learned = [token for sample in samples for token in sample.tokens[sample.supervised].tolist()]
    assert learned == np.flatnonzero(supervised).tolist()
    assert len({sample.id for sample in samples}) == len(samples)
    for piece, sample in zip(pieces, samples, strict=True):
        assert 0 < len(sample.tokens) <= max_length and sample.supervised.any()
        assert sample.tokens.tolist() == list(range(piece.begin, piece.end))
        assert piece.first - piece.begin == (min(context, piece.first) if piece.first else 0)


def test_a_short_document_is_one_piece():
    assert split(np.ones(10, bool), 10, 4) == [(0, 0, 10)]


def test_an_answer_longer_than_a_piece():
    assert split(np.ones(25, bool), 10, 4) == [(0, 0, 10), (6, 10, 16), (12, 16, 22), (18, 22, 25)]


def test_a_long_prompt_is_context_only_as_far_as_asked():
    """No piece for the prompt itself; the answer's piece begins shortly before it."""
    supervised = np.arange(100) >= 90
    assert split(supervised, 20, 5) == [(85, 90, 100)]


def test_nothing_supervised_makes_no_piece():
    assert split(np.zeros(50, bool), 20, 5) == []


@pytest.mark.parametrize(
    ("overlong", "given", "said"),
    [("refuse", 5, "data.overlong is 'refuse'"), ("split", -1, "may be 0 to 18"), ("split", 19, "may be 0 to 18")],
)
def test_a_context_that_cannot_work_is_refused(overlong, given, said):
    with pytest.raises(UserError, match=said):
        context_size(overlong, given, 20)


def test_the_context_is_a_quarter_unless_given():
    assert (context_size("split", None, 20), context_size("split", 7, 20), context_size("cut", None, 20)) == (5, 7, 5)
