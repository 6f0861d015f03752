"""What became of each row, and the sums over all rows so far: counts, duplicates, bad rows, the hash of the content."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from draftsmith.data.seen import Seen
from draftsmith.errors import DataError

BAD_SHOWN = 3
"""Bad rows named in the error that stops the run."""


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
    mode: str = ""
    """With thinking or without, if the template knows both."""
    held_out: tuple[float, dict] | None = None
    """For a row that is kept out: its draw, and the prompt it makes."""
    bad: str = ""
    """Why it cannot be used; empty if it can."""


NUMBERS = ("rows_in", "kept", "extra", "cut", "tokens", "supervised", "legal", "longest")
COUNTERS = ("dropped", "tags", "modes", "ignored")


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
    modes: Counter = field(default_factory=Counter)
    """Rows by what they show of the target's modes."""
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
            setattr(tally, name, Counter(state.get(name, {})))  # an earlier version counted less
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
        if kept and outcome.mode:
            self.modes[outcome.mode] += 1
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
            "modes": dict(sorted(self.modes.items())),
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


def write_bad_rows(tally: Tally, folder: Path, report: Callable[[str], None]) -> None:
    """The report file in the prepared folder, if there is anything to report."""
    if not tally.bad:
        return
    lines = [json.dumps(bad, ensure_ascii=False) + "\n" for bad in tally.bad]
    (folder / "bad_rows.jsonl").write_bytes("".join(lines).encode("utf-8", "backslashreplace"))
    reasons = Counter(bad["reason"].split(":")[0][:80] for bad in tally.bad)
    for reason, count in reasons.most_common(5):
        report(f"{count} bad rows: {reason} (bad_rows.jsonl has them all)")
