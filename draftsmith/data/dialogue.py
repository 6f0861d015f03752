"""A prompt on its way to a row of the output: what is asked of the target next, and what it answered so far.

Served and local regeneration walk the same dialogues, so both write the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from draftsmith.data.messages import content_id
from draftsmith.data.prompts import Prompt


class Dialogue:
    """Ask, answer, ask again, until `ask` says that it is over; then there is the row."""

    def __init__(self, prompt: Prompt, turns: str, arguments: dict[str, Any]) -> None:
        """`turns`: "last" answers the last question, "all" every question in turn. `arguments`: of the chat template,
        for all rows."""
        self.prompt = prompt
        self.arguments = {**arguments, **prompt.arguments}
        self.messages: list[dict] = []
        self.finish = "stop"
        """How the last answer ended."""
        self.answers = 0
        self._questions = questions(prompt, turns)
        self._served: list[dict] = []

    def ask(self) -> list[dict]:
        """What is said before the next answer, now a part of `messages`; empty when the dialogue is over."""
        if self.finish != "stop":  # a cut answer or a call without a result: nothing can follow
            return []
        said = next(self._questions, [])
        self.messages += said
        return said

    def answer(self, message: dict, finish: str, ids: tuple[list[int] | None, list[int]] | None = None) -> None:
        """`ids`: of the request (None: unknown) and of the answer, to be kept with the row."""
        self.messages.append(message)
        self.finish = finish
        self.answers += 1
        if ids is not None:
            served = {"message": len(self.messages) - 1, "prompt_ids": ids[0], "answer_ids": ids[1]}
            self._served.append(served)

    def row(self) -> dict:
        prompt = self.prompt
        row = {"id": prompt.id, "messages": self.messages, "tags": list(prompt.tags), "finish": self.finish}
        row |= {"tools": list(prompt.tools)} if prompt.tools else {}
        row |= {"chat_template_kwargs": self.arguments} if self.arguments else {}
        row |= {"served": self._served} if self._served else {}
        return {**row, "asked": content_id(prompt.messages)}


def questions(prompt: Prompt, turns: str) -> Iterator[list[dict]]:
    """What is added to the conversation before each answer of the target.

    "last": all that is given. "all": up to the next answer that is not a tool call; the given answer is left out. Given
    answers that stay were not written by the target, and are marked so.
    """
    added: list[dict] = []
    for message in prompt.messages:
        given = message["role"] == "assistant"
        if given and turns == "all" and not message.get("tool_calls"):
            if added:  # or else it is the second part of the answer before it
                yield added
            added = []
        else:
            added.append({**message, "train": False} if given else message)
    if added and added[-1]["role"] in ("user", "tool"):
        yield added
