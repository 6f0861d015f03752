"""Forms of a row: what people call the same conversation, each turned into one `Conversation`.

| form | a row |
|---|---|
| messages | {"messages": [{"role", "content", ...}]}, the last an answer |
| sharegpt | {"conversations": [{"from": "human", "value": ...}]}, optionally "system" |
| prompt_response | a prompt and a response column (instruction and output, question and answer, ...) |
| prompts | {"prompt": ...}, or messages that end with a question: for `regenerate` |
| text | {"text": ...}: every token is supervised |
| tokens | {"input_ids", "loss_mask"} (or "labels", -100 where nothing is learned) |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftsmith.data.messages import FINISHES, check_messages, content_id
from draftsmith.errors import DataError, UserError

ROW_KEYS = ("messages", "id", "tags", "finish", "tools", "chat_template_kwargs", "served", "asked", "conversation_id")
"""What a row may hold besides its form's own columns; other keys are passed over, and counted."""

SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
"""Names of the roles in ShareGPT-like sets."""

KNOWN_COLUMNS = {
    "messages": ("messages",),
    "conversations": ("conversations", "conversation"),
    "prompt": ("prompt", "instruction", "question", "query"),
    "response": ("response", "completion", "output", "answer"),
    "text": ("text",),
    "tokens": ("input_ids", "tokens"),
    "mask": ("loss_mask", "supervised", "labels"),
}
"""What a part of a row is usually called."""

PARTS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_response": ("prompt", "response"),
    "prompts": ("prompt",),
    "text": ("text",),
    "tokens": ("tokens", "mask"),
}
"""The parts that make a form, in the order in which forms are tried."""

EXPECTED = {
    "messages": 'an object {"messages": [{"role": ..., "content": ...}, ...]}',
    "sharegpt": 'an object {"conversations": [{"from": ..., "value": ...}, ...]}',
    "prompt_response": "an object with a prompt and a response",
    "prompts": "an object with a prompt",
    "text": 'an object {"text": ...}',
    "tokens": 'an object {"input_ids": [...], "loss_mask": [...]}',
}


@dataclass(frozen=True, kw_only=True)
class Form:
    """How rows are read: the name of the form and the column of each of its parts."""

    name: str
    columns: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(f'{column!r}' for column in self.columns.values())})"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One row, checked."""

    line: int
    """1-based; the line of a JSONL file, elsewhere the row."""
    id: str
    """As given, or from the messages alone, so that it does not depend on the row's place."""
    messages: list[dict]
    """Empty for plain text and for tokens."""
    tools: list[dict] | None = None
    tags: tuple[str, ...] = ()
    conversation_id: str = ""
    """Of the conversation that the row is a piece or a variant of, if it says so."""
    finish: str = "stop"
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template that are this row's own."""
    served: dict[int, tuple[list[int] | None, list[int]]] = field(default_factory=dict)
    """By message, the ids of its prompt and of the answer as a server gave them."""
    text: str | None = None
    tokens: list[int] | None = None
    mask: list[bool] | None = None
    content: str = ""
    """All of the above save `line`, as canonical JSON: equal for exact duplicates only."""
    ignored: tuple[str, ...] = ()
    """Keys that mean nothing here."""


def choose_form(wanted: str, columns: tuple[str, ...], row: Any) -> Form:
    """The form of a set, by its name or from its first row. `columns`: "part=column", where names are others.

    DataError when the row shows none.
    """
    given = {}
    for pair in columns:
        part, equals, column = pair.partition("=")
        if not equals or part not in KNOWN_COLUMNS or not column:
            raise UserError(f"data.columns {pair!r}: give PART=COLUMN; parts: {', '.join(KNOWN_COLUMNS)}")
        given[part] = column
    keys = list(row) if isinstance(row, dict) else []

    def found(part: str) -> str | None:
        return given.get(part) or next((name for name in KNOWN_COLUMNS[part] if name in keys), None)

    for name, parts in PARTS.items():
        named = {part: column for part in parts if (column := found(part)) is not None}
        if wanted == name or (wanted == "auto" and len(named) == len(parts) and all(c in keys for c in named.values())):
            return Form(name=name, columns={part: named.get(part) or KNOWN_COLUMNS[part][0] for part in parts})
    shown = f"keys {', '.join(map(repr, keys)) or 'none'}" if isinstance(row, dict) else type(row).__name__
    raise DataError(
        f"expected {EXPECTED['messages']}, or another form that `data.form` and `data.columns` can name "
        f"({', '.join(PARTS)}), found {shown.replace(chr(39), '')}"
    )


def parse_row(raw: bytes | dict) -> Any:
    """The value of a row that may still be JSON text."""
    if not isinstance(raw, bytes):
        return raw
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 ({error.reason} at byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON ({error.msg} at column {error.colno})") from error
    except RecursionError as error:
        raise DataError("JSON nested too deep") from error


def read_row(row: Any, line: int, form: Form) -> Conversation:
    """A row of the given form as a checked conversation. DataError with the reason if it is none."""
    if not isinstance(row, dict) or any(column not in row for column in form.columns.values()):
        found = f"keys {', '.join(row) or 'none'}" if isinstance(row, dict) else type(row).__name__
        raise DataError(f"expected {EXPECTED[form.name]}, found {found}")
    parts = {part: row[column] for part, column in form.columns.items()}
    known = _common(row)
    if form.name == "text":
        if not isinstance(parts["text"], str) or not parts["text"]:
            raise DataError(f"{form.columns['text']} must be a text that is not empty")
        own: dict[str, Any] = {"text": parts["text"], "messages": []}
    elif form.name == "tokens":
        own = {"tokens": parts["tokens"], "mask": _mask(parts["tokens"], parts["mask"], form), "messages": []}
    else:
        own = {"messages": _messages(row, parts, form)}
        check_messages(own["messages"])
        own["served"] = _served(row.get("served"), own["messages"])
    given = row.get("id")
    if given is not None and (isinstance(given, bool) or not isinstance(given, (str, int)) or given == ""):
        raise DataError("id must be a string or an integer")
    identity = own["messages"] or [{"tokens": own["tokens"]} if "tokens" in own else {"text": own["text"]}]
    identifier = content_id(identity) if given is None else str(given)
    rest = [known["tools"], list(known["tags"]), known["finish"], known["arguments"]]
    content = _canonical([identifier, *own.values(), *rest])
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError("half of a surrogate pair (a \\ud8.. or \\udc.. escape by itself) is not text") from error
    used = (
        {*ROW_KEYS, *form.columns.values(), "system", "input"}
        if form.name in MORE
        else {*ROW_KEYS, *form.columns.values()}
    )
    ignored = tuple(key for key in row if key not in used)
    return Conversation(line=line, id=identifier, content=content, ignored=ignored, **own, **known)


def asked_messages(row: dict, *, answered: bool) -> Any:
    """The conversation of a row up to where the target is to answer, whichever form of a conversation it has.

    What another model answered to a ShareGPT-like row's last question or in a response column is left out; `answered`
    leaves a ShareGPT-like row whole. Messages are returned as they are. DataError for a row without a question.
    """
    found = {part: [name for name in KNOWN_COLUMNS[part] if name in row] for part in ("conversations", "prompt")}
    ways = [*(["messages"] if "messages" in row else []), *found["conversations"], *found["prompt"][:1]]
    if len(ways) != 1:
        raise DataError(
            "expected one of the keys 'prompt' (or 'instruction', 'question', 'query'), 'messages' and "
            f"'conversations', got {', '.join(map(repr, row)) or 'none'}."
        )
    if ways == ["messages"]:
        return row["messages"]
    name = "sharegpt" if found["conversations"] else "prompt"
    form = Form(name=name, columns={"conversations": ways[0]} if found["conversations"] else {"prompt": ways[0]})
    messages = _messages(row, {part: row[column] for part, column in form.columns.items()}, form)
    while found["conversations"] and messages and messages[-1]["role"] == "assistant" and not answered:
        messages.pop()
    return messages


MORE = ("sharegpt", "prompt_response")
"""Forms that may have the columns system and input besides."""


def _common(row: dict) -> dict[str, Any]:
    tools, tags, finish = row.get("tools"), row.get("tags"), row.get("finish")
    if isinstance(tools, str):  # Parquet sets keep them as JSON text
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise DataError(f"tools is text that is not JSON ({error.msg})") from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError("tools must be a list of objects")
    tags = [] if tags is None else tags
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise DataError("tags must be a list of strings")
    finish = "stop" if finish is None else finish
    if finish not in FINISHES:
        raise DataError(f"finish is {finish!r}; it may be {', '.join(FINISHES)}")
    arguments = row.get("chat_template_kwargs") or {}
    if not isinstance(arguments, dict):
        raise DataError("chat_template_kwargs must be an object")
    group = row.get("conversation_id")
    if group is not None and (isinstance(group, bool) or not isinstance(group, (str, int))):
        raise DataError("conversation_id must be a string or an integer")
    group = "" if group is None else str(group)
    return {
        "conversation_id": group,
        "tools": tools or None,
        "tags": tuple(tags),
        "finish": finish,
        "arguments": arguments,
    }


def _messages(row: dict, parts: dict[str, Any], form: Form) -> Any:
    if form.name == "messages":
        return parts["messages"]
    system = row.get("system")
    first = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    if form.name == "sharegpt":
        if not isinstance(parts["conversations"], list):
            raise DataError(f"{form.columns['conversations']} must be a list of turns")
        return [*first, *(_speech(turn, number) for number, turn in enumerate(parts["conversations"], 1))]
    prompt, response = parts["prompt"], parts.get("response")
    if form.name == "prompts":
        raise DataError("a prompt without an answer; let the target answer first (regenerate)")
    more = row.get("input") if form.columns["prompt"] != "input" else None
    if isinstance(prompt, str) and isinstance(more, str) and more:
        prompt = f"{prompt}\n\n{more}"  # Alpaca
    asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if form.name == "prompt":
        return [*first, *asked]
    return [*first, *asked, *(response if isinstance(response, list) else [{"role": "assistant", "content": response}])]


def _speech(turn: Any, number: int) -> dict:
    if not isinstance(turn, dict) or turn.get("from") not in SPEAKERS or not isinstance(turn.get("value"), str):
        raise DataError(f"turn {number} must be an object with a value (text) and from: {', '.join(SPEAKERS)}")
    if turn["from"] != "function_call":
        return {"role": SPEAKERS[turn["from"]], "content": turn["value"]}
    try:
        calls = json.loads(turn["value"])
    except json.JSONDecodeError as error:
        raise DataError(f"turn {number}: the function call is not JSON ({error.msg})") from error
    calls = calls if isinstance(calls, list) else [calls]
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }


def _mask(tokens: Any, mask: Any, form: Form) -> list[bool]:
    for name, values in ((form.columns["tokens"], tokens), (form.columns["mask"], mask)):
        if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
            raise DataError(f"{name} must be a list of whole numbers")
    if not tokens or len(tokens) != len(mask):
        names = " and ".join(form.columns.values())
        raise DataError(f"{names} must be as long as each other and not empty; they have {len(tokens)} and {len(mask)}")
    if min(tokens) < 0:
        raise DataError(f"{form.columns['tokens']} holds {min(tokens)}, which is no token")
    if form.columns["mask"] == "labels":
        if wrong := next((i for i, (a, b) in enumerate(zip(mask, tokens, strict=True)) if a not in (-100, b)), None):
            raise DataError(
                f"labels differs from the token at position {wrong}; it may only be -100 or the token itself"
            )
        return [value != -100 for value in mask]
    if any(value not in (0, 1) for value in mask):
        raise DataError(f"{form.columns['mask']} may hold 0 and 1 only")
    return [bool(value) for value in mask]


def _served(given: Any, messages: list[dict]) -> dict[int, tuple[list[int] | None, list[int]]]:
    """What `regenerate` noted of the server's token ids."""
    served = {}
    for one in given or ():
        ids = (one.get("prompt_ids"), one.get("answer_ids")) if isinstance(one, dict) else (None, None)
        numbers = [n for some in ids for n in some or ()]
        if not isinstance(ids[1], list) or not all(isinstance(n, int) for n in numbers):
            raise DataError("served must be a list of objects with message, prompt_ids and answer_ids")
        if one.get("message") not in range(len(messages)) or messages[one["message"]]["role"] != "assistant":
            raise DataError(f"served: message {one.get('message')!r} is no answer (they count from 0)")
        served[one["message"]] = ids
    return served


def _canonical(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
