"""Rows to rendered samples, in one process or several, and the tally of what became of each row.

Batches of rows go to the processes in order and come back in order, and everything that depends on earlier rows
(duplicates, counts, hashes, the file itself) happens in this process. So the bytes are the same for any number.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int
from transformers import PreTrainedTokenizerBase

from draftsmith.anchors import legal_anchors
from draftsmith.config import DataOptions
from draftsmith.data import held_out
from draftsmith.data.chat import Rendered, Style, check_served, render
from draftsmith.data.forms import Conversation, Form, choose_form, parse_row, read_row
from draftsmith.data.pieces import PieceEncoder
from draftsmith.data.seen import Seen
from draftsmith.data.sources import Row
from draftsmith.data.split import split, take
from draftsmith.data.template import check_arguments
from draftsmith.errors import DataError, EnvironmentFault
from draftsmith.types import Sample

ROWS = 64
"""Rows of one batch."""
CHECKED = 64
"""The first so many rows of a file are rendered in the servers' way too, and compared."""
BAD_SHOWN = 3
"""Bad rows named in the error that stops the run."""


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
        template = self.tokenizer.chat_template or ""
        return PieceEncoder(self.tokenizer, template if isinstance(template, str) else json.dumps(template))


class Part(NamedTuple):
    """One sample of a row, ready to be stored: a process that renders does all that needs no other row."""

    id: str
    tags: tuple[str, ...]
    tokens: Int[np.ndarray, " n"]
    """int32"""
    supervised: Bool[np.ndarray, " n"]
    num_supervised: int
    num_legal: int
    cut: bool
    dropped: str
    """Why it is left out; empty if it is kept."""
    digest: bytes
    """SHA-256 of all that is stored of it."""


class Outcome(NamedTuple):
    """What became of a row."""

    place: str
    number: int
    id: str = ""
    digest: bytes = b""
    """Of its content."""
    ignored: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    held_out: tuple[float, dict] | None = None
    """For a row that is kept out: its draw, and the prompt it makes."""
    bad: str = ""
    """Why it cannot be used; empty if it can."""


NUMBERS = ("rows_in", "kept", "extra", "cut", "tokens", "supervised", "legal", "longest")
COUNTERS = ("dropped", "tags", "ignored")


@dataclass
class Tally:
    """What became of the rows so far."""

    max_bad_rows: int = 0
    rows_in: int = 0
    kept: int = 0
    extra: int = 0
    """Samples beyond one per row."""
    cut: int = 0
    tokens: int = 0
    supervised: int = 0
    legal: int = 0
    longest: int = 0
    dropped: Counter = field(default_factory=Counter)
    bad: list[dict] = field(default_factory=list)
    held_out: list[tuple[float, dict]] = field(default_factory=list)
    """Of rows that are kept out."""
    tags: Counter = field(default_factory=Counter)
    ignored: Counter = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    content: bytes = bytes(32)
    """SHA-256 of the one before the last sample and of the last sample's digest: of all of them, in order."""
    seen: Seen = field(default_factory=Seen)

    @classmethod
    def restored(cls, state: dict, bad: list[dict], held_out: list, max_bad_rows: int) -> Tally:
        """The tally whose `state()` this is; `notes` come again as the rows are passed over."""
        tally = cls(max_bad_rows=max_bad_rows, bad=bad, held_out=held_out, content=bytes.fromhex(state["content"]))
        for name in COUNTERS:
            setattr(tally, name, Counter(state[name]))
        for name in NUMBERS:
            setattr(tally, name, state[name])
        return tally

    def state(self) -> dict:
        """All but `bad`, `held_out`, `notes` and `seen`, for the journal."""
        return {name: vars(self)[name] for name in NUMBERS + COUNTERS} | {"content": self.content.hex()}

    def take(self, outcome: Outcome) -> list[Part]:
        """Tallies a row; returns its samples that are kept. DataError at one bad row too many."""
        self.rows_in += 1
        self.ignored.update(outcome.ignored)
        bad = outcome.bad
        duplicate = False
        if not bad:
            duplicate, bad = self._is_duplicate(outcome.id, outcome)
        if bad:
            self._refuse(outcome, bad)
            return []
        if duplicate:
            self.dropped["exact duplicate"] += 1
            return []
        if outcome.held_out:
            self.held_out.append(outcome.held_out)
            return []
        kept = []
        self.extra += len(outcome.parts) - 1
        for part in outcome.parts:
            if part.dropped:
                self.dropped[part.dropped] += 1
                continue
            if part.id != outcome.id and (clash := self._is_duplicate(part.id, outcome)[1]):
                raise DataError(f"{outcome.place}: {clash}")
            kept.append(part)
            self._keep(part)
        return kept

    def counts(self) -> dict:
        return {
            "rows_in": self.rows_in,
            "kept": self.kept,
            "extra": self.extra,
            "dropped": dict(self.dropped),
            "bad": len(self.bad),
            "held_out": len(self.held_out),
            "cut": self.cut,
            "tokens": self.tokens,
            "supervised": self.supervised,
            "legal": self.legal,
            "longest": self.longest,
            "tags": dict(sorted(self.tags.items())),
        }

    def refuse_useless(self, source: str, min_supervised: float) -> None:
        assert self.rows_in + self.extra == self.kept + self.dropped.total() + len(self.bad) + len(self.held_out)
        if self.rows_in == 0:
            raise DataError(f"{source} holds no conversation")
        lost = [f"{count} dropped: {reason}" for reason, count in self.dropped.items()]
        lost += [f"{len(self.held_out)} held out"] if self.held_out else []
        lost += [f"{len(self.bad)} bad, the first: {self.bad[0]['reason']}"] if self.bad else []
        if self.legal == 0:
            raise DataError(
                f"{source}: no row has two supervised tokens in sequence ({'; '.join(lost) or 'none dropped'})"
            )
        if self.supervised < min_supervised * self.tokens:
            raise DataError(
                f"{source}: only {self.supervised} of {self.tokens} tokens are supervised, less than "
                f"{min_supervised:.0%}; are the answers in it? (`draftsmith regenerate` writes them; "
                "--data.min_supervised 0 if it is meant)"
            )

    def _refuse(self, outcome: Outcome, reason: str) -> None:
        self.bad.append({"row": outcome.number, "place": outcome.place, "reason": reason})
        if self.max_bad_rows == 0:
            raise DataError(f"{outcome.place}: {reason}")
        if len(self.bad) > self.max_bad_rows:
            first = "; ".join(f"{bad['place']}: {bad['reason']}" for bad in self.bad[:BAD_SHOWN])
            raise DataError(f"more than {self.max_bad_rows} bad rows (data.max_bad_rows), the first: {first}")

    def _is_duplicate(self, identifier: str, outcome: Outcome) -> tuple[bool, str]:
        """True for an exact duplicate of an earlier row; and what is wrong when only the id is the same."""
        before = self.seen.add(identifier, outcome.digest, self.rows_in)
        if before is None:
            return False, ""
        digest, row = before
        if digest != outcome.digest:
            return False, f"id {identifier!r} is row {row}'s too, whose content differs; ids must be unique"
        return row != self.rows_in, ""

    def _keep(self, part: Part) -> None:
        self.kept += 1
        self.cut += part.cut
        self.tokens += len(part.tokens)
        self.supervised += part.num_supervised
        self.legal += part.num_legal
        self.longest = max(self.longest, len(part.tokens))
        self.tags.update(part.tags)
        self.content = hashlib.sha256(self.content + part.digest).digest()


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
        held_out=prompt,
    )


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


def write_bad_rows(tally: Tally, folder: Path, report: Callable[[str], None]) -> None:
    """The report file in the prepared folder, if there is anything to report."""
    if not tally.bad:
        return
    lines = [json.dumps(bad, ensure_ascii=False) + "\n" for bad in tally.bad]
    (folder / "bad_rows.jsonl").write_bytes("".join(lines).encode("utf-8", "backslashreplace"))
    reasons = Counter(bad["reason"].split(":")[0][:80] for bad in tally.bad)
    for reason, count in reasons.most_common(5):
        report(f"{count} bad rows: {reason} (bad_rows.jsonl has them all)")
