"""Where blocks start and what stands in them, on documents written by hand."""

import math

import numpy as np
import pytest
import torch

from draftsmith.anchors import build_blocks, default_gamma, draw_anchors, legal_anchors
from draftsmith.types import Sample
from tests.handmade import MASK, block_shape, document, pack_of


def blocks_of(sample: Sample, anchors: list[int], size: int, **options):
    return pack_of([sample], [anchors], block_shape(size), **options).blocks


def scored(blocks) -> list[list[bool]]:
    return (blocks.weight > 0).tolist()


def test_block_of_a_sequence_written_by_hand():
    """Tokens 100..140, anchor 7: slot k stands at position 7 + k and its label is the token there."""
    blocks = blocks_of(document(41, first=100), [7], size=4)
    assert blocks.tokens.tolist() == [[107, MASK, MASK, MASK]]
    assert blocks.position.tolist() == [[7, 8, 9, 10]]
    assert blocks.label[0, 1:].tolist() == [108, 109, 110]
    expected = [0, 1, math.exp(-1 / 4), math.exp(-2 / 4)]
    torch.testing.assert_close(blocks.weight, torch.tensor([expected]))


@pytest.mark.parametrize(("size", "gamma"), [(16, 7), (10, 5), (8, 4)])
def test_gamma_defaults_are_the_papers(size, gamma):
    assert default_gamma(size) == gamma


def test_gamma_of_other_block_sizes_is_in_proportion():
    assert default_gamma(20) == pytest.approx(9)


@pytest.mark.parametrize(
    ("supervised", "legal"),
    [
        ([0, 1, 1, 1, 0], [1, 2]),
        ([1, 1, 0, 1, 0, 1, 1], [0, 5]),
        ([0, 0, 1], []),
        ([0, 1, 0], []),
        ([1], []),
        ([0, 0, 0], []),
        ([1, 1], [0]),
    ],
)
def test_legal_anchors_are_supervised_and_so_is_the_next_position(supervised, legal):
    assert legal_anchors(np.array(supervised, bool)).tolist() == legal


def test_one_supervised_token_gives_no_anchor():
    sample = document(10, supervised=[4])
    assert draw_anchors(sample, 0, seed=0, epoch=0).tolist() == []
    with pytest.raises(ValueError):
        draw_anchors(sample, 1, seed=0, epoch=0)


def test_document_shorter_than_a_block_scores_what_it_has():
    blocks = blocks_of(document(3), [0], size=8)
    assert scored(blocks) == [[False, True, True] + 5 * [False]]
    assert blocks.position.tolist() == [list(range(8))]


def test_anchor_at_the_last_legal_position_scores_one_slot():
    sample = document(10)
    assert legal_anchors(sample.supervised)[-1] == 8
    assert scored(blocks_of(sample, [8], size=4)) == [[False, True, False, False]]


def test_weights_stop_for_good_where_supervision_stops():
    """Position 5 is a gap; that supervision resumes at 6 helps nobody, serving never gets there."""
    blocks = blocks_of(document(12, supervised=[2, 3, 4, 6, 7, 8, 9, 10]), [2], size=8)
    assert scored(blocks) == [[False, True, True] + 5 * [False]]


def test_no_label_crosses_into_the_next_document():
    """The second document is supervised from its first token, as pretraining text is."""
    first, second = document(6, first=10), document(6, first=20)
    blocks = pack_of([first, second], [[3, 4], [0]], block_shape(4)).blocks
    assert scored(blocks)[0] == [False, True, True, False]  # 14, 15
    assert scored(blocks)[1] == [False, True, False, False]  # 15
    labels = blocks.label[:2][blocks.weight[:2] > 0]
    assert labels.tolist() == [14, 15, 15]


def test_positions_restart_with_each_document():
    blocks = pack_of([document(6), document(6, first=20)], [[2], [2]], block_shape(3)).blocks
    assert blocks.position.tolist() == [[2, 3, 4], [2, 3, 4]]
    assert blocks.anchor.tolist() == [2, 8]
    assert blocks.label[:, 1:].tolist() == [[3, 4], [23, 24]]


def test_a_block_at_the_end_of_the_pack_reads_nothing_beyond_it():
    blocks = pack_of([document(5)], [[3]], block_shape(8)).blocks
    assert scored(blocks) == [[False, True] + 6 * [False]]


def test_unused_anchor_slots_are_empty():
    blocks = blocks_of(document(10), [4], size=4, num_anchors=3)
    assert blocks.anchor.tolist() == [4, -1, -1]
    assert not blocks.weight[1:].any()
    assert (blocks.tokens[1:] == MASK).all()
    assert (blocks.full.ctx_hi.view(3, 4)[1:] == 0).all()


def test_rows_are_all_slots_but_the_anchors_weighted_ones_first():
    blocks = blocks_of(document(8), [1, 5], size=4, num_anchors=3)
    # Slots 1..3 of block 0 and 1..2 of block 1 carry weight (the document ends at 7), block 2 is empty.
    assert blocks.num_rows == 5
    assert blocks.rows.tolist() == [1, 2, 3, 5, 6, 7, 9, 10, 11]


def test_more_anchors_than_slots_is_our_own_mistake():
    zeros = np.zeros(2, np.int64)
    with pytest.raises(AssertionError):
        build_blocks(np.arange(9), np.ones(9, bool), np.array([1, 2]), zeros, zeros + 9, 1, block_shape(4))


SPEECH = document(340, supervised=list(range(40, 340)), name="speech")
LEGAL = np.arange(40, 339)


def test_anchors_are_drawn_uniformly():
    """2,000 epochs of 20 anchors on 299 legal positions: every count within 5 standard deviations."""
    counts = np.zeros(340, int)
    for epoch in range(2000):
        counts[draw_anchors(SPEECH, 20, seed=3, epoch=epoch)] += 1
    share = 20 / len(LEGAL)
    deviation = (counts[LEGAL] - 2000 * share) / math.sqrt(2000 * share * (1 - share))
    assert counts.sum() == counts[LEGAL].sum() == 40_000
    assert np.abs(deviation).max() < 5
    assert deviation.std() == pytest.approx(1, abs=0.15)


def test_anchors_are_sorted_and_distinct():
    for epoch in range(50):
        drawn = draw_anchors(SPEECH, 100, seed=0, epoch=epoch)
        assert (np.diff(drawn) > 0).all()
        assert np.isin(drawn, LEGAL).all()


def test_all_legal_anchors_can_be_drawn():
    assert draw_anchors(SPEECH, len(LEGAL), seed=0, epoch=0).tolist() == LEGAL.tolist()


def test_anchors_are_redrawn_each_epoch_and_depend_on_seed_and_sample():
    def draw(seed=0, epoch=0, name="speech"):
        sample = Sample(id=name, tokens=SPEECH.tokens, supervised=SPEECH.supervised)
        return tuple(draw_anchors(sample, 20, seed, epoch).tolist())

    assert draw() == draw()
    assert len({draw(), draw(seed=1), draw(epoch=1), draw(name="other")}) == 4


def test_anchors_do_not_depend_on_numpys_global_generator():
    np.random.seed(0)
    first = draw_anchors(SPEECH, 20, seed=0, epoch=0)
    np.random.seed(1)
    assert (draw_anchors(SPEECH, 20, seed=0, epoch=0) == first).all()
