"""Arrow files of a set that is being prepared, and the journal by which a killed `prepare` goes on.

The folder of a build has two parts:

    set/        what will be published: data-00000.arrow, data-00001.arrow, ...
    journal/    inputs.json: what the build is made from; NUMBER.json and NUMBER.seen for each finished file

A file of the set is written under another name, synced, renamed, and only then entered in the journal, which says how
many rows of the source it took to get there and what was counted until then. After a kill, files that the journal
knows and whose content is what was written are kept, their rows are passed over, and the rest is made as in a build
that was never interrupted: the bytes are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from draftsmith.data.seen import ENTRY
from draftsmith.data.tally import Part, Tally

BATCH = 256
"""Samples of one Arrow record batch."""
SHARD_BYTES = 128 << 20
"""A file is closed when its columns hold so much, and another one begun. A kill loses at most one."""
SHARD_SAMPLES = 65_536
"""Or when it has so many samples, if they are short."""

COLUMNS = pa.schema(
    {
        "id": pa.string(),
        "tokens": pa.list_(pa.int32()),
        "supervised": pa.list_(pa.uint8()),  # a byte each: bits would have to be unpacked at every read
        "tags": pa.list_(pa.string()),
        "num_legal": pa.int32(),
    }
)


class Shard(NamedTuple):
    """A finished file."""

    name: str
    size: int
    sha256: str


class Build:
    """Writes samples to the files of a build, and continues a build that was killed."""

    def __init__(self, folder: Path, inputs: dict, max_bad_rows: int) -> None:
        """`folder`: of the whole build, this process's alone. What other inputs left there is deleted."""
        self.set, self._journal = folder / "set", folder / "journal"
        self.tally = Tally(max_bad_rows=max_bad_rows)
        self.shards: list[Shard] = []
        self._pending: list[Part] = []
        self._file: _ShardFile | None = None
        self._bad_noted, self._held_out_noted = 0, 0
        known = _read_json(self._journal / "inputs.json")
        if known == json.loads(json.dumps(inputs)) and self.set.is_dir():
            self._resume(max_bad_rows)
        else:
            self._begin(folder, inputs)

    def add(self, parts: Iterable[Part]) -> None:
        """The samples that are kept of the rows tallied since the last call."""
        self._pending += parts
        if len(self._pending) >= BATCH:
            self._flush()
            assert self._file is not None
            if self._file.content >= SHARD_BYTES or self._file.samples >= SHARD_SAMPLES:
                self._close()

    def finish(self) -> list[Shard]:
        """Closes the last file; all of them."""
        self._flush()
        self._close()
        return self.shards

    def _begin(self, folder: Path, inputs: dict) -> None:
        for rest in folder.iterdir():
            shutil.rmtree(rest) if rest.is_dir() else rest.unlink()
        self.set.mkdir()
        self._journal.mkdir()
        write_json(self._journal / "inputs.json", inputs)

    def _resume(self, max_bad_rows: int) -> None:
        """Takes over what the journal knows, up to the first thing that is not as it was written."""
        kept: list[dict] = []
        seen = [np.zeros(0, ENTRY)]
        while (entry := _read_json(self._journal / f"{len(kept):05}.json")) is not None:
            shard, file = Shard(*entry["shard"]), self._journal / f"{len(kept):05}.seen"
            if file_hash(self.set / shard.name) != shard.sha256 or file_hash(file) != entry["seen"]:
                break
            kept.append(entry)
            seen.append(np.fromfile(file, ENTRY))
            self.shards.append(shard)
        if kept and sum(len(entry["bad"]) for entry in kept) <= max_bad_rows:
            bad = [one for entry in kept for one in entry["bad"]]
            held_out = [(chance, row) for entry in kept for chance, row in entry["held_out"]]
            self.tally = Tally.restored(kept[-1]["tally"], bad, held_out, max_bad_rows)
            self.tally.seen.load(np.concatenate(seen))
            self._bad_noted, self._held_out_noted = len(bad), len(held_out)
        else:
            kept, self.shards = [], []
        names = {shard.name for shard in self.shards}
        for file in [*self.set.iterdir(), *self._journal.iterdir()]:
            listed = file.name in names or (file.parent == self._journal and _number(file) < len(kept))
            if not listed or file.suffix == ".part":
                file.unlink()

    def _flush(self) -> None:
        if not self._pending:
            return
        if self._file is None:
            self._file = _ShardFile(self.set / f"data-{len(self.shards):05}.arrow")
        for start in range(0, len(self._pending), BATCH):
            self._file.write(self._pending[start : start + BATCH])
        self._pending = []

    def _close(self) -> None:
        if self._file is None:
            return
        shard, self._file = self._file.close(), None
        tally = self.tally
        number = f"{len(self.shards):05}"
        seen = tally.seen.take_new()
        write_whole(self._journal / f"{number}.seen", seen)
        entry = {
            "shard": list(shard),
            "seen": hashlib.sha256(seen).hexdigest(),
            "bad": tally.bad[self._bad_noted :],
            "held_out": tally.held_out[self._held_out_noted :],
            "tally": tally.state(),
        }
        write_json(self._journal / f"{number}.json", entry)
        self.shards.append(shard)
        self._bad_noted, self._held_out_noted = len(tally.bad), len(tally.held_out)


class _ShardFile:
    """An Arrow file that appears under its name once it is complete and on the disk."""

    def __init__(self, path: Path) -> None:
        self.content, self.samples = 0, 0
        """Bytes of the columns, and rows, so far."""
        self._path, self._part = path, path.with_suffix(".part")
        self._stream = pa.ipc.new_stream(str(self._part), COLUMNS)

    def write(self, parts: list[Part]) -> None:
        batch = _record_batch(parts)
        self.content += batch.nbytes
        self.samples += len(parts)
        self._stream.write_batch(batch)

    def close(self) -> Shard:
        self._stream.close()
        sync(self._part)
        shard = Shard(self._path.name, self._part.stat().st_size, file_hash(self._part))
        os.rename(self._part, self._path)
        sync(self._path.parent)
        return shard


def _record_batch(parts: list[Part]) -> pa.RecordBatch:
    ends = np.cumsum([0, *(len(part.tokens) for part in parts)]).astype(np.int32)
    tokens = np.concatenate([part.tokens for part in parts]).astype(np.int32)
    supervised = np.concatenate([part.supervised for part in parts]).view(np.uint8)
    columns = [
        pa.array([part.id for part in parts], pa.string()),
        pa.ListArray.from_arrays(ends, pa.array(tokens)),
        pa.ListArray.from_arrays(ends, pa.array(supervised)),
        pa.array([list(part.tags) for part in parts], pa.list_(pa.string())),
        pa.array([part.num_legal for part in parts], pa.int32()),
    ]
    return pa.record_batch(columns, schema=COLUMNS)


def write_description(folder: Path, shards: list[Shard], content_hash: str) -> None:
    """What `datasets.load_from_disk` wants to find beside the files."""
    state = {
        "_data_files": [{"filename": shard.name} for shard in shards],
        "_fingerprint": content_hash[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    kinds = {field.name: _feature(field.type) for field in COLUMNS}
    info = {"citation": "", "description": "", "features": kinds, "homepage": "", "license": ""}
    for name, value in (("state.json", state), ("dataset_info.json", info)):
        write_json(folder / name, value)


def _feature(kind: pa.DataType) -> dict:
    if pa.types.is_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "List"}
    return {"dtype": str(kind), "_type": "Value"}


def has_finished_files(folder: Path) -> bool:
    """True if there is anything in a build's folder that a later run can go on from."""
    return any((folder / "journal").glob("*.seen"))


def file_hash(file: Path) -> str:
    """SHA-256 of the content; empty if there is no such file."""
    if not file.is_file():
        return ""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(file: Path, value: object) -> None:
    write_whole(file, (json.dumps(value, indent=2) + "\n").encode())


def write_whole(file: Path, content: bytes) -> None:
    """The file is there with all its content or not at all, whatever happens meanwhile."""
    part = file.with_name(file.name + ".part")
    part.write_bytes(content)
    sync(part)
    os.rename(part, file)
    sync(file.parent)


def _read_json(file: Path) -> dict | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _number(file: Path) -> int:
    """Of a file of the journal; inputs.json comes before all others."""
    return int(file.stem) if file.stem.isdigit() else -1
