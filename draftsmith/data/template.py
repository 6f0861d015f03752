"""A tokenizer's chat template with its arguments: texts, token ids, and what it marks as generated."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from draftsmith.config import DataOptions, EvaluationOptions
from draftsmith.errors import DataError, UserError

RESERVED = ("messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message")
RESERVED += ("tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation")
RESERVED += ("max_length", "tokenizer_kwargs", "sanitize_control_tokens")
"""Arguments of the rendering itself, which nobody may set as arguments of the template."""


def require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path or '(unnamed)'} has no chat template; use an instruct model, or "
            "put the template the model is served with as chat_template.jinja into the target's folder"
        )


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's template; if it has several by name, all of them as JSON."""
    given = tokenizer.chat_template or ""
    return given if isinstance(given, str) else json.dumps(given, sort_keys=True)


def check_arguments(arguments: dict[str, Any]) -> None:
    """DataError for an argument that is not the template's own."""
    if wrong := [name for name in arguments if name in RESERVED]:
        raise DataError(f"template argument {wrong[0]!r} belongs to the rendering and cannot be set")


def template_arguments(enable_thinking: bool | None, template_kwargs: str, table: str) -> dict[str, Any]:
    """Arguments of the chat template, from the options of that `table`. UserError if they are none, or disagree."""
    try:
        arguments = json.loads(template_kwargs or "{}")
    except json.JSONDecodeError as error:
        raise UserError(f'{table}.template_kwargs is not JSON ({error.msg}); an example: {{"a": 1}}') from error
    if not isinstance(arguments, dict):
        raise UserError(f'{table}.template_kwargs must be a JSON object, as in {{"reasoning_effort": "low"}}')
    check_arguments(arguments)
    if enable_thinking is not None and arguments.setdefault("enable_thinking", enable_thinking) != enable_thinking:
        raise UserError(f"{table}.enable_thinking and {table}.template_kwargs say different things; give one of them")
    return arguments


def chat_arguments(options: EvaluationOptions, data: DataOptions | None = None) -> dict[str, Any]:
    """Of every prompt of a run: those of the evaluation before those that the training data was rendered with."""
    own = template_arguments(options.enable_thinking, options.template_kwargs, "evaluation")
    return (template_arguments(data.enable_thinking, data.template_kwargs, "data") if data else {}) | own


class Template:
    """The chat template of `tokenizer`, given `tools` and `arguments` (enable_thinking and the like)."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: list[dict] | None,
        arguments: dict[str, Any],
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        """`encode`: gives the ids of a text as `tokenizer` does, only faster."""
        require_template(tokenizer)
        self._encode = encode
        self.tokenizer = tokenizer
        self.arguments = arguments
        self._tools: list[dict | Callable] | None = [*tools] if tools else None
        given = tokenizer.get_chat_template(None, self._tools)  # type: ignore[arg-type]
        self.marks_generated = bool(re.search(r"\{%-?\s*generation\s*-?%\}", given))

    def text(self, messages: list[dict], *, prompt: bool, **arguments: Any) -> str:
        """The messages, followed by the generation prompt if it is to be a `prompt`."""
        return self._apply(messages, add_generation_prompt=prompt, tokenize=False, **self.arguments | arguments)

    def begun(self, messages: list[dict]) -> str:
        """The messages, the last of which the target is to continue (a prefilled answer)."""
        return self._apply(messages, continue_final_message=True, tokenize=False, **self.arguments)

    def prompt_ids(self, messages: list[dict]) -> list[int]:
        """What a server would send for the messages: rendered and tokenised by transformers in one step."""
        return self._apply(messages, add_generation_prompt=True, tokenize=True, return_dict=False, **self.arguments)

    def generated(self, messages: list[dict]) -> list[tuple[int, int]]:
        """Spans of `text(messages, prompt=False)`, in characters, that the template marks {% generation %}."""
        asked = {"return_dict": True, "return_assistant_tokens_mask": True}
        more = {"return_offsets_mapping": True}
        found = self._apply(messages, tokenize=True, tokenizer_kwargs=more, **asked, **self.arguments)
        pairs = zip(found["offset_mapping"], found["assistant_masks"], strict=True)
        return [(begin, end) for (begin, end), marked in pairs if marked]

    def encode(self, text: str) -> list[int]:
        if self._encode is not None:
            return self._encode(text)
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def places(self, text: str) -> list[int]:
        """The character at which each token of `encode(text)` begins."""
        given = self.tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        return [begin for begin, _ in given["offset_mapping"]]

    def _apply(self, messages: list[dict], **more: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, tools=self._tools, **more)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            # Templates refuse what they cannot render with raise_exception, or trip over a type they did not expect.
            raise DataError(f"the chat template refuses the conversation: {error}") from error
