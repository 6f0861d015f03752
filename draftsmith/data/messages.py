"""What a conversation is: roles, their order, and one form for the many ways in which people write the same message.

`normalise` does what servers do to a request before its template sees it: text parts are joined, a missing content is
the empty text, and arguments of tool calls are objects even where the row holds them as JSON text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from draftsmith.errors import DataError

FINISHES = ("stop", "length", "tool_calls")
"""How an answer may have ended; `length`: cut by the token limit, so the target never wrote its end-of-turn token."""

ROLES = ("system", "developer", "user", "assistant", "tool")

FOLLOWERS = {
    None: ("system", "developer", "user"),
    "system": ("developer", "user"),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
"""Roles that may come next; None is the beginning."""

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names under which servers and data sets keep what the target thought."""

DROPPED = (*REASONING_KEYS, "train")
"""Keys of a message that no template gets as they are."""


def content_id(messages: Sequence[dict[str, Any]]) -> str:
    """16 hex digits that depend on the turns alone: the same wherever and in whatever order the row stands."""
    canonical = json.dumps(list(messages), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=8).hexdigest()


def check_messages(messages: Any) -> None:
    """DataError, with the reason, unless these are well-formed messages in order with at least one answer."""
    check_order(messages)
    if not any(is_target(message) for message in messages):
        raise DataError("no assistant message, so nothing to learn from; let the target answer first (regenerate)")


def is_target(message: dict) -> bool:
    """True for an answer of the target; one with "train": false was written by something else."""
    return message["role"] == "assistant" and message.get("train") is not False


def check_order(messages: Any) -> None:
    """DataError unless these are messages whose roles may follow each other."""
    if not isinstance(messages, list) or not messages:
        raise DataError("messages must be a list with at least one message")
    previous = None
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise DataError(f"message {number} must be an object whose role is one of {', '.join(ROLES)}")
        role = message["role"]
        if role not in FOLLOWERS[previous]:
            place = "at the beginning" if previous is None else f"after {previous!r}"
            allowed = " or ".join(FOLLOWERS[previous])
            raise DataError(f"roles out of order: message {number} is {role!r} {place}, where only {allowed} may come")
        _check_content(message, f"message {number} ({role})")
        previous = role


def normalise(messages: list[dict], *, keep_reasoning: bool = True) -> list[dict]:
    """Checked messages in the form in which a server hands them to the chat template; the originals stay as they are.

    `keep_reasoning=False` leaves out what the target thought.
    """
    return [
        _normal(message, f"message {n} ({message['role']})", keep_reasoning) for n, message in enumerate(messages, 1)
    ]


def _check_content(message: dict, name: str) -> None:
    content = message.get("content")
    answered = message["role"] == "assistant" and (message.get("tool_calls") or _reasoning(message))
    if not isinstance(content, str) and not (content is None and answered):
        parts = content if isinstance(content, list) else []
        if not parts or not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            raise DataError(f"{name} has no text: content must be a string, or a list of text parts")
    if not isinstance(message.get("train"), (bool, type(None))):
        raise DataError(f"{name}: train must be true or false")
    if any(not isinstance(message.get(key), (str, type(None))) for key in REASONING_KEYS):
        raise DataError(f"{name}: its reasoning must be a string")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise DataError(f"{name}: tool_calls must be a list of objects")


def _normal(message: dict, name: str, keep_reasoning: bool) -> dict:
    normal = {key: value for key, value in message.items() if key not in DROPPED and value is not None}
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    normal["content"] = "" if content is None else content
    if (reasoning := _reasoning(message)) and keep_reasoning:
        normal |= {"reasoning_content": reasoning, "thinking": reasoning}  # two names that templates know
    if calls := message.get("tool_calls"):
        normal["tool_calls"] = [_normal_call(call, name) for call in calls]
    return normal


def _normal_call(call: dict, name: str) -> dict:
    given = call.get("function", call)
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise DataError(f"{name}: a tool call needs a function with a name")
    arguments = given.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise DataError(f"{name}: the arguments of {given['name']!r} are not JSON ({error.msg})") from error
        given = {**given, "arguments": arguments}
    if arguments is not None and not isinstance(arguments, dict):
        raise DataError(f"{name}: the arguments of {given['name']!r} must be an object, or one as JSON text")
    return {**call, "function": given} if "function" in call else {"type": "function", "function": given}


def _reasoning(message: dict) -> str | None:
    return next((message[key] for key in REASONING_KEYS if message.get(key)), None)
