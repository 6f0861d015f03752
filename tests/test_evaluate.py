"""The figures by which a drafter is judged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftsmith.acceptance import Agreement, agreement, verdict
from draftsmith.config import DataOptions, EvaluationOptions
from draftsmith.data.prompts import Prompt
from draftsmith.data.template import chat_arguments
from draftsmith.decode import Decoded
from draftsmith.errors import DataError, UserError
from draftsmith.evaluate import Case, Evaluation, _agreement, _summarise, evaluate, make_cases
from draftsmith.targets import HFTarget
from tests.test_decode import make_drafter
from tests.tiny import CHATML, tiny_target, tiny_tokenizer


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


def summarise(cases: list[Case], answers: list[Decoded]) -> Evaluation:
    agreed: list[Agreement | None] = [
        None if c.plain is None else agreement(c.plain, a.tokens, lambda i: set())
        for c, a in zip(cases, answers, strict=True)
    ]
    return _summarise(cases, answers, agreed, 4, 1.0)


def test_accept_length_is_the_mean_over_responses():
    found = summarise(CASES, ANSWERS)
    assert found.accept_length == (2.5 + 2.0) / 2  # the third answer has no cycle; prefill's tokens belong to none


def test_pooled_accept_length_is_over_all_cycles():
    assert summarise(CASES, ANSWERS).accept_length_pooled == (4 + 1 + 2) / 3


def test_accept_rate_by_slot_counts_what_was_offered():
    assert summarise(CASES, ANSWERS).accept_rate_by_slot == [2 / 3, 2 / 3, 1 / 2]


def test_accept_length_by_tag():
    assert summarise(CASES, ANSWERS).by_tag == {"x": 2.25, "y": 2.0}


def test_one_different_token_is_not_lossless():
    found = summarise([*CASES[:2], case("c", [3])], ANSWERS)
    assert found.lossless is False and found.num_equal == 2
    assert summarise(CASES, ANSWERS).lossless is True


@pytest.mark.parametrize(
    ("dtype", "flat", "expected"),
    [(torch.bfloat16, True, "near tie"), (torch.float32, True, "differs"), (torch.bfloat16, False, "differs")],
)
def test_a_near_tie_counts_as_equal_in_bf16_and_never_in_fp32(dtype, flat, expected):
    """Kernels of other shapes choose otherwise where two logits are all but equal; `verify` forgives that too."""
    target = HFTarget(tiny_target(tied=False).to(dtype), tiny_tokenizer(), (0, 2))
    if flat:
        target.head.zero_()  # every token is as good as the first choice
    (one,) = make_cases(target, [prompt("one")], EvaluationOptions(max_new_tokens=6), lambda done: None)
    text = torch.cat([one.tokens, one.tokens.new_tensor(one.plain[:2])])
    worst = int(target.extend(text, target.new_cache())[0][-1, 3:].argmin()) + 3
    answer = replace(ANSWERS[0], tokens=[*one.plain[:2], 7 if flat else worst, 5])
    assert _agreement(target, one, answer) == expected


def test_what_an_evaluation_says_of_its_outputs():
    assert verdict(True, 2) == "output equal to plain decoding but for near ties in 2 answers"
    assert verdict(True, 0) == "output equal to plain decoding" and verdict(None, 0) == "sampled"
    assert verdict(False, 2) == "OUTPUT DIFFERS from plain decoding"


def test_nothing_is_claimed_about_losslessness_when_sampling():
    assert summarise([case("a", None)], ANSWERS[:1]).lossless is None


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


def test_every_turn_is_asked_after_the_targets_own_answer(target):
    options = EvaluationOptions(max_new_tokens=6)
    asked = replace(prompt("first", "x"), followups=("second", "third"))
    cases = make_cases(target, [asked], options, lambda done: None)
    assert [case.prompt.id for case in cases] == ["first", "first, turn 2", "first, turn 3"]
    assert all(case.prompt.tags == ("x",) for case in cases)
    answer = target.tokenizer.decode([t for t in cases[0].plain if t not in target.eos_ids], skip_special_tokens=True)
    said = target.tokenizer.decode(cases[1].tokens)
    assert said == (
        f"<|im_start|>user\nfirst<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        "<|im_start|>user\nsecond<|im_end|>\n<|im_start|>assistant\n"
    )
    assert evaluate(target, make_drafter(target), cases, options).lossless is True
    sampled = make_cases(target, [asked], EvaluationOptions(max_new_tokens=6, temperature=1.0), lambda done: None)
    assert len(sampled) == 3 and all(case.plain is None for case in sampled)


THINKING = "{% if enable_thinking is defined %}{{ '[' ~ enable_thinking ~ ']' }}{% endif %}" + CHATML


def test_the_templates_arguments_come_from_run_evaluation_and_row():
    target = HFTarget(tiny_target(), tiny_tokenizer(), (0, 2))
    target.tokenizer.chat_template = THINKING
    trained = DataOptions(enable_thinking=True)

    def begins(options: EvaluationOptions, data: DataOptions | None, **row) -> str:
        cases = make_cases(
            target, [replace(prompt("a"), **row)], options, lambda done: None, chat_arguments(options, data)
        )
        return target.tokenizer.decode(cases[0].tokens).split("<|im_start|>")[0]

    few = EvaluationOptions(max_new_tokens=1)
    assert begins(few, None) == ""
    assert begins(few, trained) == "[True]", "as the data was rendered"
    assert begins(replace(few, enable_thinking=False), trained) == "[False]"
    assert begins(replace(few, template_kwargs='{"enable_thinking": false}'), trained) == "[False]"
    assert begins(few, trained, arguments={"enable_thinking": "row"}) == "[row]"
    with pytest.raises(UserError, match="say different things"):
        chat_arguments(replace(few, enable_thinking=True, template_kwargs='{"enable_thinking": false}'))


def test_a_prompt_without_room_for_an_answer_is_an_error(target):
    with pytest.raises(DataError, match="prompt 'one' has .* more than the target's 2048 positions"):
        make_cases(target, [prompt("one")], EvaluationOptions(max_new_tokens=2040), lambda done: None)
