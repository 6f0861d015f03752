"""Rows that `prepare` keeps out of the set, as prompts for the evaluation.

Which side a row is on depends on its conversation alone: on its `conversation_id`, or else on what the user says first,
letter case and white space aside. So all rows of a conversation, and all answers to one question, are on one side, and
they stay there when rows are added or come in another order. A larger share holds out what a smaller one does, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from draftsmith.data.forms import Conversation
from draftsmith.data.messages import is_target, normalise
from draftsmith.randomness import keyed_seed

FILE = "held_out.jsonl"


def draw(conversation: Conversation) -> float:
    """From 0 to 1, the same for all rows of a conversation; those below the share are held out."""
    if conversation.conversation_id:
        key = ("conversation", conversation.conversation_id)
    else:
        first = next((turn for turn in normalise(conversation.messages) if turn["role"] == "user"), None)
        key = ("opening", " ".join(first["content"].casefold().split()) if first else conversation.id)
    return keyed_seed("held out", *key) / 2**64


def prompt_row(conversation: Conversation, arguments: dict[str, Any]) -> dict[str, Any]:
    """The row up to its last answer by the target, as `evaluation.prompts` has them; `arguments`: of the template."""
    answer = max(number for number, turn in enumerate(conversation.messages) if is_target(turn))
    row = {
        "id": conversation.id,
        "messages": normalise(conversation.messages[:answer]),
        "tags": list(conversation.tags),
        "tools": conversation.tools,
        "chat_template_kwargs": arguments,
    }
    return {key: value for key, value in row.items() if value}


def write(rows: Iterable[tuple[float, dict[str, Any]]], file: Path) -> int:
    """Writes the prompts, those with the smallest draw first, so that the first ones are a fair sample.

    Prompts with the same messages are written once. Returns how many there are.
    """
    lines: dict[str, str] = {}
    for _, row in sorted(rows, key=lambda one: (one[0], one[1]["id"])):
        lines.setdefault(json.dumps(row["messages"], sort_keys=True), json.dumps(row, ensure_ascii=False))
    file.write_text("".join(line + "\n" for line in lines.values()), encoding="utf-8")
    return len(lines)
