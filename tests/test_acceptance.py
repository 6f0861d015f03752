"""Accept length and accuracy by slot, from blocks whose outcome is known."""

import torch

from draftsmith.acceptance import agreement, block_metrics, near_ties, told


def metrics(correct: list[list[int]], scored: list[list[int]]) -> dict:
    """Of blocks given as their slots 1..B-1; slot 0, the anchor, is put in front."""
    right = torch.tensor(correct).bool()
    weight = torch.tensor(scored).float()
    anchor = torch.zeros(len(right), 1)
    found = block_metrics(torch.cat([anchor.bool(), right], dim=1), torch.cat([anchor, weight], dim=1))
    return {name: value.tolist() for name, value in found.items()}


WHOLE = [1, 1, 1]


def test_slots_are_counted_jointly():
    """Half the slots are right in either case, but a hit after a miss is worth nothing."""
    together = metrics([[1, 1, 1], [0, 0, 0]], [WHOLE, WHOLE])
    apart = metrics([[1, 0, 1], [0, 1, 0]], [WHOLE, WHOLE])
    assert together["accept_sum"] == (1 + 3) + (1 + 0)
    assert apart["accept_sum"] == (1 + 1) + (1 + 0)
    assert sum(together["hit_by_slot"]) == sum(apart["hit_by_slot"]) == 3


def test_a_block_without_a_hit_commits_the_bonus_token():
    assert metrics([[0, 1, 1]], [WHOLE])["accept_sum"] == 1


def test_truncated_blocks_do_not_count_towards_the_accept_length():
    found = metrics([[1, 1, 0], [1, 1, 0]], [WHOLE, [1, 1, 0]])
    assert (found["accept_sum"], found["accept_count"], found["anchors"]) == (3, 1, 2)


def test_truncated_blocks_count_in_the_slots_that_they_score():
    found = metrics([[1, 1, 0], [1, 0, 1]], [WHOLE, [1, 1, 0]])
    assert found["hit_by_slot"] == [2, 1, 0]
    assert found["scored_by_slot"] == [2, 2, 1]


def test_unscored_is_neither_right_nor_wrong():
    """A weight of zero in the middle: its slot counts nowhere, whatever was predicted there."""
    hit, miss = metrics([[1, 1, 1]], [[1, 0, 1]]), metrics([[1, 0, 1]], [[1, 0, 1]])
    assert hit == miss
    assert hit["scored_by_slot"] == hit["hit_by_slot"] == [1, 0, 1]


def test_empty_blocks_count_nowhere():
    found = metrics([[1, 1, 1]], [[0, 0, 0]])
    assert found == {
        "accept_sum": 0,
        "accept_count": 0,
        "anchors": 0,
        "hit_by_slot": [0, 0, 0],
        "scored_by_slot": [0, 0, 0],
    }


def test_small_weights_count_as_much_as_large_ones():
    """Decay is for the loss; a metric counts slots."""
    assert metrics([[1, 1, 0]], [[1, 0.1, 0.01]]) == metrics([[1, 1, 0]], [WHOLE])


def test_anchor_slot_is_never_scored():
    found = block_metrics(torch.ones(1, 4, dtype=torch.bool), torch.ones(1, 4))
    assert found["hit_by_slot"].tolist() == [1, 1, 1]
    assert int(found["accept_sum"]) == 4


def test_near_ties_are_within_a_twentieth_of_the_spread():
    row = torch.linspace(-1.0, 1.0, 99)  # a deviation of 0.577, so 0.0289 is near
    logits = torch.stack([torch.cat([row, torch.tensor([v])]) for v in (0.98, 0.94, 1.1)])
    assert near_ties(logits) == [{98, 97, 99}, {98, 97}, {99}]


def test_an_output_is_judged_at_its_first_difference():
    places = {1: {5, 6}}
    asked = []

    def ties(index: int) -> set[int]:
        asked.append(index)
        return places.get(index, set())

    plain = [4, 5, 7]
    found = [agreement(plain, output, ties) for output in ([4, 5, 7], [4, 6, 9], [4, 9, 7], [3, 5, 7], [4, 5])]
    assert found == ["equal", "near tie", "differs", "differs", "differs"] and asked == [1, 1, 0]
    assert told(["equal", "near tie"]) == "1 of 2 outputs equal to the target's, 1 but for a near tie"
    assert told(["equal"]) == "1 of 1 outputs equal to the target's"
