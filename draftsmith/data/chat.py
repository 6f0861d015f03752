"""Conversations rendered to tokens of which some are the target's own, found from the rendering itself.

The tokenizer's own chat template renders everything. For an assistant turn at message i,

    prompt  = ids(messages[:i], with generation prompt)     what a server would have been sent
    through = ids(messages[:i + 1])                         the same, and the answer

`prompt` must be a prefix of `through`. The tokens after it, up to and including the last end-of-turn token, are the
turn's: the target wrote them. Template text after the end-of-turn token (a newline, as a rule) it did not write, nor
an empty think block that the template puts before an answer without reasoning. A template with {% generation %} tags
says itself which of these tokens are generated. So role markers quoted by a user are never supervised, whatever they
look like, and a special token quoted in an answer does not end it early: no text is searched.

Many templates rewrite earlier turns (they drop old reasoning, say). What a later turn was asked with does then not
begin with what an earlier one was. Turns share a sample as long as the earlier one, as it was written, is a prefix of
the later one's prompt; where it is not, a new sample begins. Each sample's tokens before a supervised stretch are thus
exactly what a server was sent when the stretch was written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int
from transformers import PreTrainedTokenizerBase

from draftsmith.data.messages import FINISHES, REASONING_KEYS, check_messages, check_order, is_target, normalise
from draftsmith.data.prompts import Prompt
from draftsmith.data.template import Template, check_arguments
from draftsmith.errors import DataError

EMPTY_THOUGHT = re.compile(r"\s*(?:<think>\s*</think>|\[THINK\]\s*\[/THINK\]|<\|channel>thought\s*<channel\|>)\s*")
"""What templates put where reasoning would stand, when there is none."""
OPEN_THOUGHT = re.compile(r"(<think>|\[THINK\])\s*\Z")
"""How a prompt ends that makes the target think."""
CLOSED_BY = {"<think>": "</think>", "[THINK]": "[/THINK]"}


@dataclass(frozen=True, kw_only=True)
class Style:
    """How conversations become tokens; together with the tokenizer it decides every id."""

    end_ids: frozenset[int]
    """Tokens that end the target's turn; a turn without any counts as a whole."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of the chat template: enable_thinking and the like."""
    train_on: Literal["all", "last"] = "all"
    """Supervise every answer, or only the last of a conversation."""
    keep_reasoning: bool = True


class Rendered(NamedTuple):
    """One sample of a conversation."""

    tokens: Int[np.ndarray, " n"]
    """int64"""
    supervised: Bool[np.ndarray, " n"]
    """True where the target would have produced the token."""
    last: int
    """The last answer in it, as an index of the messages."""


class _Turn(NamedTuple):
    name: str
    tokens: list[int]
    """Of the prompt and the answer, and what the template writes after it."""
    start: int
    """Tokens of the prompt."""
    end: int
    """One past the last token the target wrote."""
    written: list[bool]
    """For the tokens from start to end: did the target write it?"""
    ended: bool
    """An end-of-turn token is the last of them."""
    index: int


def default_style(tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int] | None = None) -> Style:
    """All answers, no arguments, and the tokenizer's eos as the end token unless others are given."""
    if end_ids is None:
        eos = tokenizer.eos_token_id
        end_ids = [eos] if isinstance(eos, int) else []
    return Style(end_ids=frozenset(end_ids))


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Any,
    style: Style,
    *,
    tools: list[dict] | None = None,
    finish: str = "stop",
    served: Mapping[int, tuple[list[int] | None, list[int]]] | None = None,
    encode: Callable[[str], list[int]] | None = None,
) -> list[Rendered]:
    """The samples of a conversation: one, or several where the template rewrites what came before.

    `finish` says how the last answer ended (see FINISHES). `served`: by message, the ids of the prompt and of the
    answer as a server gave them; a prompt that we render otherwise is refused, the answer's ids are taken as they are.
    `encode`: the tokenizer's ids of a text, if there is a faster way to them (`PieceEncoder`).

    UserError without a chat template; DataError when the messages, or what the template makes of them, cannot be used.
    """
    template = Template(tokenizer, tools, style.arguments, encode)
    check_messages(messages)
    if finish not in FINISHES:
        raise DataError(f"finish is {finish!r}; it may be {', '.join(FINISHES)}")
    answers = [index for index, message in enumerate(messages) if is_target(message)]
    messages = normalise(messages, keep_reasoning=style.keep_reasoning)
    groups: list[list[_Turn]] = []
    for index in answers[-1:] if style.train_on == "last" else answers:
        turn = _turn(template, messages, index, style.end_ids)
        if served and index in served:
            turn = _as_served(template, turn, *served[index], style.end_ids)
        if finish == "length" and index == answers[-1] and not (served and index in served):
            turn = _without_end(turn)
        if groups and _continues(groups[-1][-1], turn):
            groups[-1].append(turn)
        else:
            groups.append([turn])
    wholes = [group[-1].tokens for group in groups]
    if answers[-1] + 1 < len(messages):  # a question without an answer: context, if it changes nothing before it
        whole, last = template.encode(template.text(messages, prompt=False)), groups[-1][-1]
        if whole[: last.end] == last.tokens[: last.end]:
            wholes[-1] = whole
    return [_join(group, whole, style.end_ids) for group, whole in zip(groups, wholes, strict=True)]


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Any,
    *,
    tools: list[dict] | None = None,
    arguments: dict[str, Any] | None = None,
) -> Int[np.ndarray, " n"]:
    """Tokens (int64) that ask the target for its next answer: the messages, then the generation prompt.

    UserError without a chat template; DataError when the messages are wrong or do not wait for an answer.
    """
    template = Template(tokenizer, tools, arguments or {})
    check_order(messages)
    if messages[-1]["role"] not in ("user", "tool"):
        raise DataError(f"a prompt ends with a user or tool message, not with {messages[-1]['role']!r}")
    return np.array(template.encode(template.text(normalise(messages), prompt=True)), dtype=np.int64)


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, arguments: Mapping[str, Any] | None = None
) -> Int[np.ndarray, " n"]:
    """A row of a file of prompts, with its own tools, and its own template arguments before `arguments`."""
    together = {**(arguments or {}), **prompt.arguments}
    try:
        check_arguments(together)
        tools = list(prompt.tools) or None
        return render_prompt(tokenizer, list(prompt.messages), tools=tools, arguments=together)
    except DataError as error:
        raise DataError(f"Prompt {prompt.id!r}: {error}") from error


def check_served(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], style: Style, rendered: Rendered, tools: list[dict] | None
) -> None:
    """DataError unless the sample begins with the ids that a server computes for its last answer's prompt."""
    template = Template(tokenizer, tools, style.arguments)
    normal = normalise(messages, keep_reasoning=style.keep_reasoning)
    asked = template.prompt_ids(normal[: rendered.last])
    if "prefill" not in normal[rendered.last] and rendered.tokens[: len(asked)].tolist() != asked:
        raise _not_a_prefix(f"message {rendered.last + 1} (assistant)", "a server computes other ids for its prompt")


def _turn(template: Template, messages: list[dict], index: int, ends: frozenset[int]) -> _Turn:
    """The answer at message `index`."""
    name, message = f"message {index + 1} (assistant)", messages[index]
    prompt_text = _prompt_text(template, messages, index, name)
    through_text = template.text(messages[: index + 1], prompt=False)
    rewritten = not through_text.startswith(prompt_text)
    if rewritten:
        answer = _answer_elsewhere(template, messages, index)
        if answer and through_text.endswith(answer):
            through_text = prompt_text + answer
        else:
            through_text = _with_thought(name, message, prompt_text, through_text)
    prompt_text = _with_empty_thought(template, messages, index, prompt_text, through_text)
    _check_whole(name, message, through_text[len(prompt_text) :])
    prompt, through = template.encode(prompt_text), template.encode(through_text)
    pieces = [through_text]
    if through[: len(prompt)] != prompt:
        # One token joins the prompt's last character with the answer's first (two newlines, say). The target was sent
        # the prompt's tokens and wrote the rest, so the text is encoded in two pieces, if they spell the same.
        joined, pieces = through, [prompt_text, through_text[len(prompt_text) :]]
        through = prompt + template.encode(pieces[1])
        if template.tokenizer.decode(through) != template.tokenizer.decode(joined):
            raise _not_a_prefix(name, "the tokenizer joins the answer to its prompt")
    start = len(prompt)
    last = next((place for place in range(len(through) - 1, start - 1, -1) if through[place] in ends), None)
    end = len(through) if last is None else last + 1
    written = [True] * (end - start)
    if template.marks_generated and not rewritten:
        written = _marked(template, messages[: index + 1], pieces)[start:end]
        written[-1:] = [written[-1] or last is not None]  # some tags leave out the end-of-turn token
        if not any(written):
            raise DataError(f"{name}: the template's generation tags mark none of its tokens")
    return _Turn(name, through, start, end, written, last is not None, index)


def _prompt_text(template: Template, messages: list[dict], index: int, name: str) -> str:
    prefill = messages[index].get("prefill")
    if prefill is None:
        return template.text(messages[:index], prompt=True)
    if not isinstance(prefill, str) or not prefill or not messages[index]["content"].startswith(prefill):
        raise DataError(f"{name}: prefill must be the beginning of its content")
    return template.begun([*messages[:index], {"role": "assistant", "content": prefill}])


def _answer_elsewhere(template: Template, messages: list[dict], index: int) -> str:
    """The answer's text, from a conversation without earlier reasoning; empty if it shows none.

    Some templates keep the reasoning of tool calls in the prompt of the answer, and drop it in the finished turn.
    """
    before = [{k: v for k, v in one.items() if k not in REASONING_KEYS} for one in messages[:index]]
    prompt = template.text(before, prompt=True)
    through = template.text([*before, messages[index]], prompt=False)
    return through[len(prompt) :] if through.startswith(prompt) else ""


def _with_thought(name: str, message: dict, prompt: str, through: str) -> str:
    """Prompt and answer where the prompt opens a think block that the template leaves out of a finished turn."""
    opened = OPEN_THOUGHT.search(prompt)
    if opened is None or not through.startswith(prompt[: opened.start()]):
        raise _not_a_prefix(name, "with its answer the prompt is rendered in another way than without")
    thought, _ = split_thought(message)
    if not thought:
        raise DataError(
            f"{name} has no reasoning, but the template's prompt makes the target think; give the rows' "
            "reasoning_content, or render without thinking (--data.enable_thinking False, or --data.template_kwargs)"
        )
    mark = CLOSED_BY[opened[1]]
    rest = through[opened.start() :].removeprefix(mark).lstrip("\n")
    return f"{prompt}{thought.strip()}\n{mark}\n\n{rest}"


def _with_empty_thought(template: Template, messages: list[dict], index: int, prompt: str, through: str) -> str:
    """The prompt and, if the answer has no reasoning, the empty think block the template wrote in its place."""
    if split_thought(messages[index])[0] or "prefill" in messages[index]:
        return prompt
    opened = OPEN_THOUGHT.search(prompt)
    empty = EMPTY_THOUGHT.match(through, opened.start() if opened else len(prompt))
    if empty is None or empty.end() <= len(prompt):
        return prompt
    # Servers send it as a part of the prompt when thinking is off; that tells whose the white space after it is.
    off = template.text(messages[:index], prompt=True, enable_thinking=False)
    return off if through.startswith(off) and len(off) > len(prompt) else through[: empty.end()]


def split_thought(message: dict) -> tuple[str, str]:
    """An answer's reasoning and the rest of it, wherever the reasoning stands."""
    content = message["content"]
    if message.get("reasoning_content"):
        return message["reasoning_content"], content
    for opening, closing in CLOSED_BY.items():
        before, mark, after = content.partition(closing)
        if mark and before.lstrip().startswith(opening) and (thought := before.lstrip()[len(opening) :].strip()):
            return thought, after
    return "", content


def _check_whole(name: str, message: dict, answer: str) -> None:
    """DataError if the template leaves out a part of the answer: the target wrote it, so it would be missed."""
    thought, content = split_thought(message)
    content = content.removeprefix(message.get("prefill", ""))
    if thought and thought.strip() not in answer:
        raise DataError(
            f"{name}: the template leaves out its reasoning, which the target wrote; if it did not, leave it out of "
            "the rows (--data.reasoning drop)"
        )
    calls = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    if missing := [call for call in calls if call not in answer]:
        raise DataError(f"{name}: the template leaves out its call of {missing[0]!r}")
    if not calls and content.strip() not in answer:
        raise DataError(f"{name}: the template changes its content, so what the target wrote is not known")


def _marked(template: Template, messages: list[dict], pieces: list[str]) -> list[bool]:
    """For each token of the pieces: does it begin within generation tags?"""
    spans = template.generated(messages)
    places: list[int] = []
    for number, piece in enumerate(pieces):
        places += [place + len("".join(pieces[:number])) for place in template.places(piece)]
    inside = np.zeros(len("".join(pieces)) + 1, dtype=bool)
    for begin, end in spans:
        inside[begin:end] = True
    return inside[places].tolist()


def _as_served(
    template: Template, turn: _Turn, prompt: list[int] | None, answer: list[int], ends: frozenset[int]
) -> _Turn:
    """The turn with the ids the server gave for it."""
    ours = turn.tokens[: turn.start]
    if prompt is not None and prompt + answer[: len(ours) - len(prompt)] == ours and len(prompt) < len(ours):
        # It wrote itself what we took for an empty think block of the template.
        tokens, size = [*prompt, *answer], len(answer)
        ended = answer[-1] in ends
        return turn._replace(tokens=tokens, start=len(prompt), end=len(tokens), written=[True] * size, ended=ended)
    if prompt is not None and prompt != ours:
        same = next(
            (i for i, (a, b) in enumerate(zip(ours, prompt, strict=False)) if a != b), min(len(ours), len(prompt))
        )
        shown = [template.tokenizer.decode(ids[same : same + 4]) for ids in (ours, prompt)]
        raise DataError(
            f"{turn.name}: the server's prompt differs from ours at token {same}: ours {shown[0]!r}, its {shown[1]!r}; "
            "is it served with other template arguments?"
        )
    if turn.tokens[turn.start : turn.end] == answer:
        return turn
    tokens = [*ours, *answer]
    ended = bool(answer) and answer[-1] in ends
    return turn._replace(tokens=tokens, end=len(tokens), written=[True] * len(answer), ended=ended)


def _without_end(turn: _Turn) -> _Turn:
    """An answer that the token limit cut: the end-of-turn token is the template's."""
    if not turn.ended:
        raise DataError(
            f"{turn.name} has finish 'length', but the template renders no end-of-turn token that could be left out; "
            "drop such rows (regenerate with unfinished 'drop')"
        )
    return turn._replace(end=turn.end - 1, written=turn.written[:-1])


def _continues(before: _Turn, turn: _Turn) -> bool:
    """True if the earlier answer, as it was written, is a part of what the later one was asked with."""
    return turn.tokens[: before.end] == before.tokens[: before.end]


def _join(turns: list[_Turn], whole: list[int], ends: frozenset[int]) -> Rendered:
    tokens = np.array(whole, dtype=np.int64)
    supervised = np.zeros(len(whole), dtype=bool)
    for turn in turns:
        supervised[turn.start : turn.end] = turn.written
        if not turn.ended and turn.end < len(whole) and whole[turn.end] in ends:
            supervised[turn.end] = True  # the next turn's marker ends this one (GLM)
    return Rendered(tokens, supervised, turns[-1].index)


def _not_a_prefix(name: str, why: str) -> DataError:
    return DataError(
        f"{name}: what comes before it is not a prefix of the rendered conversation ({why}), so what the target was "
        "sent is not known; correct the chat template or the template arguments"
    )
