"""Rows to rendered samples, in one process or several.

Batches of rows go to the processes in order and come back in order, and everything that depends on earlier rows
(duplicates, counts, hashes, the file itself: see `tally` and `shards`) happens in this process. So the bytes are the
same for any number.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from multiprocessing import get_context

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftsmith.anchors import legal_anchors
from draftsmith.config import DataOptions
from draftsmith.data import held_out
from draftsmith.data.chat import Rendered, Style, check_served, render, split_thought
from draftsmith.data.forms import Conversation, Form, choose_form, parse_row, read_row
from draftsmith.data.messages import is_target, normalise
from draftsmith.data.modes import find_switch, mode
from draftsmith.data.pieces import PieceEncoder
from draftsmith.data.sources import Row
from draftsmith.data.split import split, take
from draftsmith.data.tally import Outcome, Part
from draftsmith.data.template import check_arguments, template_text
from draftsmith.errors import DataError, EnvironmentFault
from draftsmith.types import Sample

ROWS = 64
"""Rows of one batch."""
CHECKED = 64
"""The first so many rows of a file are rendered in the servers' way too, and compared."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a process needs to turn rows into samples."""

    tokenizer: PreTrainedTokenizerBase
    style: Style
    form: Form
    max_length: int
    overlong: str
    """What becomes of longer samples: as `data.overlong`."""
    context: int
    """Of pieces, where they are split."""
    held_out: float
    """Share of the conversations that is kept out."""

    @cached_property
    def encoder(self) -> PieceEncoder:
        """Of this process."""
        return PieceEncoder(self.tokenizer, template_text(self.tokenizer))

    @cached_property
    def switch(self) -> str:
        """The template's argument that turns thinking on and off, if it has one."""
        return find_switch(template_text(self.tokenizer))


def outcomes(rows: Iterator[Row], job: Job, processes: int) -> Iterator[Outcome]:
    """What became of each row, in order."""
    batches = iter(lambda: list(islice(rows, ROWS)), [])
    if processes <= 1:
        return chain.from_iterable(render_rows(job, batch) for batch in batches)
    return chain.from_iterable(_in_processes(batches, job, processes))


def find_form(rows: Iterator[Row], options: DataOptions) -> tuple[Form | None, Iterator[Row]]:
    """The form that the first readable row shows, and all the rows again. None without rows."""
    read: list[Row] = []
    form, reason = None, None
    while form is None and len(read) <= options.max_bad_rows and (row := next(rows, None)) is not None:
        read.append(row)
        try:
            form = choose_form(options.form, options.columns, parse_row(row.value))
        except DataError as error:
            reason = reason or DataError(f"{row.place}: {error}")
    if form is None and reason is not None:
        raise reason
    return form, chain(read, rows)


def render_rows(job: Job, rows: Iterable[Row]) -> list[Outcome]:
    return [_render_row(job, row) for row in rows]


def _render_row(job: Job, row: Row) -> Outcome:
    try:
        conversation = read_row(parse_row(row.value), row.number, job.form)
        check_arguments(conversation.arguments)
        style = replace(job.style, arguments={**job.style.arguments, **conversation.arguments})
        job.encoder.forget()
        found = _render(job, conversation, style, check=row.number <= CHECKED)
        several = len(found) > 1
        ids = [f"{conversation.id}#{one.last + 1}" if several else conversation.id for one in found]
        tags = conversation.tags
        pieces = [piece for name, one in zip(ids, found, strict=True) for piece in _split(job, name, one)]
        parts = tuple(_part(job, name, tags, one) for name, one in pieces)
        chosen = job.held_out > 0 and (chance := held_out.draw(conversation)) < job.held_out
        prompt = (chance, held_out.prompt_row(conversation, style.arguments)) if chosen else None
    except DataError as error:
        return Outcome(place=row.place, number=row.number, bad=str(error))
    return Outcome(
        place=row.place,
        number=row.number,
        id=conversation.id,
        digest=hashlib.blake2b(conversation.content.encode(), digest_size=8).digest(),
        ignored=conversation.ignored,
        parts=parts,
        mode=_mode(job.switch, conversation, style) if job.switch and conversation.messages else "",
        held_out=prompt,
    )


def _mode(switch: str, conversation: Conversation, style: Style) -> str:
    answers = [one for one in normalise(conversation.messages, keep_reasoning=style.keep_reasoning) if is_target(one)]
    return mode(switch, style.arguments, thought=any(split_thought(one)[0] for one in answers))


def _split(job: Job, name: str, rendered: Rendered) -> list[tuple[str, Rendered]]:
    """The sample, or its pieces if it is too long and shall be split; those have ids of their own."""
    tokens, supervised, last = rendered
    if job.overlong != "split" or len(tokens) <= job.max_length:
        return [(name, rendered)]
    whole = Sample(id=name, tokens=tokens, supervised=supervised)
    pieces = [take(whole, piece) for piece in split(supervised, job.max_length, job.context)]
    nothing = [(name, Rendered(tokens[: job.max_length], supervised[: job.max_length], last))]
    return [(piece.id, Rendered(piece.tokens, piece.supervised, last)) for piece in pieces] or nothing


def _render(job: Job, row: Conversation, style: Style, *, check: bool) -> list[Rendered]:
    tokenizer = job.tokenizer
    if row.text is not None:
        ids = np.array(tokenizer(row.text, verbose=False)["input_ids"], dtype=np.int64)
        added = len(ids) - len(tokenizer(row.text, add_special_tokens=False, verbose=False)["input_ids"])
        supervised = np.arange(len(ids)) >= added  # what a server puts before a plain prompt (bos)
        return [Rendered(ids, supervised, -1)]
    if row.tokens is not None:
        if max(row.tokens) >= len(tokenizer):
            raise DataError(f"token {max(row.tokens)} is outside the tokenizer's {len(tokenizer)}")
        return [Rendered(np.array(row.tokens, dtype=np.int64), np.array(row.mask, dtype=bool), -1)]
    more = {"finish": row.finish, "served": row.served, "encode": job.encoder.encode}
    found = render(tokenizer, row.messages, style, tools=row.tools, **more)
    if check and not row.served:
        for one in found:
            check_served(tokenizer, row.messages, style, one, row.tools)
    return found


def _part(job: Job, name: str, tags: tuple[str, ...], rendered: Rendered) -> Part:
    tokens, supervised = rendered.tokens.astype(np.int32), rendered.supervised
    dropped, cut = "", len(tokens) > job.max_length
    if not supervised.any():
        dropped = "nothing supervised"
    elif cut:
        if job.overlong == "refuse":
            raise DataError(
                f"{len(tokens)} tokens, max_length is {job.max_length}; raise --data.max_length, leave the row "
                "out, or cut or split such rows with --data.overlong cut or split"
            )
        tokens, supervised = tokens[: job.max_length], supervised[: job.max_length]
        dropped = "" if supervised.any() else "nothing supervised within max_length"
    digest = hashlib.sha256(json.dumps([name, tags, len(tokens)]).encode())
    digest.update(tokens.astype("<i4").tobytes())
    digest.update(supervised.tobytes())
    return Part(
        id=name,
        tags=tags,
        tokens=tokens,
        supervised=supervised,
        num_supervised=int(supervised.sum()),
        num_legal=len(legal_anchors(supervised)),
        cut=cut and not dropped,
        dropped=dropped,
        digest=digest.digest(),
    )


_WORK: dict[str, Job] = {}
"""The job of a process of the pool, which gets it once; it holds the tokenizer."""


def _start(job: Job) -> None:
    _WORK["job"] = job


def _work(rows: list[Row]) -> list[Outcome]:
    return render_rows(_WORK["job"], rows)


def _in_processes(batches: Iterator[list[Row]], job: Job, processes: int) -> Iterator[list[Outcome]]:
    # Spawned: a fork of a process in which torch and the tokenizer have threads may hang.
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_start, initargs=(job,))
    waiting: deque[Future[list[Outcome]]] = deque()
    started = False
    try:
        for batch in batches:
            waiting.append(pool.submit(_work, batch))
            if len(waiting) >= 4 * processes:  # bounded, so that memory is
                yield waiting.popleft().result()
                started = True
        while waiting:
            yield waiting.popleft().result()
            started = True
    except BrokenProcessPool as error:
        raise EnvironmentFault(KILLED if started else f"{KILLED}; {UNGUARDED}") from error
    finally:
        pool.shutdown(cancel_futures=True)


KILLED = "a process that renders rows was killed, perhaps for want of memory"
UNGUARDED = (
    "if this is a script of your own, each process runs it once more from the top: put what it does, `prepare` "
    "included, under `if __name__ == '__main__':`, or use one process"
)


def leave_if_only_imported() -> None:
    """Ends a process that was started to render rows and calls `prepare` itself, as its main script has no guard."""
    # multiprocessing sets this while it runs the main script again in a new process.
    if vars(multiprocessing.current_process()).get("_inheriting"):
        raise SystemExit(1)
