"""Conversations: read from JSONL, and rendered to tokens of which some are the target's own.

The tokenizer's own chat template renders everything. For an assistant turn at message i,

    prompt  = ids(messages[:i], with generation prompt)     what a server would have been sent
    through = ids(messages[:i + 1])                         the same, and the answer

`prompt` must be a prefix of `through`. The tokens after it, up to and including the last end-of-turn token, are the
turn's: the target wrote them. Template text after the end-of-turn token (a newline, as a rule) it did not write. So
role markers quoted by a user are never supervised, whatever they look like, and a special token quoted in an answer
does not end it early: no text is searched.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from jaxtyping import Bool, Int
from transformers import PreTrainedTokenizerBase

from draftsmith.data.prompts import content_id
from draftsmith.errors import DataError, UserError

FINISHES = ("stop", "length", "tool_calls")
"""How an answer may have ended; `length`: cut by the token limit, so the target never wrote its end-of-turn token."""

ROLES = ("system", "user", "assistant", "tool")

FOLLOWERS = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
"""Roles that may come next; None is the beginning."""


ROW_KEYS = ("messages", "id", "tags", "finish", "tools")
"""What a line of the JSONL may hold; other keys are passed over, and counted."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One line of the JSONL, checked."""

    line: int
    """1-based."""
    id: str
    """As given, or from the messages alone, so that it does not depend on the line's place."""
    messages: list[dict]
    tools: list[dict] | None
    tags: tuple[str, ...]
    finish: str
    content: str
    """All of the above save `line`, as canonical JSON: equal for exact duplicates only."""
    ignored: tuple[str, ...]
    """Keys that mean nothing here."""


class _Turn(NamedTuple):
    name: str
    start: int
    """Tokens of the prompt."""
    end: int
    """One past the last token the target wrote."""
    through: list[int]


def read_conversations(path: Path) -> Iterator[Conversation]:
    """The conversations of a JSONL file (gzip if its name ends with .gz), in order. Blank lines are passed over.

    DataError with file, line and reason at the first line that is not a conversation.
    """
    opened = gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")
    line = 0
    with opened as stream:
        try:
            for line, raw in enumerate(stream, 1):
                if raw.strip():
                    yield _conversation(line, raw)
        except DataError as error:
            raise DataError(f"{path}, line {line}: {error}") from error
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path}, after line {line}: damaged gzip file ({error})") from error


def _conversation(line: int, raw: bytes) -> Conversation:
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 ({error.reason} at byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict) or "messages" not in row:
        found = f"keys {', '.join(row) or 'none'}" if isinstance(row, dict) else type(row).__name__
        raise DataError(f'expected an object {{"messages": [{{"role": ..., "content": ...}}, ...]}}, found {found}')
    messages, tools, tags, finish = row["messages"], row.get("tools"), row.get("tags"), row.get("finish")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError("tools must be a list of objects")
    tags = [] if tags is None else tags
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise DataError("tags must be a list of strings")
    finish = "stop" if finish is None else finish
    if finish not in FINISHES:
        raise DataError(f"finish is {finish!r}; it may be {', '.join(FINISHES)}")
    check_messages(messages)
    given = row.get("id")
    if given is not None and (isinstance(given, bool) or not isinstance(given, (str, int)) or given == ""):
        raise DataError("id must be a string or an integer")
    identifier = content_id(messages) if given is None else str(given)
    content = _canonical([identifier, messages, tools, tags, finish])
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError("half of a surrogate pair (a \\ud8.. or \\udc.. escape by itself) is not text") from error
    return Conversation(
        line=line,
        id=identifier,
        messages=messages,
        tools=tools,
        tags=tuple(tags),
        finish=finish,
        content=content,
        ignored=tuple(key for key in row if key not in ROW_KEYS),
    )


def _canonical(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Any,
    *,
    tools: list[dict] | None = None,
    finish: str = "stop",
    end_ids: Sequence[int] | None = None,
) -> tuple[Int[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """Tokens of a conversation (int64), and True where the target would have produced the token.

    `finish` says how the last answer ended (see FINISHES). `end_ids` are the end-of-turn tokens, the tokenizer's eos
    unless given; a turn without any counts as a whole.

    UserError without a chat template; DataError when the messages, or what the template makes of them, cannot be used.
    """
    _require_template(tokenizer)
    check_messages(messages)
    if finish not in FINISHES:
        raise DataError(f"finish is {finish!r}; it may be {', '.join(FINISHES)}")
    ends = _end_ids(tokenizer, end_ids)
    cuts: list[int] = []
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    turns = [_turn(tokenizer, messages, tools, index, cuts, ends) for index in answers]

    # The last answer's rendering is the whole one, save when a user or tool turn follows it.
    whole = turns[-1].through
    if answers[-1] + 1 < len(messages):
        whole = _encode(tokenizer, _text(tokenizer, messages, tools, prompt=False), cuts)
    tokens = np.array(whole, dtype=np.int64)
    supervised = np.zeros(len(whole), dtype=bool)
    for turn in turns:
        if whole[: turn.end] != turn.through[: turn.end]:
            raise _not_a_prefix(turn.name, "a later turn changes how it, or what precedes it, is rendered")
        supervised[turn.start : turn.end] = True
    if finish == "length":
        last = turns[-1]
        if whole[last.end - 1] not in ends or last.end == last.start:
            raise DataError(
                f"{last.name} has finish 'length', but the template renders no end-of-turn token that could be left "
                "out; drop such rows (regenerate with unfinished 'drop')"
            )
        supervised[last.end - 1] = False
    return tokens, supervised


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Any, *, tools: list[dict] | None = None
) -> Int[np.ndarray, " n"]:
    """Tokens (int64) that ask the target for its next answer: the messages, then the generation prompt.

    UserError without a chat template; DataError when the messages are wrong or do not wait for an answer.
    """
    _require_template(tokenizer)
    _check_order(messages)
    if messages[-1]["role"] not in ("user", "tool"):
        raise DataError(f"a prompt ends with a user or tool message, not with {messages[-1]['role']!r}")
    return np.array(_encode(tokenizer, _text(tokenizer, messages, tools, prompt=True), ()), dtype=np.int64)


def check_messages(messages: Any) -> None:
    """DataError, with the reason, unless these are well-formed messages in order with at least one answer."""
    _check_order(messages)
    if all(message["role"] != "assistant" for message in messages):
        raise DataError("no assistant message, so nothing to learn from; let the target answer first (regenerate)")


def _check_order(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise DataError("messages must be a list with at least one message")
    previous = None
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise DataError(f"message {number} must be an object whose role is one of {', '.join(ROLES)}")
        role, content = message["role"], message.get("content")
        if role not in FOLLOWERS[previous]:
            place = "at the beginning" if previous is None else f"after {previous!r}"
            allowed = " or ".join(FOLLOWERS[previous])
            raise DataError(f"roles out of order: message {number} is {role!r} {place}, where only {allowed} may come")
        calls_only = role == "assistant" and content is None and message.get("tool_calls")
        if not isinstance(content, str) and not calls_only:
            raise DataError(f"message {number} ({role}) has no text: content must be a string")
        previous = role


def _require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path or '(unnamed)'} has no chat template; use an instruct model, or "
            "put the template the model is served with as chat_template.jinja into the target's folder"
        )


def _end_ids(tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int] | None) -> frozenset[int]:
    if end_ids is not None:
        return frozenset(end_ids)
    eos = tokenizer.eos_token_id
    return frozenset([eos]) if isinstance(eos, int) else frozenset()


def _turn(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict],
    tools: list[dict] | None,
    index: int,
    cuts: list[int],
    ends: frozenset[int],
) -> _Turn:
    """The answer at message `index`. Adds to `cuts` where its beginning must be a token boundary and is not."""
    name = f"message {index + 1} (assistant)"
    prompt_text = _text(tokenizer, messages[:index], tools, prompt=True)
    through_text = _text(tokenizer, messages[: index + 1], tools, prompt=False)
    if not through_text.startswith(prompt_text):
        raise _not_a_prefix(name, "with its answer the prompt is rendered in another way than without")
    prompt = _encode(tokenizer, prompt_text, cuts)
    through = _encode(tokenizer, through_text, cuts)
    if through[: len(prompt)] != prompt:
        # One token joins the prompt's last character with the answer's first (two newlines, say). The target was sent
        # the prompt's tokens and wrote the rest, so the text is encoded in two pieces, if they spell the same.
        joined, cuts[:] = through, [*cuts, len(prompt_text)]
        through = _encode(tokenizer, through_text, cuts)
        if tokenizer.decode(through) != tokenizer.decode(joined):
            raise _not_a_prefix(name, "the tokenizer joins the answer to its prompt")
    start = len(prompt)
    written = [place for place in range(start, len(through)) if through[place] in ends]
    return _Turn(name, start, written[-1] + 1 if written else len(through), through)


def _not_a_prefix(name: str, why: str) -> DataError:
    return DataError(
        f"{name}: what comes before it is not a prefix of the rendered conversation ({why}). Chat templates that "
        "rewrite earlier turns are not supported yet; conversations with a single answer may work"
    )


def _text(tokenizer: PreTrainedTokenizerBase, messages: list[dict], tools: list[dict] | None, *, prompt: bool) -> str:
    given: list[dict | Callable] | None = [*tools] if tools else None
    try:
        text = tokenizer.apply_chat_template(messages, tools=given, tokenize=False, add_generation_prompt=prompt)
    except (jinja2.TemplateError, TypeError) as error:
        # Templates refuse what they cannot render with raise_exception, or trip over a type they did not expect.
        raise DataError(f"the chat template refuses the conversation: {error}") from error
    assert isinstance(text, str)
    return text


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, cuts: Sequence[int]) -> list[int]:
    """Token ids of `text`, encoded in pieces that end at `cuts` (ascending character positions)."""
    bounds = [0, *(cut for cut in cuts if cut < len(text)), len(text)]
    ids: list[int] = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        ids += tokenizer(text[begin:end], add_special_tokens=False, verbose=False)["input_ids"]
    return ids
