"""What the drafter will be trained on, for a person to read: rows with their supervised tokens marked, and one block.

Text of the data reaches the terminal only escaped: control characters are spelled out, and nothing in it is taken for
markup. With `colour`, supervised text is green and context grey; without, supervised text stands in [[ ]] and no
escape code is written at all.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
import unicodedata
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from draftsmith.data.mixture import TrainingSet, describe
from draftsmith.data.statistics import Statistics, visits_by_tag
from draftsmith.errors import UserError
from draftsmith.packing import Schedule
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


def statistics(dataset: TrainingSet) -> str:
    """One line about all rows: how many, tokens, supervised share, longest row, tags."""
    counts = dataset.counts
    return (
        f"{counts['kept']} rows, {counts['tokens']} tokens, {counts['supervised'] / counts['tokens']:.1%} supervised, "
        f"longest {counts['longest']}, tags: {_listed(counts['tags'])}"
    )


def mixture(dataset: TrainingSet, schedule: Schedule) -> list[str]:
    """A line for each set of a mixture, and what the first epoch sees of each tag; nothing of a single set."""
    lines = [_escape(line, breaks=False) for line in describe(dataset, schedule)]
    return [*lines, f"tags in the first epoch: {_listed(visits_by_tag(dataset, schedule))}"] if lines else []


def _listed(tags: dict[str, int]) -> str:
    return ", ".join(f"{_escape(tag)} {count}" for tag, count in tags.items()) or "none"


def preview_rows(
    dataset: TrainingSet, tokenizer: PreTrainedTokenizerBase, rows: int, *, colour: bool
) -> list[Text | str]:
    """`rows` rows, from all sets in turn, each as one item; `Text` with `colour`, else a `str` to print as it is."""
    if rows < 0:
        raise UserError(f"rows is {rows}; it must be 0 or more")
    return [_row(dataset[row], origin(dataset, row), tokenizer, colour) for row in dataset.first_rows(rows)]


def origin(dataset: TrainingSet, row: int) -> str:
    """The name of the row's set, if there are several."""
    return dataset.part_of(row).name if len(dataset.parts) > 1 else ""


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


def _head(sample: Sample, origin: str) -> str:
    tags = f", tags {', '.join(sample.tags)}" if sample.tags else ""
    of = f", of {origin}" if origin else ""
    return f"{sample.id}: {len(sample.tokens)} tokens, {int(sample.supervised.sum())} supervised{tags}{of}"


def _row(sample: Sample, origin: str, tokenizer: PreTrainedTokenizerBase, colour: bool) -> Text | str:
    view = Text()
    view.append(f"--- {_escape(_head(sample, origin), breaks=False)}\n", style="bold")
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


STYLE = """
:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:.5rem 0}td,th{padding:.1rem .8rem .1rem 0;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.3rem 0}
.row{border-top:1px solid #8888;padding:.5rem 0}.c{color:#777}.s{color:#0a7d2c;background:#0a7d2c1a}
.x{color:#c01c28;background:#c01c281a}.s u{text-decoration-thickness:2px}
@media(prefers-color-scheme:dark){.s{color:#5fd38a}.x{color:#ff7b84}.c{color:#999}}
"""


@dataclass(frozen=True, kw_only=True)
class PageRow:
    """One row of the page."""

    sample: Sample
    anchors: list[int]
    limit: int
    """Tokens from here on are cut when packs are made."""
    origin: str = ""
    """The set that it is of, if there are several."""


def preview_page(
    title: str, figures: Statistics, rows: list[PageRow], block: str, tokenizer: PreTrainedTokenizerBase
) -> str:
    """A page that needs nothing else: no script, no other file, and every text of the data escaped."""
    allowed = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{allowed}'"
    shown = "\n".join(_page_row(row, tokenizer) for row in rows)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{_html(title)}</title>'
        f"<style>{STYLE}</style></head><body>\n<h1>{_html(title)}</h1>\n{_figures(figures)}"
        f'<h2>Rows</h2>\n<p><span class="s">Supervised</span> (<u>anchors</u> of the first epoch underlined), '
        f'<span class="c">context</span>, <span class="x">cut</span>.</p>\n{shown}\n'
        f"<h2>One block, as the drafter sees it</h2>\n<pre>{_html(block)}</pre>\n</body></html>\n"
    )


def write_page(path: str, page: str) -> None:
    """The page at `path`, all of it or nothing."""
    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise UserError(f"html {path!r}: name a file in a folder that exists")
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(page)
    os.replace(partial, path)


def _figures(figures: Statistics) -> str:
    def table(title: str, lines: list[tuple[str, str]]) -> str:
        cells = "".join(f'<tr><td>{_html(name)}</td><td class="n">{_html(value)}</td></tr>' for name, value in lines)
        return f"<h2>{_html(title)}</h2>\n<table>{cells}</table>\n"

    quantiles = [f"{quantile:.0%}" for quantile in figures.lengths]
    whole = [
        ("rows", f"{figures.rows:,}"),
        ("tokens", f"{figures.tokens:,}"),
        ("supervised", f"{figures.supervised:.1%}"),
        ("same tokens as another row", f"{figures.duplicates:,} of {figures.read:,} rows read"),
        ("packs: tokens filled", f"{figures.token_fill:.1%}"),
        ("packs: anchor slots filled", f"{figures.anchor_fill:.1%}"),
    ]
    most = max(count for _, count in figures.histogram)
    bars = "".join(
        f'<tr><td class="n">&le; {bound:,}</td><td class="n">{count:,}</td>'
        f'<td><svg width="320" height="12"><rect fill="#0a7d2c" width="{320 * count / most:.0f}" height="12"/></svg>'
        f"</td></tr>"
        for bound, count in figures.histogram
    )
    lengths = list(zip(quantiles, (f"{length:,}" for length in figures.lengths.values()), strict=True))
    shares = list(zip(quantiles, (f"{share:.1%}" for share in figures.supervised_shares.values()), strict=True))
    tags = [(tag, f"{count:,}") for tag, count in figures.tags.items()] or [("none", "")]
    visits = [(tag, f"{count:,}") for tag, count in figures.tag_visits.items()]
    modes = [(mode, f"{count:,}") for mode, count in figures.modes.items()]
    sets = [
        (
            share.name,
            f"{share.rows:,} rows, {share.weight:g} times an epoch: {share.visits:,} visits in the first, "
            f"{share.tokens:.1%} of its tokens",
        )
        for share in figures.shares
    ]
    found = [(name, f"{share:.1%}") for name, share in figures.scripts.items()] or [("none", "")]
    return (
        table("The set", whole)
        + (table("The mixture", sets) if sets else "")
        + table("Tokens of a row, by quantile", lengths)
        + f"<h2>Rows by length</h2>\n<table>{bars}</table>\n"
        + table(f"Supervised share of a row, by quantile ({figures.read:,} rows)", shares)
        + table("Tags", tags)
        + (table("Tags in the first epoch", visits) if visits else "")
        + (table("Thinking", modes) if modes else "")
        + table(f"Scripts of the supervised letters ({figures.decoded:,} rows)", found)
    )


def _page_row(row: PageRow, tokenizer: PreTrainedTokenizerBase) -> str:
    sample, anchors = row.sample, set(row.anchors)
    kinds = np.where(sample.supervised, 1, 0)
    kinds[row.limit :] = 2
    marks = kinds * 2 + np.isin(np.arange(len(kinds)), list(anchors))
    edges = [0, *(np.flatnonzero(np.diff(marks)) + 1).tolist(), len(marks)]
    pieces, begin = [], 0
    for end in edges[1:]:
        text = _decode(tokenizer, sample.tokens[begin:end])
        if text.endswith("\ufffd") and end < len(kinds) and kinds[end] == kinds[begin]:
            continue  # an anchor amid the bytes of one character: they are shown together
        text = _html(_escape(text))
        if kinds[begin] == 0:
            text = _html(_context(tokenizer, sample.tokens[begin:end], brackets=False))
        text = f"<u>{text}</u>" if begin in anchors and kinds[begin] == 1 else text
        pieces.append(f'<span class="{"csx"[kinds[begin]]}">{text}</span>')
        begin = end
    head = _head(sample, row.origin)
    return f'<div class="row"><b>{_html(_escape(head, breaks=False))}</b><pre>{"".join(pieces)}</pre></div>'


def _html(text: str) -> str:
    return html.escape(_escape_marks(text), quote=True)


def _escape_marks(text: str) -> str:
    """Controls and marks that turn or hide text, by number; line breaks stay."""
    hidden = {c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")}
    return "".join(c.encode("unicode_escape").decode() if c in hidden else c for c in text)
