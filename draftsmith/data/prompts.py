"""Prompts: conversations that end with a user turn, one JSON object a line.

Read by `regenerate` (to be answered) and by the evaluation (to be decoded).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.data.forms import asked_messages
from draftsmith.data.messages import content_id
from draftsmith.data.sources import open_source
from draftsmith.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Prompt:
    id: str
    """The row's own, or `content_id` of its messages."""
    messages: tuple[dict[str, Any], ...]
    """Turns with a role and a content; the last is the user's."""
    tags: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of the chat template, for this row."""
    sampling: dict[str, float | int] = field(default_factory=dict)
    """Sampling options of this row, over those of the run."""
    followups: tuple[str, ...] = ()
    """What the user says after the target's answer, turn by turn; of suites only."""


SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
"""What a row's own sampling may say."""


def read_prompts(path: Path | str, limit: int | None = None, *, answered: bool = False) -> list[Prompt]:
    """The first `limit` prompts of a file (or whatever else is a source), in order; a row that occurs twice is
    returned twice.

    A row holds {"prompt": str} or {"messages": [{"role": str, "content": str}, ...]}, or is of another form with a
    question in it (see `asked_messages`), and optionally "id", "tags" (a list of strings), "tools",
    "chat_template_kwargs" and "sampling" (see SAMPLING). Empty lines are skipped. `answered`: the last turn may be an
    answer, which is to be replaced.

    Raises DataError with file and 1-based number for anything else, for one id on two different conversations, and for
    a file that is missing or holds no prompt.
    """
    prompts: list[Prompt] = []
    first_row: dict[str, tuple[int, tuple]] = {}
    for row in open_source(str(path)).rows(lambda note: None):
        if limit is not None and len(prompts) >= limit:
            break
        try:
            prompt = _parse(row.value, answered)
        except ValueError as error:  # not JSON, not UTF-8, or one of the messages below
            raise DataError(f"{row.place}: {error}") from error
        earlier, messages = first_row.setdefault(prompt.id, (row.number, prompt.messages))
        if messages != prompt.messages:
            raise DataError(f"{row.place}: id {prompt.id!r} already names another prompt, {row.unit} {earlier}.")
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"{path}: holds no prompts{'' if limit is None or limit > 0 else f' (limit {limit})'}.")
    return prompts


def _parse(value: bytes | dict, answered: bool) -> Prompt:
    """Raises ValueError saying what is wrong with the row."""
    row = json.loads(value) if isinstance(value, bytes) else value
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with 'prompt' or 'messages', got {_shorten(row)}.")
    messages = asked_messages(row, answered=answered)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"'messages' must be a list of turns, got {_shorten(messages)}.")
    for turn in messages:
        texts = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None)
        if texts[0] == "assistant" and texts[1] is None and turn.get("tool_calls"):
            continue
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"a turn needs a 'role' and a 'content', both strings, got {_shorten(turn)}.")
        turn["content"].encode()  # a lone surrogate is legal JSON but no text; UnicodeEncodeError is a ValueError
    last = messages[-1]["role"]
    if last not in ("user", "tool") and not (answered and last == "assistant" and len(messages) > 1):
        raise ValueError(f"the last turn must be the user's, for the target to answer; it is {last!r}.")
    tags = row.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise ValueError(f"'tags' must be a list of strings, got {_shorten(tags)}.")
    name = row.get("id")
    if name is None:
        name = content_id(messages)
    elif isinstance(name, bool) or not isinstance(name, str | int) or name == "":
        raise ValueError(f"'id' must be a string or a whole number, got {_shorten(name)}.")
    return Prompt(id=str(name), messages=tuple(messages), tags=tuple(tags), **_more(row))


def _more(row: dict) -> dict[str, Any]:
    tools, arguments, sampling = (row.get(key) or None for key in ("tools", "chat_template_kwargs", "sampling"))
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"'tools' must be a list of objects, got {_shorten(tools)}.")
    for key, value in (("chat_template_kwargs", arguments), ("sampling", sampling)):
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"'{key}' must be an object, got {_shorten(value)}.")
    for key, value in (sampling or {}).items():
        if key not in SAMPLING or isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"'sampling' may hold numbers for {', '.join(SAMPLING)}, got {_shorten({key: value})}.")
    return {"tools": tuple(tools or ()), "arguments": arguments or {}, "sampling": sampling or {}}


def _shorten(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
