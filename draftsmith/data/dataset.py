"""The tokenised set as it is read: rows of a prepared folder, mapped into memory by every process that wants them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int

from draftsmith.data import store
from draftsmith.data.cache import Cache, Held, fetch
from draftsmith.data.remote import is_remote, shown
from draftsmith.errors import DataError
from draftsmith.types import Sample


def open_prepared(
    folder: str | Path, cache: Cache | None = None, report: Callable[[str], None] = lambda line: None
) -> PreparedDataset:
    """The prepared set in `folder`, mapped into memory; one at a URL is fetched into the `cache` first.

    DataError, saying what to run, unless `prepare` made it.
    """
    how = "run `draftsmith prepare` with --data.conversations FILE --data.prepared FOLDER"
    if not str(folder):
        raise DataError(f"no prepared folder is given (--data.prepared); {how}")
    held, path, name = None, Path(folder), str(folder)
    if is_remote(name):
        assert cache is not None
        held, name = fetch(name, cache, report), shown(name)
        path = held.folder if held else path
    manifest = store.read_manifest(path) if held or not is_remote(str(folder)) else None
    if manifest is None:
        raise DataError(f"{name} holds no prepared conversations; {how}")
    if broken := store.damage(manifest, path):
        raise DataError(f"{name}: {broken}; {how}")
    return PreparedDataset(path, manifest, held)


class PreparedDataset:
    """Rows of a prepared folder, as `Sample`s; made by `open_prepared`.

    Files are mapped at the first access of each process. Pickled it is only its folder and manifest, so it goes to
    loader workers cheaply, forked or spawned.
    """

    def __init__(self, folder: Path, manifest: dict, held: Held | None = None) -> None:
        self.folder = folder
        self.manifest = manifest
        self._held = held
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

    def tagged(self, tag: str) -> Bool[np.ndarray, " num"]:
        """Which rows carry the tag."""
        found = [np.zeros(len(chunk), bool) for chunk in self._columns.tags.chunks]
        for rows, chunk in zip(found, self._columns.tags.chunks, strict=True):
            carried = pc.equal(chunk.flatten(), tag).to_numpy(zero_copy_only=False)
            rows[pc.list_parent_indices(chunk).to_numpy()[carried]] = True
        return np.concatenate(found)

    def id(self, index: int) -> str:
        """The id of one row."""
        return self._columns.ids[index].as_py()

    def count_token(self, token: int) -> int:
        """How often a token occurs in the whole set."""
        return sum(int((values == token).sum()) for values, _ in self.token_chunks())

    def token_chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All tokens in order, many rows at a time, and where each of those rows begins and the last one ends."""
        yield from zip(self._columns.tokens.values, self._columns.tokens.offsets, strict=True)

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
        return {"folder": self.folder, "manifest": self.manifest, "_held": None, "_mapped": None}

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
