"""Where rows come from: files, folders, globs, object stores, Hugging Face data sets. Rows arrive one at a time.

A JSONL line stays text here, so that reading is quick and the parsing can be done by other processes. What a file is
its name says, or else its first bytes; whether it is compressed (gzip, zstd) its first bytes alone.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from draftsmith.data.remote import Remote, RemoteFile, is_of_the_store, is_remote, shown
from draftsmith.errors import DataError, EnvironmentFault

SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
PACKED = (".gz", ".zst", ".zstd")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
CHUNK = 1 << 20
"""Bytes read at a time of a JSON array."""
ROWS = 1_000
"""Rows read at a time of a Parquet file."""
DAMAGE = (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError, pa.ArrowInvalid)


class Row(NamedTuple):
    file: str
    """As shown to the user: without secrets."""
    unit: str
    """line or row"""
    number: int
    """1-based"""
    value: bytes | dict
    """JSON text, or the row itself."""

    @property
    def place(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A set of rows with a fixed order."""

    name: str
    """As the user named it, without secrets."""
    files: tuple[str, ...] = ()
    table: Any = None
    """A Hugging Face data set instead of files."""

    def fingerprint(self) -> str:
        """SHA-256 of the content. For an object store, of the tags it keeps of the content, if it does."""
        if self.table is not None:
            digest = hashlib.sha256()
            for batch in self.table.with_format("arrow").iter(ROWS):
                for part in batch.combine_chunks().to_batches():
                    digest.update(part.serialize())
            return digest.hexdigest()
        prints = [_fingerprint(file) for file in self.files]
        return prints[0] if len(prints) == 1 else hashlib.sha256(json.dumps(prints).encode()).hexdigest()

    def state(self) -> list[tuple]:
        """Of local files, what changes when somebody writes to them."""
        stats = [os.stat(file) for file in self.files if not is_remote(file)]
        return [(one.st_ino, one.st_size, one.st_mtime_ns) for one in stats]

    def refuse_changed(self, before: list[tuple]) -> None:
        """DataError if a file is not as it was when `state` gave `before`."""
        if any(not os.path.exists(file) for file in self.files if not is_remote(file)) or self.state() != before:
            raise DataError(f"{self.name} changed while it was read; run it again once it is complete")

    def rows(self, note: Callable[[str], None]) -> Iterator[Row]:
        """All rows in order; `note` is told what was found wrong without harm to a row."""
        if self.table is not None:
            for number, row in enumerate(self.table, 1):
                yield Row(self.name, "row", number, _without_nulls(row))
        for file in self.files:
            try:
                yield from _rows(file, note)
            except DAMAGE as error:
                raise DataError(f"{shown(file)}: damaged file ({_first_line(error)})") from error
            except (DataError, EnvironmentFault):
                raise
            except OSError as error:
                reason = type(error).__name__ if is_remote(file) else _first_line(error)  # a URL may hold a secret
                raise DataError(f"{shown(file)} could not be read ({reason})") from error
            except Exception as error:
                if not is_of_the_store(error):
                    raise
                raise EnvironmentFault(f"{shown(file)} could not be read ({type(error).__name__})") from None


def open_source(name: str, *, subset: str = "", split: str = "train", revision: str = "") -> Source:
    """The rows of a file, folder, glob or URL, or of a Hugging Face data set. DataError if there is nothing."""
    if is_remote(name):
        return Source(name=shown(name), files=_remote_files(name))
    if any(mark in name for mark in "*?[") and not os.path.exists(name):
        files = [file for file in sorted(glob.glob(name, recursive=True)) if os.path.isfile(file)]
        if not files:
            raise DataError(f"{name}: no file matches")
        return Source(name=name, files=tuple(files))
    if os.path.isdir(name):
        return Source(name=name, files=_folder_files(Path(name)))
    if os.path.isfile(name):
        return Source(name=name, files=(name,))
    if HUB_NAME.fullmatch(name) and _kind_by_name(name) is None:
        return Source(name=name, table=_load_hub(name, subset, split, revision))
    raise DataError(
        f"{name}: no such file; name a file of rows (JSONL, JSON, Parquet, Arrow), a folder, a glob, a URL or a "
        "Hugging Face data set"
    )


def _folder_files(folder: Path) -> tuple[str, ...]:
    if (folder / "state.json").is_file():  # written by datasets' save_to_disk
        state = json.loads((folder / "state.json").read_text())
        return tuple(str(folder / part["filename"]) for part in state["_data_files"])
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and _kind_by_name(path.name)]
    found = [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    if not found:
        raise DataError(f"{folder} holds no file whose name ends with {', '.join(SUFFIXES)} (or these with .gz, .zst)")
    return tuple(map(str, found))


def _remote_files(url: str) -> tuple[str, ...]:
    remote = Remote(url)
    name, system = remote.name, remote.system
    pattern = any(mark in name for mark in "*[")
    if not pattern and not remote.exists():
        raise DataError(f"{name}: no such file")
    if pattern or (_kind_by_name(name) is None and system.isdir(url)):
        below = system._strip_protocol(url if pattern else url.rstrip("/") + "/**")
        found = [system.unstrip_protocol(one) for one in sorted(remote.glob(below)) if _kind_by_name(one)]
        if not found:
            raise DataError(f"{name}: no file matches")
        return tuple(found)
    return (url,)


def _load_hub(name: str, subset: str, split: str, revision: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, subset or None, split=split, revision=revision or None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{name} is no file or folder here, and no Hugging Face data set could be loaded: {_first_line(error)}"
        ) from error


def _kind_by_name(name: str) -> str | None:
    base = re.split(r"[?#]", name, maxsplit=1)[0] if "://" in name else name
    path = Path(base)
    return SUFFIXES.get(Path(path.stem).suffix if path.suffix in PACKED else path.suffix)


def _open(file: str) -> Any:
    """A file-like object of bytes."""
    if not is_remote(file):
        return open(file, "rb")
    remote = Remote(file)
    size = remote.size()
    if file.startswith("http") or size is None:  # servers that know no ranges send the file from its beginning
        return remote.system.open(file, "rb")
    return io.BufferedReader(RemoteFile(remote, size), CHUNK)


def _unpacked(stream: Any) -> io.BufferedReader:
    """The stream, through gzip or zstd if its first bytes say so."""
    plain = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream)
    first = plain.peek(4)[:4]
    if first[:2] == b"\x1f\x8b":
        return io.BufferedReader(gzip.GzipFile(fileobj=plain))  # type: ignore[arg-type]
    if first == b"\x28\xb5\x2f\xfd":
        return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(plain, "r"), "zstd"), CHUNK)  # type: ignore
    return plain


def _fingerprint(file: str) -> str:
    if is_remote(file):
        remote = Remote(file)
        if known := remote.tags():
            return hashlib.sha256(json.dumps([remote.size(), known], sort_keys=True).encode()).hexdigest()
    with _open(file) as stream:
        digest = hashlib.sha256()
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _rows(file: str, note: Callable[[str], None]) -> Iterator[Row]:
    name, kind = shown(file), _kind_by_name(file)
    with _open(file) as raw:
        stream = _unpacked(raw)
        first = stream.peek(64)[:64]
        if kind in (None, "json"):
            kind = _kind_by_content(first, kind)
        if kind in ("parquet", "arrow"):
            yield from _table_rows(name, stream, kind)
        elif kind == "json":
            yield from _array_rows(name, stream, note)
        else:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield Row(name, "line", number, line)


def _kind_by_content(first: bytes, kind: str | None) -> str:
    if first[:4] == b"PAR1":
        return "parquet"
    if first[:6] == b"ARROW1":
        return "arrow"
    return "json" if first.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[" else "jsonl"


def _table_rows(name: str, stream: io.BufferedReader, kind: str) -> Iterator[Row]:
    import pyarrow.parquet as parquet

    if kind == "parquet":
        batches = parquet.ParquetFile(stream).iter_batches(batch_size=ROWS)
    elif stream.peek(6)[:6] == b"ARROW1":
        reader = pa.ipc.open_file(stream)
        batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        batches = pa.ipc.open_stream(stream)
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, ROWS):
            for row in batch.slice(start, ROWS).to_pylist():
                number += 1
                yield Row(name, "row", number, _without_nulls(row))


def _array_rows(name: str, stream: io.BufferedReader, note: Callable[[str], None]) -> Iterator[Row]:
    """Elements of a JSON array, one at a time. One that is cut off is read up to the cut."""
    decode = codecs.getincrementaldecoder("utf-8-sig")().decode
    decoder, number, done = json.JSONDecoder(), 0, False
    buffer = decode(stream.read(CHUNK)).lstrip().removeprefix("[")
    while True:
        buffer = buffer.lstrip().removeprefix(",").lstrip() if number else buffer.lstrip()
        if buffer.startswith("]"):
            return
        try:
            value, end = decoder.raw_decode(buffer)
            if end == len(buffer) and not done:
                raise ValueError  # a number may go on
        except ValueError as error:
            more = decode(stream.read(max(CHUNK, len(buffer))))  # doubled, so that a long element costs no square
            done = not more
            if not done:
                buffer += more
                continue
            if not _is_cut(error, buffer):
                raise DataError(f"{name}, row {number + 1}: not JSON ({_first_line(error)})") from error
            note(f"{name} is cut off after row {number}: it was read up to there")
            return
        number, buffer = number + 1, buffer[end:]
        yield Row(name, "row", number, value if isinstance(value, dict) else json.dumps(value).encode())


def _is_cut(error: ValueError, buffer: str) -> bool:
    """True if the text ended too early, rather than being wrong in its midst."""
    if not isinstance(error, json.JSONDecodeError):
        return True
    return error.msg.startswith("Unterminated string") or not buffer[error.pos :].strip()[5:]


def _without_nulls(value: Any) -> Any:
    """Tables give every object all keys that any has; those of another are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
