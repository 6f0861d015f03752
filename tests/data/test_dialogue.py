"""A prompt's way to a row: what is asked when, and what the row keeps."""

from __future__ import annotations

import pytest

from draftsmith.data.dialogue import Dialogue
from draftsmith.data.prompts import Prompt, content_id
from tests.data.test_server import CALL, assistant, user


def walk(messages: list[dict], turns: str, *finishes: str) -> tuple[list[list[dict]], dict]:
    """What is asked each time, and the row."""
    dialogue, asked = Dialogue(Prompt(id="d", messages=tuple(messages)), turns, {}), []
    for finish in (*finishes, *["stop"] * 9):
        if not (said := dialogue.ask()):
            break
        asked.append(said)
        assert dialogue.messages[-len(said) :] == said
        dialogue.answer(assistant(f"new {len(asked)}"), finish)
    assert dialogue.ask() == [] and dialogue.answers == len(asked)
    return asked, dialogue.row()


TALK = [user("a"), assistant("old"), user("b"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "2"}]


def test_the_last_question_with_all_that_came_before():
    asked, row = walk(TALK, "last")
    assert asked == [[TALK[0], {**TALK[1], "train": False}, TALK[2], {**TALK[3], "train": False}, TALK[4]]]
    assert row["messages"] == [*asked[0], assistant("new 1")] and row["asked"] == content_id(TALK)


def test_every_question_in_turn():
    asked, row = walk([*TALK, assistant("old"), user("c")], "all")
    assert asked == [[TALK[0]], [TALK[2], {**TALK[3], "train": False}, TALK[4]], [user("c")]]
    assert [m["content"] for m in row["messages"] if m.get("train") is None and m["role"] == "assistant"] == [
        "new 1", "new 2", "new 3"
    ]  # fmt: skip


@pytest.mark.parametrize("finish", ["length", "tool_calls", "content_filter"])
def test_nothing_follows_an_answer_that_did_not_end(finish):
    asked, row = walk([*TALK, assistant("old"), user("c")], "all", "stop", finish)
    assert len(asked) == 2 and row["finish"] == finish


def test_an_answer_in_two_parts_is_one_answer():
    asked, row = walk([user("a"), assistant("old"), assistant("older"), user("b"), assistant("old")], "all")
    assert asked == [[user("a")], [user("b")]]
    assert [message["content"] for message in row["messages"]] == ["a", "new 1", "b", "new 2"]
