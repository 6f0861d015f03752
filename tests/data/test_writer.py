"""Slots that are filled again and advance apart, with and without a drafter: equal to one text at a time, slowly."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch

from draftsmith.data.dialogue import Dialogue
from draftsmith.data.prompts import Prompt
from draftsmith.data.sampling import Choice, choose, numbers
from draftsmith.data.slots import attending_by_slots, ladder
from draftsmith.data.writer import Answer, Writer
from draftsmith.errors import UserError
from tests.handmade import tiny_drafter
from tests.tiny import tiny_target

STOP = frozenset([2, *range(3, 23)])
GREEDY = Choice(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
SAMPLED = Choice(temperature=1.2, top_k=60, top_p=0.95, min_p=0.0)


@pytest.fixture(scope="module")
def model():
    return tiny_target("qwen3")


def answers(count: int = 11) -> list[Answer]:
    """Prompts and limits of many lengths, every other one sampled."""
    generator = np.random.default_rng(0)
    made = []
    for number in range(count):
        prompt = Prompt(id=f"row {number}", messages=({"role": "user", "content": "?"},))
        made.append(
            Answer(
                dialogue=Dialogue(prompt, "last", {}),
                prompt=generator.integers(23, 259, 3 + 7 * (number % 6)).astype(np.int32),
                limit=1 + (13 * number) % 37,
                choice=SAMPLED if number % 2 else GREEDY,
                seed=number % 3,
            )
        )
    return made


def write(model, asked: list[Answer], slots: int, drafter=None) -> Writer:
    writer = Writer(model, STOP, slots, drafter)
    with attending_by_slots(model):
        done = list(writer.write(deque(asked)))
    assert sorted(map(id, done)) == sorted(map(id, asked))
    return writer


def plainly(model, answer: Answer) -> list[int]:
    """The whole text through the model again for every token."""
    tokens, drawn = [], numbers(answer.seed, answer.dialogue.prompt.id, 0, answer.limit)
    while len(tokens) < answer.limit and not (tokens and tokens[-1] in STOP):
        with torch.inference_mode():
            logits = model(torch.tensor([[*answer.prompt.tolist(), *tokens]])).logits[:, -1:]
        tokens.append(int(choose(logits, drawn[None, len(tokens), None], [answer.choice])))
    return tokens


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    found = [plainly(model, answer) for answer in answers()]
    assert {tokens[-1] in STOP for tokens in found} == {True, False}
    return found


@pytest.mark.parametrize("slots", [1, 3, 8, 11, 16])
def test_answers_equal_a_slow_reference(model, expected, slots):
    asked = answers()
    writer = write(model, asked, slots)
    assert [answer.tokens for answer in asked] == expected
    for answer in asked:
        assert answer.finish == ("stop" if answer.tokens[-1] in STOP else "length")
    assert writer.cycles == writer.committed == sum(len(tokens) - 1 for tokens in expected)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_other_families(kind):
    model, asked = tiny_target(kind, seed=3), answers()
    write(model, asked, 4)
    assert [answer.tokens for answer in asked] == [plainly(model, answer) for answer in answers()]


DRAFTERS = [
    {},
    {"block_size": 3, "num_layers": 1, "layer_ids": (1,)},
    {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5},
    {"is_causal": True},
]


@pytest.mark.parametrize("options", DRAFTERS)
def test_a_drafter_changes_no_token(model, expected, options):
    asked = answers()
    writer = write(model, asked, 4, tiny_drafter(**options))
    assert [answer.tokens for answer in asked] == expected
    assert writer.committed == sum(len(tokens) - 1 for tokens in expected) >= writer.cycles > 0


@pytest.mark.parametrize("options", DRAFTERS)
def test_drafts_are_those_of_one_text_alone(model, options):
    """Every proposal, against a drafter that is given the features of exactly the tokens before the anchor."""
    drafter, asked, seen = tiny_drafter(**options), answers(7), 0
    writer = Writer(model, STOP, 3, drafter)
    inner = writer.drafter.propose

    def checked(view, anchor, start, place):
        nonlocal seen
        logits = inner(view, anchor, start, place)
        for text, proposed in zip(writer.texts, logits, strict=True):
            if text:
                torch.testing.assert_close(proposed, alone(model, drafter, text), atol=1e-4, rtol=1e-4)
                seen += 1
        return logits

    writer.drafter.propose = checked
    with attending_by_slots(model):
        list(writer.write(deque(asked)))
    assert seen == writer.cycles > 20


def alone(model, drafter, text: Answer) -> torch.Tensor:
    before = torch.tensor([[*text.prompt.tolist(), *text.tokens[:-1]]])
    states = model(before, output_hidden_states=True).hidden_states
    features = torch.cat([states[number + 1][0] for number in drafter.config.target_layer_ids], dim=-1)
    context = drafter.project(features, torch.arange(before.shape[1]))
    block = torch.full((drafter.config.block_size,), drafter.config.mask_token_id)
    block[0] = text.tokens[-1]
    hidden = drafter.propose(context, model.get_input_embeddings()(block))
    return model.get_output_embeddings()(hidden)


@pytest.mark.parametrize(("shift", "size"), [(0, 8), (1, 1)])
def test_drafts_that_are_all_right_and_all_wrong(model, expected, shift, size):
    """Right ones fill every cycle; wrong ones cost nothing but time."""
    drafter, asked = tiny_drafter(block_size=8), answers()
    known = {f"row {number}": tokens for number, tokens in enumerate(expected)}
    writer = Writer(model, STOP, 4, drafter)

    def oracle(view, anchor, start, place):
        logits = torch.zeros(len(writer.texts), 7, 320)
        for row, text in zip(logits, writer.texts, strict=True):
            ahead = known[text.dialogue.prompt.id][len(text.tokens) :][:7] if text else []
            for place_, token in enumerate(ahead):
                row[place_, (token + shift) % 259] = 1.0
        return logits

    writer.drafter.propose = oracle
    with attending_by_slots(model):
        list(writer.write(deque(asked)))
    assert [answer.tokens for answer in asked] == expected
    assert writer.cycles == sum(-(-(len(tokens) - 1) // size) for tokens in expected)


@pytest.mark.parametrize("drafter", [None, tiny_drafter(block_size=4)])
def test_shapes_of_a_step_are_few(model, drafter):
    """All slots, one width, and views of the ladder: what a compiler or a CUDA graph sees."""
    asked, seen = answers(30), []
    writer = Writer(model, STOP, 4, drafter)
    inner = writer.target.step

    def spied(view, tokens, place):
        assert int(place.max()) < view <= writer.target.cache.length
        seen.append((view, tuple(tokens.shape)))
        return inner(view, tokens, place)

    writer.target.step = spied
    writer._leave_empty_slots = lambda: None  # as on a GPU
    with attending_by_slots(model):
        list(writer.write(deque(asked)))
    assert {shape for _, shape in seen} == {(4, 4 if drafter else 1)}
    assert {view for view, _ in seen} <= {ladder(length) for length in range(1, 100)}
    assert len(seen) > 50 and len(set(seen)) <= 6


def test_empty_slots_are_left_at_the_end(model, expected):
    asked, widths = answers(), []
    writer = Writer(model, STOP, 8)
    inner = writer.target.step
    writer.target.step = lambda view, tokens, place: (widths.append(len(tokens)), inner(view, tokens, place))[1]
    with attending_by_slots(model):
        list(writer.write(deque(asked)))
    assert [answer.tokens for answer in asked] == expected
    assert widths[0] == 8 and widths[-1] == 1 and widths == sorted(widths, reverse=True)


def test_a_step_of_two_slots_waits_for_nobody(model):
    """A slot is filled again at once: the steps are far fewer than those of the longest answer of each batch."""
    asked = answers(2) + answers(22)[2:]
    for number, answer in enumerate(asked):
        answer.limit = 30 if number == 0 else 3
    writer = Writer(model, frozenset(), 2)
    steps, inner = [], writer.target.step
    writer.target.step = lambda *given: (steps.append(1), inner(*given))[1]
    with attending_by_slots(model):
        order = [asked.index(answer) for answer in writer.write(deque(asked))]
    assert len(steps) <= 21 * 2 + 2
    assert order.index(0) > 10, "short answers passed by"


def test_what_is_added_while_writing_is_answered(model):
    asked, more = answers(3), answers(6)[3:]
    waiting, done = deque(asked), []
    with attending_by_slots(model):
        for answer in Writer(model, STOP, 2).write(waiting):
            done.append(answer)
            if more:
                waiting.appendleft(more.pop())
    assert sorted(answer.dialogue.prompt.id for answer in done) == [f"row {number}" for number in range(6)]
    assert all(answer.tokens == plainly(model, answer) for answer in done)


def test_the_ladder_wastes_an_eighth_at_most():
    for length in range(1, 5000):
        assert length <= ladder(length) < length + max(16, length / 8)
    assert len({ladder(length) for length in range(1, 8193)}) <= 56
    assert {ladder(length, 128) for length in (1, 100, 128)} == {128}


def test_layers_of_other_kinds_are_refused(model):
    other = tiny_target("qwen3")
    other.config.layer_types = ["sliding_attention", "full_attention"] * 2
    with pytest.raises(UserError, match="layers of the kind sliding_attention.*regenerate.servers"):
        Writer(other, STOP, 2)
