"""What a draft slot sees: the dense mask against loops that follow the rules in words."""

from itertools import product

import numpy as np
import pytest
import torch

from draftsmith.visibility import TILE, dense_mask, intervals, listed, row_masks, tile_lists

BLOCK = 4
NUM_CONTEXT = 40
# Documents of 12, 1 and 20 tokens and a tail. Anchors: one without context, crowded ones, one right after the
# one-token document, one at a document's last token, and two empty slots.
ANCHORS = [0, 5, 6, 11, 13, 20, 32, -1, -1]
STARTS = [0, 0, 0, 0, 13, 13, 13, 0, 0]
WINDOWS = [None, 1, 3, 4, 5, 9, 100]


def slot_sees_context(anchor: int, start: int, slot: int, token: int, window: int | None) -> bool:
    if anchor < 0:
        return False  # an empty slot has no context
    in_document = token >= start
    strictly_before_the_anchor = token < anchor
    in_window = window is None or (anchor + slot) - token < window
    return in_document and strictly_before_the_anchor and in_window


def slot_sees_slot(slot: int, other: int, window: int | None, causal: bool) -> bool:
    in_window = window is None or slot - other < window
    return in_window and (not causal or other <= slot)


def mask_in_words(anchors, starts, window, causal) -> torch.Tensor:
    """The mask, one entry at a time."""
    mask = torch.zeros(len(anchors) * BLOCK, NUM_CONTEXT + len(anchors) * BLOCK, dtype=torch.bool)
    for (block, anchor), slot in product(enumerate(anchors), range(BLOCK)):
        row = block * BLOCK + slot
        for token in range(NUM_CONTEXT):
            mask[row, token] = slot_sees_context(anchor, starts[block], slot, token, window)
        for other in range(BLOCK):
            mask[row, NUM_CONTEXT + block * BLOCK + other] = slot_sees_slot(slot, other, window, causal)
    return mask


def mask_of(anchors, starts, window, causal, num_context=NUM_CONTEXT) -> torch.Tensor:
    spans = intervals(np.array(anchors), np.array(starts), BLOCK, window=window, causal=causal)
    return dense_mask(spans, num_context)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_mask_follows_the_rules(window, causal):
    assert torch.equal(mask_of(ANCHORS, STARTS, window, causal), mask_in_words(ANCHORS, STARTS, window, causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_every_slot_sees_itself(window, causal):
    """So no row of the mask is empty, and no softmax divides by zero."""
    mask = mask_of(ANCHORS, STARTS, window, causal)
    slots = torch.arange(len(ANCHORS) * BLOCK)
    assert mask[slots, NUM_CONTEXT + slots].all()


def test_window_counts_the_current_token():
    """query - key < window: with a window of 3, the slot at position 10 sees positions 8, 9 and 10."""
    mask = mask_of([10], [0], window=3, causal=True)
    assert mask[0, :NUM_CONTEXT].nonzero().flatten().tolist() == [8, 9]
    assert mask[0, NUM_CONTEXT:].nonzero().flatten().tolist() == [0]


def test_window_slides_with_the_slot():
    """The slot at position 12 sees 10, 11 and 12, all of them of its own block."""
    mask = mask_of([10], [0], window=3, causal=True)
    assert not mask[2, :NUM_CONTEXT].any()
    assert mask[2, NUM_CONTEXT:].nonzero().flatten().tolist() == [0, 1, 2]


def test_empty_slots_see_their_own_block_only():
    mask = mask_of([-1, -1], [0, 0], window=None, causal=False)
    assert torch.equal(mask[:, NUM_CONTEXT:], torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)).bool())
    assert not mask[:, :NUM_CONTEXT].any()


def test_an_anchor_at_the_start_of_its_document_has_no_context():
    assert not mask_of([13], [13], window=None, causal=False)[:, :NUM_CONTEXT].any()


def test_intervals_stay_inside_the_pack():
    """Ends are usable as indices: 0 <= lo <= hi <= size, also where a window has left the context behind."""
    for window, causal in product(WINDOWS, [False, True]):
        spans = intervals(np.array(ANCHORS), np.array(STARTS), BLOCK, window=window, causal=causal)
        for low, high, size in [
            (spans.ctx_lo, spans.ctx_hi, NUM_CONTEXT),
            (spans.blk_lo, spans.blk_hi, len(ANCHORS) * BLOCK),
        ]:
            assert low.dtype == high.dtype == torch.int32
            assert (low >= 0).all() and (low <= high).all() and (high <= size).all()


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("seed", range(4))
def test_tile_lists_hold_what_the_dense_mask_has(seed, window):
    """Every tile with anything in it is listed once, in the right list and in both directions; ascending, and padded
    with the numbers of the other tiles.
    """
    rng = np.random.default_rng(seed)
    num_context, block = 6 * TILE, 16
    starts = np.sort(rng.choice(num_context // 3, 3, replace=False))
    anchors = np.sort(rng.choice(np.arange(starts[0], num_context), 40, replace=False))
    start = starts[np.searchsorted(starts, anchors, side="right") - 1]
    anchor = np.concatenate([anchors, np.full(64 - len(anchors), -1)])
    spans = intervals(
        anchor, np.concatenate([start, np.zeros(64 - len(start), int)]), block, window=window, causal=False
    )
    tiles = dense_mask(spans, num_context).unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).transpose(1, 2)
    some, whole = tiles.flatten(2).any(-1), tiles.flatten(2).all(-1)
    lists = tile_lists(spans, num_context)
    listed = []
    for found in lists:
        there = as_table(found.num_keys, found.keys)
        assert torch.equal(as_table(found.num_queries, found.queries), there.T)
        listed.append(there)
    assert torch.equal(listed[1], whole) and whole.any() == (window is None)
    assert (listed[0] | listed[1])[some].all() and not (listed[0] & listed[1]).any()
    assert listed[0].sum() <= 1.5 * (some & ~whole).sum(), "sorted anchors leave few tiles listed without need"


def as_table(num: torch.Tensor, listed: torch.Tensor) -> torch.Tensor:
    """What lists of one direction say, as a table; checks that they are well made."""
    table = torch.zeros(listed.shape, dtype=torch.bool)
    for row, (count, numbers) in enumerate(zip(num.tolist(), listed.tolist(), strict=True)):
        assert sorted(numbers) == list(range(len(numbers)))
        assert numbers[:count] == sorted(numbers[:count]) and numbers[count:] == sorted(numbers[count:])
        table[row, numbers[:count]] = True
    return table


def test_listing_is_a_well_made_operation():
    """What torch.compile is told of it (schema, shapes, types) is true."""
    torch.library.opcheck(listed, (torch.rand(6, 9) > 0.5,))


@pytest.mark.parametrize(("window", "causal"), list(product(WINDOWS, [False, True])))
def test_rows_with_contexts_of_their_own(window, causal):
    """Row r alone, by the dense mask."""
    start = np.array([0, 3, 11, 20])
    spans = intervals(start, start * 0, BLOCK, window=window, causal=causal)
    masks = row_masks(spans, BLOCK, NUM_CONTEXT)
    for row, one in enumerate(start):
        alone = intervals(start[row : row + 1], np.array([0]), BLOCK, window=window, causal=causal)
        assert torch.equal(masks[row], dense_mask(alone, NUM_CONTEXT)), one
