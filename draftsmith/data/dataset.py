"""The tokenised set: conversations in JSONL, to a folder of Arrow files that loader workers map into memory.

`prepare` is strict: a line that cannot be used stops it, with the line number; what it leaves out is counted by reason.
The folder is written beside its place and renamed into it. `manifest.json` in it records what it was made from, so a
second run reuses it, or says what has changed. `datasets.load_from_disk` reads the folder too.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftsmith.anchors import legal_anchors
from draftsmith.config import DataOptions
from draftsmith.data import store
from draftsmith.data.chat import Conversation, read_conversations, render
from draftsmith.errors import DataError, UserError
from draftsmith.types import Sample

MIN_SUPERVISED = 0.01
"""Below this share of supervised tokens something is wrong with the data or the template, and no run is worth it."""
BATCH = 256
"""Rows of one Arrow record batch."""
PROGRESS = 5_000
"""Rows between two progress reports."""

COLUMNS = pa.schema(
    {
        "id": pa.string(),
        "tokens": pa.list_(pa.int32()),
        "supervised": pa.list_(pa.uint8()),  # a byte each: bits would have to be unpacked at every read
        "tags": pa.list_(pa.string()),
        "num_legal": pa.int32(),
    }
)


def prepare(
    tokenizer: PreTrainedTokenizerBase,
    tokenizer_hash: str,
    options: DataOptions,
    report: Callable[[str], None],
    *,
    end_ids: Sequence[int] | None = None,
) -> dict:
    """Tokenise `options.conversations` into the folder `options.prepared`; returns its manifest.

    A folder made from the same file, tokenizer, template and options is reused; another one of ours is replaced, at
    once and only after success. `report` gets one line at a time. `end_ids`: end-of-turn tokens, if not just eos.

    DataError names file, line and reason for whatever cannot be used, and refuses a set with hardly any supervision.
    """
    source, folder = _paths(options)
    inputs = _inputs(tokenizer, tokenizer_hash, options, source, end_ids)
    if store.recover(folder):
        report(f"{folder}: put back after an interrupted replacement")
    if (old := store.read_manifest(folder)) is not None:
        changed = store.changes(old, inputs, folder)
        if not changed:
            report(f"reusing {folder}: same conversations, tokenizer, chat template and options ({store.summary(old)})")
            return old
        report(f"rebuilding {folder}: {'; '.join(changed)}")
    with store.claim(folder) as partial:
        tally = _build(tokenizer, source, options, end_ids, partial, report)
        tally.refuse_useless(source)
        manifest = {
            "conversations": str(source),
            "inputs": inputs,
            "counts": tally.counts(),
            "ignored_keys": dict(tally.ignored),
            "content_hash": tally.content.hexdigest(),
        }
        manifest = store.publish(partial, folder, manifest)
    for key, count in tally.ignored.items():
        report(f"key {key!r} of {count} rows means nothing here and was passed over")
    report(f"prepared {folder}: {store.summary(manifest)}")
    return manifest


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over all that decides token ids: the tokenizer's own description, chat template and special tokens."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError("the tokenizer has no tokenizer.json (it is a Python one); convert it to a fast one")
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    # The last call's padding and truncation are left behind in there.
    core.pop("truncation", None)
    core.pop("padding", None)
    special = {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokenizer.special_tokens_map.items()}
    description = json.dumps([core, tokenizer.chat_template, special], sort_keys=True)
    return hashlib.sha256(description.encode()).hexdigest()


def open_prepared(folder: str | Path) -> PreparedDataset:
    """The prepared set in `folder`, mapped into memory. DataError, saying what to run, unless `prepare` made it."""
    how = "run `draftsmith prepare` with --data.conversations FILE --data.prepared FOLDER"
    if not str(folder):
        raise DataError(f"no prepared folder is given (--data.prepared); {how}")
    path = Path(folder)
    manifest = store.read_manifest(path)
    if manifest is None:
        raise DataError(f"{path} holds no prepared conversations; {how}")
    if broken := store.damage(manifest, path):
        raise DataError(f"{path}: {broken}; {how}")
    return PreparedDataset(path, manifest)


class PreparedDataset:
    """Rows of a prepared folder, as `Sample`s; made by `open_prepared`.

    Files are mapped at the first access of each process. Pickled it is only its folder and manifest, so it goes to
    loader workers cheaply, forked or spawned.
    """

    def __init__(self, folder: Path, manifest: dict) -> None:
        self.folder = folder
        self.manifest = manifest
        self._mapped: _Mapped | None = None

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the rows in order: ids, tokens, supervision and tags."""
        return self.manifest["content_hash"]

    @property
    def lengths(self) -> Int[np.ndarray, " num"]:
        """Tokens of each row."""
        return self._columns.lengths

    @property
    def legal_counts(self) -> Int[np.ndarray, " num"]:
        """Legal anchors of each row: positions p with p and p + 1 both supervised."""
        return self._columns.legal_counts

    @property
    def ids(self) -> list[str]:
        return self._columns.ids.to_pylist()

    def count_token(self, token: int) -> int:
        """How often a token occurs in the whole set."""
        return sum(int((values == token).sum()) for values in self._columns.tokens.values)

    def __len__(self) -> int:
        return self.manifest["counts"]["kept"]

    def __getitem__(self, index: int | np.integer) -> Sample:
        index = int(index)
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        columns = self._columns
        return Sample(
            id=columns.ids[index].as_py(),
            tokens=columns.tokens.row(index).astype(np.int64),  # copies: the mapped file itself is read-only
            supervised=columns.supervised.row(index).astype(bool),
            tags=tuple(columns.tags[index].as_py()),
        )

    def __getstate__(self) -> dict:
        return {"folder": self.folder, "manifest": self.manifest, "_mapped": None}

    @property
    def _columns(self) -> _Mapped:
        if self._mapped is None:
            self._mapped = _map(self.folder, self.manifest)
        return self._mapped


class _Lists:
    """A column of lists, as numpy views of the mapped file: reading a row costs two slices and no Python objects."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self.values = [chunk.values.to_numpy(zero_copy_only=True) for chunk in chunks]
        self.offsets = [chunk.offsets.to_numpy(zero_copy_only=True) for chunk in chunks]
        self.starts = np.cumsum([0, *(len(chunk) for chunk in chunks)]).tolist()

    def row(self, index: int) -> np.ndarray:
        chunk = bisect_right(self.starts, index) - 1
        begin, end = self.offsets[chunk][index - self.starts[chunk] :][:2]
        return self.values[chunk][begin:end]


class _Mapped(NamedTuple):
    ids: pa.ChunkedArray
    tokens: _Lists
    supervised: _Lists
    tags: pa.ChunkedArray
    lengths: np.ndarray
    legal_counts: np.ndarray


def _map(folder: Path, manifest: dict) -> _Mapped:
    # A worker may open the folder long after its parent did; it must be the same one.
    if store.read_manifest(folder) != manifest:
        raise DataError(f"{folder} has been replaced since it was opened; start again")
    files = [folder / name for name in sorted(manifest["files"]) if name.endswith(".arrow")]
    table = pa.concat_tables([pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files])
    if table.num_rows != manifest["counts"]["kept"]:
        raise DataError(f"{folder} holds {table.num_rows} rows, not as many as recorded; prepare it again")
    tokens = _Lists(table["tokens"])
    lengths = np.concatenate([np.diff(offsets) for offsets in tokens.offsets]).astype(np.int64)
    legal_counts = table["num_legal"].to_numpy().astype(np.int64)
    return _Mapped(table["id"], tokens, _Lists(table["supervised"]), table["tags"], lengths, legal_counts)


@dataclass
class _Tally:
    """What became of the rows so far."""

    rows_in: int = 0
    kept: int = 0
    cut: int = 0
    tokens: int = 0
    supervised: int = 0
    legal: int = 0
    longest: int = 0
    dropped: Counter = field(default_factory=Counter)
    tags: Counter = field(default_factory=Counter)
    ignored: Counter = field(default_factory=Counter)
    content: hashlib._Hash = field(default_factory=hashlib.sha256)
    seen: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    """Content and line of each id."""

    def is_duplicate(self, row: Conversation) -> bool:
        """True for an exact duplicate of an earlier row. DataError when only the id is the same."""
        digest = hashlib.blake2b(row.content.encode(), digest_size=16).digest()
        before, line = self.seen.setdefault(row.id, (digest, row.line))
        if before != digest:
            raise DataError(f"id {row.id!r} is line {line}'s too, whose content differs; ids must be unique")
        return line != row.line

    def keep(self, sample: Sample, num_legal: int) -> None:
        self.kept += 1
        self.tokens += len(sample.tokens)
        self.supervised += int(sample.supervised.sum())
        self.legal += num_legal
        self.longest = max(self.longest, len(sample.tokens))
        self.tags.update(sample.tags)
        self.content.update(json.dumps([sample.id, sample.tags, len(sample.tokens)]).encode())
        self.content.update(sample.tokens.astype("<i4").tobytes())
        self.content.update(sample.supervised.tobytes())

    def counts(self) -> dict:
        return {
            "rows_in": self.rows_in,
            "kept": self.kept,
            "dropped": dict(self.dropped),
            "cut": self.cut,
            "tokens": self.tokens,
            "supervised": self.supervised,
            "legal": self.legal,
            "longest": self.longest,
            "tags": dict(sorted(self.tags.items())),
        }

    def refuse_useless(self, source: Path) -> None:
        assert self.rows_in == self.kept + self.dropped.total()
        if self.rows_in == 0:
            raise DataError(f"{source} holds no conversation")
        lost = "; ".join(f"{count} dropped: {reason}" for reason, count in self.dropped.items())
        if self.legal == 0:
            raise DataError(f"{source}: no row has two supervised tokens in sequence ({lost or 'none dropped'})")
        if self.supervised < MIN_SUPERVISED * self.tokens:
            raise DataError(
                f"{source}: only {self.supervised} of {self.tokens} tokens are supervised, less than "
                f"{MIN_SUPERVISED:.0%}; are the answers in it? (`draftsmith regenerate` writes them)"
            )


def _build(
    tokenizer: PreTrainedTokenizerBase,
    source: Path,
    options: DataOptions,
    end_ids: Sequence[int] | None,
    partial: Path,
    report: Callable[[str], None],
) -> _Tally:
    """Writes the Arrow folder into `partial`, rows in the order of the file."""
    # Imported here because it takes longer than all else, and loader workers do not need it.
    from datasets import Dataset
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    tally = _Tally()
    # save_to_disk copies from a file elsewhere, so that no set has to fit into memory.
    scratch = partial / "scratch" / "rows.arrow"
    scratch.parent.mkdir()
    with pa.ipc.new_stream(str(scratch), COLUMNS) as stream:
        batch: list[Sample] = []
        for row in read_conversations(source):
            try:
                sample = _take(tokenizer, row, options, end_ids, tally)
            except DataError as error:
                raise DataError(f"{source}, line {row.line}: {error}") from error
            batch += [] if sample is None else [sample]
            if len(batch) == BATCH:
                stream.write_batch(_record_batch(batch))
                batch = []
            if tally.rows_in % PROGRESS == 0:
                report(f"{tally.rows_in} rows read, {tally.tokens} tokens kept")
        if batch:
            stream.write_batch(_record_batch(batch))
    if tally.kept:
        quiet = are_progress_bars_disabled()
        disable_progress_bars()
        Dataset.from_file(str(scratch)).save_to_disk(partial)
        if not quiet:
            enable_progress_bars()
    shutil.rmtree(scratch.parent)
    return tally


def _take(
    tokenizer: PreTrainedTokenizerBase,
    row: Conversation,
    options: DataOptions,
    end_ids: Sequence[int] | None,
    tally: _Tally,
) -> Sample | None:
    """The row as a sample, or None if it is dropped; tallied either way."""
    tally.rows_in += 1
    tally.ignored.update(row.ignored)
    if tally.is_duplicate(row):
        tally.dropped["exact duplicate"] += 1
        return None
    tokens, supervised = render(tokenizer, row.messages, tools=row.tools, finish=row.finish, end_ids=end_ids)
    if not supervised.any():
        tally.dropped["nothing supervised"] += 1
        return None
    if len(tokens) > options.max_length:
        if options.overlong == "refuse":
            raise DataError(
                f"{len(tokens)} tokens, max_length is {options.max_length}; raise --data.max-length, leave the row "
                "out, or cut such rows with --data.overlong cut"
            )
        tokens, supervised = tokens[: options.max_length], supervised[: options.max_length]
        if not supervised.any():
            tally.dropped["nothing supervised within max_length"] += 1
            return None
        tally.cut += 1
    sample = Sample(id=row.id, tokens=tokens, supervised=supervised, tags=row.tags)
    tally.keep(sample, len(legal_anchors(supervised)))
    return sample


def _record_batch(samples: list[Sample]) -> pa.RecordBatch:
    ends = np.cumsum([0, *(len(sample.tokens) for sample in samples)]).astype(np.int32)
    tokens = np.concatenate([sample.tokens for sample in samples]).astype(np.int32)
    supervised = np.concatenate([sample.supervised for sample in samples]).astype(np.uint8)
    columns = [
        pa.array([sample.id for sample in samples], pa.string()),
        pa.ListArray.from_arrays(ends, pa.array(tokens)),
        pa.ListArray.from_arrays(ends, pa.array(supervised)),
        pa.array([list(sample.tags) for sample in samples], pa.list_(pa.string())),
        pa.array([len(legal_anchors(sample.supervised)) for sample in samples], pa.int32()),
    ]
    return pa.record_batch(columns, schema=COLUMNS)


def _paths(options: DataOptions) -> tuple[Path, Path]:
    if not options.conversations or not options.prepared:
        raise UserError("`prepare` needs both --data.conversations (the JSONL it reads) and --data.prepared (a folder)")
    if options.max_length < 2:
        raise UserError(f"max_length is {options.max_length}; it must be at least 2")
    source, folder = Path(options.conversations), Path(options.prepared)
    if not source.is_file():
        raise DataError(f"{source}: no such file; --data.conversations names a JSONL of conversations")
    return source, folder


def _inputs(
    tokenizer: PreTrainedTokenizerBase,
    tokenizer_hash: str,
    options: DataOptions,
    source: Path,
    end_ids: Sequence[int] | None,
) -> dict:
    """All that decides the rows, by the names a user knows them by."""
    given = tokenizer.chat_template  # one, or several by name
    template = given if isinstance(given, str) else json.dumps(given, sort_keys=True)
    with open(source, "rb") as stream:
        file_hash = hashlib.file_digest(stream, "sha256").hexdigest()
    return {
        "conversations": file_hash,
        "tokenizer": tokenizer_hash,
        "chat template": hashlib.sha256(template.encode()).hexdigest(),
        "end-of-turn tokens": None if end_ids is None else sorted(end_ids),
        "max_length": options.max_length,
        "overlong": options.overlong,
    }
