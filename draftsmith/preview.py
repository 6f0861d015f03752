"""What the drafter will be trained on, for a person to read: rows with their supervised tokens marked, and one block.

Text of the data reaches the terminal only escaped: control characters are spelled out, and nothing in it is taken for
markup. With `colour`, supervised text is green and context grey; without, supervised text stands in [[ ]] and no
escape code is written at all.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from draftsmith.data.dataset import PreparedDataset
from draftsmith.errors import UserError
from draftsmith.types import Sample

SUPERVISED = "green"
CONTEXT = "bright_black"
SHOWN_CONTEXT = 200
"""Tokens of an unsupervised stretch that are shown; the middle of longer ones is left out, and says so."""
TAIL = 12
"""Tokens shown of what a block sees."""


@dataclass(frozen=True, kw_only=True)
class BlockRow:
    """One block, in positions of its document."""

    anchor: int
    context_start: int
    """First token that the block sees; it sees those before `anchor`."""
    tokens: Int[np.ndarray, " slot"]
    position: Int[np.ndarray, " slot"]
    label: Int[np.ndarray, " slot"]
    weight: Float[np.ndarray, " slot"]


def statistics(dataset: PreparedDataset) -> str:
    """One line about the whole set: rows, tokens, supervised share, longest row, tags."""
    counts = dataset.manifest["counts"]
    tags = ", ".join(f"{_escape(tag)} {count}" for tag, count in counts["tags"].items()) or "none"
    return (
        f"{counts['kept']} rows, {counts['tokens']} tokens, {counts['supervised'] / counts['tokens']:.1%} supervised, "
        f"longest {counts['longest']}, tags: {tags}"
    )


def preview_rows(
    dataset: PreparedDataset, tokenizer: PreTrainedTokenizerBase, rows: int, *, colour: bool
) -> list[Text | str]:
    """The first `rows` rows, each as one item; `Text` with `colour`, else a `str` to print as it is."""
    if rows < 0:
        raise UserError(f"rows is {rows}; it must be 0 or more")
    return [_row(dataset[index], tokenizer, colour) for index in range(min(rows, len(dataset)))]


def preview_block(
    tokenizer: PreTrainedTokenizerBase, tokens: Int[np.ndarray, " n"], block: BlockRow, *, colour: bool
) -> Text | str:
    """A block of the document `tokens` as the drafter sees it: what precedes it, then a line per slot.

    A slot without weight carries no loss, so no label is shown for it.
    """
    seen = tokens[block.context_start : block.anchor]
    ending = _escape(_decode(tokenizer, seen[-TAIL:]), breaks=False)
    reach = f"{block.context_start} to {block.anchor - 1}, which end with: {ending}" if len(seen) else "none"
    view = Text()
    view.append(f"anchor at {block.anchor}; it sees tokens {reach}\n", style=CONTEXT)
    lines = [("slot", "position", "input", "label", "weight")]
    for slot in range(len(block.tokens)):
        token = int(block.tokens[slot])
        label = _name(tokenizer, int(block.label[slot])) if block.weight[slot] > 0 else "-"
        given = _name(tokenizer, token) if slot == 0 else f"mask ({token})"
        lines.append((str(slot), str(block.position[slot]), given, label, f"{block.weight[slot]:.3f}"))
    for number, line in enumerate(_aligned(lines)):
        scored = number > 0 and block.weight[number - 1] > 0
        view.append(line, style=SUPERVISED if scored else CONTEXT)
        view.append("\n")
    view.rstrip()
    return view if colour else view.plain


def _row(sample: Sample, tokenizer: PreTrainedTokenizerBase, colour: bool) -> Text | str:
    supervised = int(sample.supervised.sum())
    tags = f", tags {', '.join(map(_escape, sample.tags))}" if sample.tags else ""
    view = Text()
    view.append(f"--- {_escape(sample.id)}: {len(sample.tokens)} tokens, {supervised} supervised{tags}\n", style="bold")
    for begin, end in _runs(sample.supervised):
        if sample.supervised[begin]:
            text = _escape(_decode(tokenizer, sample.tokens[begin:end]), brackets=not colour)
            view.append(text if colour else f"[[{text}]]", style=SUPERVISED)
        else:
            view.append(_context(tokenizer, sample.tokens[begin:end], brackets=not colour), style=CONTEXT)
    return view if colour else view.plain


def _context(tokenizer: PreTrainedTokenizerBase, tokens: Int[np.ndarray, " n"], *, brackets: bool) -> str:
    if len(tokens) <= SHOWN_CONTEXT:
        return _escape(_decode(tokenizer, tokens), brackets=brackets)
    half = SHOWN_CONTEXT // 2
    first, last = (_escape(_decode(tokenizer, part), brackets=brackets) for part in (tokens[:half], tokens[-half:]))
    return f"{first}\n... {len(tokens) - 2 * half} tokens of context left out ...\n{last}"


def _runs(supervised: np.ndarray) -> list[tuple[int, int]]:
    """Begin and end of the stretches that are supervised throughout or not at all."""
    edges = np.flatnonzero(np.diff(supervised)) + 1
    bounds = [0, *edges.tolist(), len(supervised)]
    return list(zip(bounds, bounds[1:], strict=False))


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: list[int] | np.ndarray) -> str:
    text = tokenizer.decode(list(map(int, tokens)), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def _name(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token on one line, with its id, which may lie outside the vocabulary (a mask token, say)."""
    text = _decode(tokenizer, [token]) if token < len(tokenizer) else ""
    return f"'{_escape(text, breaks=False)}' ({token})"


def _escape(text: str, *, brackets: bool = False, breaks: bool = True) -> str:
    """Text that only shows: line feeds as \\n (and a line break, with `breaks`), other controls by number.

    Controls are all of Unicode's "other" and line separators: escape codes, and the marks that turn or hide text.
    With `brackets`, [[ and ]] of the text are told apart from those that mark supervision.
    """
    shown = []
    for character in text:
        if character == "\n":
            shown.append("\\n\n" if breaks else "\\n")
        elif unicodedata.category(character)[0] == "C" or unicodedata.category(character) in ("Zl", "Zp"):
            shown.append(character.encode("unicode_escape").decode())
        else:
            shown.append(character)
    text = "".join(shown)
    return text.replace("[[", "\\[\\[").replace("]]", "\\]\\]") if brackets else text


def _aligned(lines: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell + " " * (width - _width(cell)) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _width(text: str) -> int:
    return Text(text).cell_len
