"""The tokenised set: conversations, to a folder of Arrow files that loader workers map into memory.

`prepare` is strict: a row that cannot be used stops it, with its number, unless `max_bad_rows` allows some; these are
listed in the folder's bad_rows.jsonl. What it leaves out otherwise is counted by reason.
The folder is written beside its place and renamed into it. `manifest.json` in it records what it was made from, so a
second run reuses it, or says what has changed. `datasets.load_from_disk` reads the folder too.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftsmith.config import DataOptions
from draftsmith.data import held_out, store
from draftsmith.data.build import Job, find_form, leave_if_only_imported, outcomes, write_bad_rows
from draftsmith.data.cache import Cache, Held, fetch, read_there, refuse_foreign, upload
from draftsmith.data.chat import Style, default_style
from draftsmith.data.remote import Remote, is_remote, shown
from draftsmith.data.shards import Build, write_description
from draftsmith.data.sources import Source, open_source
from draftsmith.data.split import context_size
from draftsmith.data.template import require_template, template_arguments
from draftsmith.errors import DataError, UserError
from draftsmith.types import Sample

PROGRESS = 5_000
"""Rows between two progress reports."""


def prepare(
    tokenizer: PreTrainedTokenizerBase,
    tokenizer_hash: str,
    options: DataOptions,
    report: Callable[[str], None],
    *,
    end_ids: Sequence[int] | None = None,
) -> dict:
    """Tokenise `options.conversations` into the folder `options.prepared`; returns its manifest.

    A folder made from the same rows, tokenizer, template and options is reused; another one of ours is replaced, at
    once and only after success. A run that was killed goes on from its last finished file. `report` gets one line at
    a time. `end_ids`: end-of-turn tokens, if not just eos.

    DataError names file, line and reason for whatever cannot be used, and refuses a set with hardly any supervision.
    """
    leave_if_only_imported()
    folder = _check(options)
    if options.form not in ("text", "tokens"):  # these are not rendered
        require_template(tokenizer)
    style = _style(tokenizer, options, end_ids)
    source = open_source(
        options.conversations, subset=options.subset, split=options.split, revision=options.revision or ""
    )
    before = source.state()
    inputs = _inputs(tokenizer, tokenizer_hash, options, style, source, end_ids)
    if is_remote(options.prepared):
        if (old := _reusable_there(options, inputs, report)) is not None:
            return old
        local = replace(options, prepared=str(folder))
        prepare(tokenizer, tokenizer_hash, local, report, end_ids=end_ids)
        there = upload(folder, options.prepared, _cache(options), report)
        if options.held_out:
            report(f"evaluation.prompts may be {shown(options.prepared)}/{there['at']}/{held_out.FILE}")
        return there
    if store.recover(folder):
        report(f"{folder}: put back after an interrupted replacement")
    if (old := store.read_manifest(folder)) is not None:
        changed = store.changes(old, inputs, folder) or _too_poor(old["counts"], options)
        if not changed:
            store.tidy(folder)
            report(f"reusing {folder}: same conversations, tokenizer, chat template and options ({store.summary(old)})")
            return old
        report(f"rebuilding {folder}: {'; '.join(changed)}")
    with store.claim(folder) as partial:
        build = Build(partial, inputs, options.max_bad_rows)
        form = _fill(build, tokenizer, source, options, style, report)
        build.tally.refuse_useless(source.name, options.min_supervised)
        source.refuse_changed(before)
        tally = build.tally
        manifest = {
            "conversations": source.name,
            "hub_sets": [source.name] if source.table is not None else [],
            "form": form,
            "inputs": inputs,
            "counts": tally.counts(),
            "notes": tally.notes,
            "ignored_keys": dict(tally.ignored),
            "content_hash": tally.content.hex(),
        }
        write_description(build.set, build.shards, manifest["content_hash"])
        write_bad_rows(tally, build.set, report)
        if options.held_out:
            num = held_out.write(tally.held_out, build.set / held_out.FILE)
        manifest = store.publish(build.set, folder, manifest, {shard.name: shard.sha256 for shard in build.shards})
    if options.held_out:
        report(
            f"{folder / held_out.FILE}: {num} prompts of {len(tally.held_out)} rows kept out, for evaluation.prompts"
        )
    for key, count in tally.ignored.items():
        report(f"key {key!r} of {count} rows means nothing here and was passed over")
    for note in tally.notes:
        report(f"note: {note}")
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


def _fill(
    build: Build,
    tokenizer: PreTrainedTokenizerBase,
    source: Source,
    options: DataOptions,
    style: Style,
    report: Callable[[str], None],
) -> str:
    """Writes the rows of the source, in its order, from where an earlier build was killed. Returns their form."""
    tally, begun = build.tally, build.tally.rows_in
    form, rows = find_form(source.rows(tally.notes.append), options)
    if form is None:
        return ""
    report(f"{source.name}: rows of the form {form}" + ("" if options.form != "auto" else ", as the first row shows"))
    if begun:
        report(f"going on after {begun} rows ({len(build.shards)} finished files) of an interrupted run")
        next(islice(rows, begun, begun), None)
    if options.held_out and form.name in ("text", "tokens"):
        raise UserError(f"data.held_out is {options.held_out}, but rows of the form {form.name} make no prompts")
    job = Job(
        tokenizer=tokenizer,
        style=style,
        form=form,
        max_length=options.max_length,
        overlong=options.overlong,
        context=context_size(options.overlong, options.split_context, options.max_length),
        held_out=options.held_out,
    )
    for outcome in outcomes(rows, job, options.processes):
        build.add(tally.take(outcome))
        if tally.rows_in % PROGRESS == 0:
            report(f"{tally.rows_in} rows read, {tally.tokens} tokens kept")
    build.finish()
    return str(form)


def _too_poor(counts: dict, options: DataOptions) -> list[str]:
    """Why a folder made with laxer limits cannot be reused; empty if it can."""
    bad, share = counts["bad"], counts["supervised"] / counts["tokens"]
    poor = [f"it has {bad} bad rows, max_bad_rows is {options.max_bad_rows}"] if bad > options.max_bad_rows else []
    lean = share < options.min_supervised
    return poor + ([f"{share:.2%} are supervised, min_supervised is {options.min_supervised}"] if lean else [])


def _check(options: DataOptions) -> Path:
    """The folder to write, if the options make sense together."""
    if not options.conversations or not options.prepared:
        raise UserError("`prepare` needs both --data.conversations (the rows it reads) and --data.prepared (a folder)")
    if options.max_length < 2:
        raise UserError(f"max_length is {options.max_length}; it must be at least 2")
    if not 0 <= options.held_out < 1:
        raise UserError(f"data.held_out is {options.held_out}; give a share of the conversations, below 1, as 0.02")
    if options.max_bad_rows < 0 or options.processes < 1 or not 0 <= options.min_supervised <= 1:
        raise UserError(
            f"max_bad_rows {options.max_bad_rows}, processes {options.processes}, min_supervised "
            f"{options.min_supervised}: at least 0, at least 1, and a share from 0 to 1"
        )
    return _cache(options).building(options.prepared) if is_remote(options.prepared) else Path(options.prepared)


def _cache(options: DataOptions) -> Cache:
    return Cache.of(options.cache, options.cache_gb)


def _reusable_there(options: DataOptions, inputs: dict, report: Callable[[str], None]) -> dict | None:
    """The manifest of the set in an object store, if it is what these inputs make."""
    remote = Remote(options.prepared)
    files = refuse_foreign(remote)
    if (found := read_there(remote)) is None:
        return None
    old = found[0]
    changed = store.changes(old, inputs) or _too_poor(old["counts"], options)
    if not changed:
        sizes = {f"{old['at']}/{name}": known["size"] for name, known in old["files"].items()}
        changed = [f"{name} is missing or cut" for name, size in sizes.items() if files.get(name) != size]
    if changed:
        report(f"rebuilding {remote.name}: {'; '.join(changed)}")
        return None
    report(f"reusing {remote.name}: same conversations, tokenizer, chat template and options ({store.summary(old)})")
    return old


def _style(tokenizer: PreTrainedTokenizerBase, options: DataOptions, end_ids: Sequence[int] | None) -> Style:
    return replace(
        default_style(tokenizer, end_ids),
        arguments=template_arguments(options.enable_thinking, options.template_kwargs, "data"),
        train_on=options.train_on,
        keep_reasoning=options.reasoning == "keep",
    )


def _inputs(
    tokenizer: PreTrainedTokenizerBase,
    tokenizer_hash: str,
    options: DataOptions,
    style: Style,
    source: Source,
    end_ids: Sequence[int] | None,
) -> dict:
    """All that decides the rows, by the names a user knows them by."""
    given = tokenizer.chat_template or ""  # one, or several by name
    template = given if isinstance(given, str) else json.dumps(given, sort_keys=True)
    context = context_size(options.overlong, options.split_context, options.max_length)
    dated = "strftime_now" in template and "date_string" not in style.arguments
    return {
        "conversations": source.fingerprint(),
        "tokenizer": tokenizer_hash,
        "chat template": hashlib.sha256(template.encode()).hexdigest(),
        "template arguments": style.arguments,
        "today's date, which the template writes": date.today().isoformat() if dated else None,
        "end-of-turn tokens": None if end_ids is None else sorted(end_ids),
        "max_length": options.max_length,
        "overlong": options.overlong,
        "split_context": context if options.overlong == "split" else None,
        "held_out": options.held_out,
        "train_on": options.train_on,
        "reasoning": options.reasoning,
        "form": options.form,
        "columns": list(options.columns),
    }
