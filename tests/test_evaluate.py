"""The figures by which a drafter is judged."""

from __future__ import annotations

import pytest
import torch

from draftsmith.config import EvaluationOptions
from draftsmith.data.prompts import Prompt
from draftsmith.decode import Decoded
from draftsmith.evaluate import Case, _summarise, evaluate, make_cases
from draftsmith.targets import HFTarget
from tests.test_decode import make_drafter
from tests.tiny import tiny_target, tiny_tokenizer


def prompt(name: str, *tags: str) -> Prompt:
    return Prompt(id=name, messages=({"role": "user", "content": name},), tags=tags)


def case(name: str, plain: list[int] | None, *tags: str) -> Case:
    return Case(prompt=prompt(name, *tags), tokens=torch.tensor([1]), plain=plain)


# Block size 4. The first answer: prefill's token, then cycles of 4 and 1 tokens. The second: one cycle of 2, whose last
# token is the stop token, drafted. The third: prefill's token is a stop token.
ANSWERS = [
    Decoded(
        tokens=[9, 10, 11, 12, 13, 14],
        cycles=[4, 1],
        drafted=[False, True, True, True, False, False],
        offered=[3, 3],
        accepted=[3, 0],
    ),
    Decoded(tokens=[9, 10, 2], cycles=[2], drafted=[False, True, True], offered=[2], accepted=[2]),
    Decoded(tokens=[2], cycles=[], drafted=[False], offered=[], accepted=[]),
]
CASES = [case("a", ANSWERS[0].tokens, "x"), case("b", ANSWERS[1].tokens, "x", "y"), case("c", [2], "z")]


def test_accept_length_is_the_mean_over_responses():
    found = _summarise(CASES, ANSWERS, 4, 1.0)
    assert found.accept_length == (2.5 + 2.0) / 2  # the third answer has no cycle; prefill's tokens belong to none


def test_pooled_accept_length_is_over_all_cycles():
    assert _summarise(CASES, ANSWERS, 4, 1.0).accept_length_pooled == (4 + 1 + 2) / 3


def test_accept_rate_by_slot_counts_what_was_offered():
    assert _summarise(CASES, ANSWERS, 4, 1.0).accept_rate_by_slot == [2 / 3, 2 / 3, 1 / 2]


def test_accept_length_by_tag():
    assert _summarise(CASES, ANSWERS, 4, 1.0).by_tag == {"x": 2.25, "y": 2.0}


def test_one_different_token_is_not_lossless():
    found = _summarise([*CASES[:2], case("c", [3])], ANSWERS, 4, 1.0)
    assert found.lossless is False and found.num_equal == 2
    assert _summarise(CASES, ANSWERS, 4, 1.0).lossless is True


def test_nothing_is_claimed_about_losslessness_when_sampling():
    assert _summarise([case("a", None)], ANSWERS[:1], 4, 1.0).lossless is None


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return HFTarget(tiny_target(), tiny_tokenizer(), (0, 2))


def test_greedy_evaluation_is_lossless_and_counts_its_tokens(target):
    options = EvaluationOptions(max_new_tokens=12)
    prompts = [prompt(name) for name in ("one", "two", "three")]
    done: list[int] = []
    cases = make_cases(target, prompts, options, done.append)
    found = evaluate(target, make_drafter(target), cases, options)
    assert done == [1, 2, 3]
    assert found.lossless is True
    assert found.tokens == sum(len(case.plain) for case in cases)
    assert 1 <= found.accept_length <= 5


def test_sampling_depends_on_the_seed_and_the_prompt_not_on_the_order(target):
    options = EvaluationOptions(max_new_tokens=12, temperature=1.0)
    cases = make_cases(target, [prompt(name) for name in ("one", "two")], options, lambda done: None)
    drafter = make_drafter(target)
    forward = [answer.tokens for answer in evaluate(target, drafter, cases, options, seed=1).answers]
    backward = [answer.tokens for answer in evaluate(target, drafter, cases[::-1], options, seed=1).answers]
    other = [answer.tokens for answer in evaluate(target, drafter, cases, options, seed=2).answers]
    assert forward == backward[::-1] != other
