"""The draw by a number: the right distribution, and the very tokens of transformers' own warpers."""

from __future__ import annotations

import pytest
import torch

from draftsmith.data.sampling import Choice, choose, invert, numbers


def test_inverse_sampling_has_the_right_distribution():
    probability = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    levels = torch.tensor([index / 1000 for index in range(1000)] + [1 - 2**-53], dtype=torch.float64)
    chosen = invert(probability.log().expand(len(levels), -1), levels)
    assert chosen.bincount(minlength=6).tolist() == pytest.approx([0, 250, 0, 500, 251, 0], abs=1)
    assert {chosen[0].item(), chosen[-1].item()} == {1, 4}


def test_every_row_is_chosen_in_its_own_way():
    generator = torch.Generator().manual_seed(0)
    logits, uniform = torch.randn(6, 3, 50, generator=generator) * 3, torch.rand(6, 3, dtype=torch.float64)
    warm = Choice(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01)
    hot = Choice(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0)
    greedy = Choice(temperature=0.0, top_k=5, top_p=0.5, min_p=0.0)
    choices = [warm, None, hot, warm, greedy, hot]
    together = choose(logits, uniform, choices)
    for row, choice in enumerate(choices):
        assert torch.equal(together[row], choose(logits[row : row + 1], uniform[row : row + 1], [choice])[0])
        if choice in (None, greedy):
            assert torch.equal(together[row], logits[row].argmax(-1))
        else:
            assert torch.equal(together[row], _plainly(logits[row], uniform[row], choice))
    assert not torch.equal(together, logits.argmax(-1))


def _plainly(logits: torch.Tensor, uniform: torch.Tensor, choice: Choice) -> torch.Tensor:
    """One place at a time: temperature, top-k, top-p, min-p, and a walk along the cumulative sum."""
    chosen = []
    for row, level in zip(logits, uniform.tolist(), strict=True):
        share = (row / choice.temperature).softmax(-1)
        if choice.top_k:
            share[share < share.topk(choice.top_k).values[-1]] = 0
        order = share.argsort(descending=True)
        before = (share[order] / share.sum()).cumsum(-1) - share[order] / share.sum()
        share[order[before >= choice.top_p]] = 0
        share[share < choice.min_p * share.max()] = 0
        passed, sum_ = 0.0, float(share.double().sum())
        for token, one in enumerate(share.tolist()):
            passed += one
            if passed > level * sum_:
                chosen.append(token)
                break
    return torch.tensor(chosen)


def test_numbers_depend_on_seed_row_and_turn_alone():
    first = numbers(0, "row", 0, 8)
    assert torch.equal(numbers(0, "row", 0, 20)[:8], first)
    others = [numbers(1, "row", 0, 8), numbers(0, "wor", 0, 8), numbers(0, "row", 1, 8)]
    assert not any(torch.equal(other, first) for other in others)
    assert float(first.min()) >= 0 and float(first.max()) < 1
