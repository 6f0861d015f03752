"""What `train` reads: one prepared set or several, how often an epoch sees their rows, and long rows in pieces.

Sets are numbered through in the order of their content hashes, and how often a row is seen depends on its id, the seed
and the epoch. So nothing depends on where the folders are or in which order they are named.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice, pairwise, zip_longest
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from draftsmith.anchors import legal_anchors
from draftsmith.config import DataOptions
from draftsmith.data.cache import Cache
from draftsmith.data.dataset import PreparedDataset, open_prepared
from draftsmith.data.split import Piece, context_size, split, take
from draftsmith.errors import UserError
from draftsmith.packing import Cap, Mix, Schedule
from draftsmith.randomness import name_keys
from draftsmith.types import Sample


class Part(NamedTuple):
    """A prepared set of a mixture."""

    name: str
    weight: float
    dataset: PreparedDataset


class Share(NamedTuple):
    """What the first epoch sees of a set."""

    name: str
    weight: float
    rows: int
    visits: int
    tokens: float
    """Share of the epoch's."""


class TrainingSet:
    """Rows of all sets, and of long ones a row for each piece: the first in its place, the others at the end."""

    def __init__(self, parts: Sequence[Part], *, max_length: int | None = None, context: int = 0) -> None:
        """`max_length`: longer rows are split into pieces of so many tokens, with `context`. None: they stay whole."""
        self.parts = parts
        self._starts = np.cumsum([0, *(len(part.dataset) for part in parts)]).tolist()
        lengths = np.concatenate([part.dataset.lengths for part in parts])
        self._split = None if max_length is None else (max_length, context)
        self._pieces: dict[int, Piece] = {}
        self._further: list[tuple[int, Piece]] = []
        if max_length is not None:
            for row in np.flatnonzero(lengths > max_length).tolist():
                first, *others = split(self._whole(row).supervised, max_length, context) or [Piece(0, 0, max_length)]
                self._pieces[row] = first
                self._further += [(row, piece) for piece in others]
        self.base = np.concatenate([np.arange(len(lengths)), [row for row, _ in self._further]]).astype(np.int64)
        """Of each row, the row of the sets that it is (a piece of)."""
        self.lengths: Int[np.ndarray, " row"] = lengths[self.base]
        self.legal_counts: Int[np.ndarray, " row"] = np.concatenate([part.dataset.legal_counts for part in parts])[
            self.base
        ]
        for row in [*self._pieces, *range(len(lengths), len(self))]:
            sample = self[row]
            self.lengths[row], self.legal_counts[row] = len(sample.tokens), len(legal_anchors(sample.supervised))

    @property
    def num_split(self) -> tuple[int, int]:
        """Rows of the sets that are split, and the pieces they make."""
        return len(self._pieces), len(self._pieces) + len(self._further)

    @property
    def counts(self) -> dict:
        """What the manifests count of all sets together; a row in pieces counts once."""
        every = [part.dataset.manifest["counts"] for part in self.parts]
        sums: dict = {name: sum(counts[name] for counts in every) for name in ("kept", "tokens", "supervised")}
        sums["longest"] = max(counts["longest"] for counts in every)
        for name in ("tags", "modes"):  # sets made by earlier versions have no modes
            sums[name] = dict(sorted(sum((Counter(counts.get(name, {})) for counts in every), Counter()).items()))
        return sums

    def part_of(self, index: int) -> Part:
        """The set that a row is of."""
        return self.parts[bisect_right(self._starts, int(self.base[index])) - 1]

    def first_rows(self, num: int) -> list[int]:
        """So many rows, from all sets in turn."""
        turns = zip_longest(*(range(*bounds) for bounds in pairwise(self._starts)))
        return list(islice((row for turn in turns for row in turn if row is not None), num))

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the rows. Of a single set, that set's."""
        prints = [part.dataset.fingerprint for part in self.parts]
        if len(prints) == 1 and not self._pieces:
            return prints[0]
        return hashlib.sha256(json.dumps([prints, self._split if self._pieces else None]).encode()).hexdigest()

    def ids(self) -> list[str]:
        """Of each row; pieces have their document's, so that they are seen together."""
        ids = [identifier for part in self.parts for identifier in part.dataset.ids]
        return ids + [ids[row] for row, _ in self._further]

    def id(self, index: int) -> str:
        """The id of one row, as its sample has it."""
        row, num = int(self.base[index]), self._starts[-1]
        number = bisect_right(self._starts, row) - 1
        name = self.parts[number].dataset.id(row - self._starts[number])
        piece = self._further[index - num][1] if index >= num else self._pieces.get(index)
        return name if piece is None else f"{name}@{piece.first}"

    def tagged(self, tag: str) -> Bool[np.ndarray, " row"]:
        return np.concatenate([part.dataset.tagged(tag) for part in self.parts])[self.base]

    def weights(self) -> np.ndarray:
        sizes = [len(part.dataset) for part in self.parts]
        return np.repeat([part.weight for part in self.parts], sizes)[self.base]

    def count_token(self, token: int) -> int:
        return sum(part.dataset.count_token(token) for part in self.parts)

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int | np.integer) -> Sample:
        index, num = int(index), self._starts[-1]
        if index >= num:
            row, piece = self._further[index - num]
            return take(self._whole(row), piece)
        sample = self._whole(index)
        return take(sample, self._pieces[index]) if index in self._pieces else sample

    def _whole(self, row: int) -> Sample:
        number = bisect_right(self._starts, row) - 1
        return self.parts[number].dataset[row - self._starts[number]]


def open_training_set(
    options: DataOptions, num_tokens: int, report: Callable[[str], None] = lambda line: None
) -> TrainingSet:
    """The sets that the options name, for packs of `num_tokens`. Raises UserError or DataError."""
    context = context_size(options.overlong, options.split_context, num_tokens)
    chosen = _parse_mix(options)
    cache = Cache.of(options.cache, options.cache_gb)
    parts = [Part(name, weight, open_prepared(name, cache, report)) for name, weight in chosen]
    if len({part.dataset.manifest["inputs"]["tokenizer"] for part in parts}) > 1:
        raise UserError("the folders of data.mix were prepared with different tokenizers or chat templates")
    parts.sort(key=lambda part: part.dataset.fingerprint)
    for one, other in zip(parts, parts[1:], strict=False):
        if one.dataset.fingerprint == other.dataset.fingerprint:
            raise UserError(f"data.mix: {one.name} and {other.name} hold the same rows; give one, with a weight")
    return TrainingSet(parts, max_length=num_tokens if options.overlong == "split" else None, context=context)


def make_mix(
    dataset: TrainingSet, options: DataOptions, left_out: Bool[np.ndarray, " row"] | None = None
) -> Mix | None:
    """How often an epoch sees each row, those left out never; None if that is once."""
    caps, weights = tuple(_parse_cap(text, dataset) for text in options.caps), dataset.weights()
    if left_out is not None:
        weights[left_out] = 0
    if not caps and (weights == 1).all():
        return None
    return Mix(weight=weights, key=name_keys(dataset.ids()), caps=caps)


def shares(dataset: TrainingSet, schedule: Schedule) -> list[Share]:
    rows = schedule.rows(0)
    base, lengths = dataset.base[rows], schedule.lengths[rows]
    found, start = [], 0
    for part in dataset.parts:
        end = start + len(part.dataset)
        inside = (start <= base) & (base < end)
        share = float(lengths[inside].sum() / lengths.sum())
        found.append(Share(part.name, part.weight, len(part.dataset), int(inside.sum()), share))
        start = end
    return found


def describe(dataset: TrainingSet, schedule: Schedule) -> list[str]:
    """What the first epoch sees of each set and of each capped tag; nothing without mixing."""
    if len(dataset.parts) == 1 and dataset.parts[0].weight == 1 and not (schedule.mix and schedule.mix.caps):
        return []
    rows = schedule.rows(0)
    lengths = schedule.lengths[rows]
    lines = [
        f"mix: {share.name}, weight {share.weight:g}: {share.rows:,} rows, {share.visits:,} visits in the first epoch, "
        f"{share.tokens:.1%} of its tokens"
        for share in shares(dataset, schedule)
    ]
    num = sum(len(part.dataset) for part in dataset.parts)
    if repeated := len(ids := dataset.ids()[:num]) - len(set(ids)):
        lines.append(f"mix: {repeated:,} ids occur in more than one folder; such rows are seen for each")
    if schedule.mix and schedule.mix.caps:
        uncapped = replace(schedule.mix, caps=()).visits(schedule.seed, 0, schedule.lengths) % len(dataset)
        lines += [_describe_cap(cap, rows, lengths, uncapped) for cap in schedule.mix.caps]
    return lines


def _describe_cap(cap: Cap, rows: Int[np.ndarray, " visit"], lengths: Int[np.ndarray, " visit"], uncapped) -> str:
    seen, unit, before = cap.member[rows], "tokens" if cap.in_tokens else "rows", int(cap.member[uncapped].sum())
    effect = "" if seen.sum() < before else ", so it takes nothing away"
    return (
        f"cap: {cap.tag}, {cap.limit:,} {unit} an epoch: {int(seen.sum()):,} of {before:,} visits in the first epoch, "
        f"{int(lengths[seen].sum()):,} tokens{effect}"
    )


def _parse_mix(options: DataOptions) -> list[tuple[str, float]]:
    if not options.mix:
        return [(options.prepared, 1.0)]
    if options.prepared:
        raise UserError(
            "data.prepared and data.mix are both given, and train reads one of them; name all folders in data.mix "
            '(and give --data.prepared "" if the recipe sets it)'
        )
    chosen = []
    for text in options.mix:
        name, _, number = text.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            name, weight = text, 1.0
        if not name or not 0 < weight < float("inf"):
            raise UserError(f"data.mix: {text!r}; give FOLDER or FOLDER=WEIGHT, the weight greater than 0")
        chosen.append((name, weight))
    return chosen


def _parse_cap(text: str, dataset: TrainingSet) -> Cap:
    found = re.fullmatch(r"(.+)=([\d_]*\d)(tokens)?", text)
    if not found or int(found[2]) == 0:
        raise UserError(
            f"data.caps: {text!r}; give TAG=ROWS or TAG=TOKENStokens, as in math=10000 or math=2000000tokens"
        )
    member = dataset.tagged(found[1])
    if not member.any():
        known = sorted({tag for part in dataset.parts for tag in part.dataset.manifest["counts"]["tags"]})
        raise UserError(f"data.caps: no row carries the tag {found[1]!r}; there are: {', '.join(known) or 'none'}")
    return Cap(tag=found[1], member=member, limit=int(found[2]), in_tokens=bool(found[3]))
