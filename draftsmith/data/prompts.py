"""Prompts: conversations that end with a user turn, one JSON object a line.

Read by `regenerate` (to be answered) and by the evaluation (to be decoded).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Prompt:
    id: str
    """The row's own, or `content_id` of its messages."""
    messages: tuple[dict[str, Any], ...]
    """Turns with a role and a content; the last is the user's."""
    tags: tuple[str, ...] = ()


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a JSONL file, in order; a row that occurs twice is returned twice.

    A line holds {"prompt": str} or {"messages": [{"role": str, "content": str}, ...]}, and optionally "id" and "tags"
    (a list of strings). Empty lines are skipped. Raises DataError with file and 1-based line number for anything else,
    for one id on two different conversations, and for a file that is missing or holds no prompt.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file. Give a JSONL file with one prompt a line.")
    prompts: list[Prompt] = []
    first_line: dict[str, tuple[int, tuple]] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if limit is not None and len(prompts) >= limit:
                break
            if not line.strip():
                continue
            try:
                prompt = _parse(line)
            except ValueError as error:  # not JSON, not UTF-8, or one of the messages below
                raise DataError(f"{path}, line {number}: {error}") from error
            earlier, messages = first_line.setdefault(prompt.id, (number, prompt.messages))
            if messages != prompt.messages:
                raise DataError(
                    f"{path}, line {number}: id {prompt.id!r} already names another prompt, line {earlier}."
                )
            prompts.append(prompt)
    if not prompts:
        raise DataError(f"{path}: holds no prompts{'' if limit is None else f' (limit {limit})'}.")
    return prompts


def content_id(messages: Sequence[dict[str, Any]]) -> str:
    """16 hex digits that depend on the turns alone: the same wherever and in whatever order the row stands."""
    canonical = json.dumps(list(messages), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=8).hexdigest()


def _parse(line: bytes) -> Prompt:
    """Raises ValueError saying what is wrong with the row."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with 'prompt' or 'messages', got {_shorten(row)}.")
    if ("prompt" in row) == ("messages" in row):
        raise ValueError(
            f"expected one of the keys 'prompt' and 'messages', got {', '.join(map(repr, row)) or 'none'}."
        )
    messages = [{"role": "user", "content": row["prompt"]}] if "prompt" in row else row["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"'messages' must be a list of turns, got {_shorten(messages)}.")
    for turn in messages:
        texts = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"a turn needs a 'role' and a 'content', both strings, got {_shorten(turn)}.")
        turn["content"].encode()  # a lone surrogate is legal JSON but no text; UnicodeEncodeError is a ValueError
    if messages[-1]["role"] != "user":
        raise ValueError(f"the last turn must be the user's, for the target to answer; it is {messages[-1]['role']!r}.")
    tags = row.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise ValueError(f"'tags' must be a list of strings, got {_shorten(tags)}.")
    name = row.get("id")
    if name is None:
        name = content_id(messages)
    elif isinstance(name, bool) or not isinstance(name, str | int) or name == "":
        raise ValueError(f"'id' must be a string or a whole number, got {_shorten(name)}.")
    return Prompt(id=str(name), messages=tuple(messages), tags=tuple(tags))


def _shorten(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
