"""Conversations to tokens: the folder of Arrow files that `train` reads, made, reused or replaced.

`prepare` is strict: a row that cannot be used stops it, with its number, unless `max_bad_rows` allows some; these are
listed in the folder's bad_rows.jsonl. What it leaves out otherwise is counted by reason.
The folder is written beside its place and renamed into it. `manifest.json` in it records what it was made from, so a
second run reuses it, or says what has changed. `datasets.load_from_disk` reads the folder too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftsmith.config import DataOptions
from draftsmith.data import held_out, store
from draftsmith.data.build import Job, find_form, leave_if_only_imported, outcomes
from draftsmith.data.cache import Cache, read_there, refuse_foreign, upload
from draftsmith.data.chat import Style, default_style
from draftsmith.data.modes import missing_mode
from draftsmith.data.remote import Remote, is_remote, shown
from draftsmith.data.shards import Build, write_description
from draftsmith.data.sources import Source, open_source
from draftsmith.data.split import context_size
from draftsmith.data.tally import write_bad_rows
from draftsmith.data.template import require_template, template_arguments, template_text
from draftsmith.errors import UserError

PROGRESS = 5_000
"""Rows between two progress reports."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a set is made from, and how."""

    tokenizer: PreTrainedTokenizerBase
    options: DataOptions
    style: Style
    source: Source
    state: list[tuple]
    """Of the source's files before anything was read of them."""
    inputs: dict
    """All that decides the rows, by the names a user knows them by; a set with the same ones is reused."""
    report: Callable[[str], None]

    @property
    def cache(self) -> Cache:
        return Cache.of(self.options.cache, self.options.cache_gb)


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
    _check(options)
    if options.form not in ("text", "tokens"):  # these are not rendered
        require_template(tokenizer)
    style = _style(tokenizer, options, end_ids)
    source = open_source(
        options.conversations, subset=options.subset, split=options.split, revision=options.revision or ""
    )
    state = source.state()
    inputs = _inputs(tokenizer, tokenizer_hash, options, style, source, end_ids)
    order = Order(
        tokenizer=tokenizer,
        options=options,
        style=style,
        source=source,
        state=state,
        inputs=inputs,
        report=report,
    )
    if not is_remote(options.prepared):
        return _here(order, Path(options.prepared))
    if (old := _reusable_there(order)) is not None:
        return old
    folder = order.cache.building(options.prepared)
    _here(order, folder)
    there = upload(folder, options.prepared, order.cache, report)
    if options.held_out:
        report(f"evaluation.prompts may be {shown(options.prepared)}/{there['at']}/{held_out.FILE}")
    return there


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


def _here(order: Order, folder: Path) -> dict:
    """The manifest of the set in a folder of this machine, as it stands there or made now."""
    report = order.report
    if store.recover(folder):
        report(f"{folder}: put back after an interrupted replacement")
    if (old := store.read_manifest(folder)) is not None:
        changed = store.changes(old, order.inputs, folder) or _too_poor(old["counts"], order.options)
        if not changed:
            store.tidy(folder)
            report(f"reusing {folder}: same conversations, tokenizer, chat template and options ({store.summary(old)})")
            return old
        report(f"rebuilding {folder}: {'; '.join(changed)}")
    with store.claim(folder) as partial:
        build = Build(partial, order.inputs, order.options.max_bad_rows)
        form = _fill(order, build)
        build.tally.refuse_useless(order.source.name, order.options.min_supervised)
        order.source.refuse_changed(order.state)
        manifest = _publish(order, build, form, folder)
    _tell(order, build, manifest, folder)
    return manifest


def _publish(order: Order, build: Build, form: str, folder: Path) -> dict:
    """Completes the build and puts it at its place; its manifest."""
    tally, source = build.tally, order.source
    manifest = {
        "conversations": source.name,
        "hub_sets": [source.name] if source.table is not None else [],
        "form": form,
        "inputs": order.inputs,
        "counts": tally.counts(),
        "notes": tally.notes,
        "ignored_keys": dict(tally.ignored),
        "content_hash": tally.content.hex(),
    }
    write_description(build.set, build.shards, manifest["content_hash"])
    write_bad_rows(tally, build.set, order.report)
    prompts = held_out.write(tally.held_out, build.set / held_out.FILE) if order.options.held_out else 0
    manifest = store.publish(build.set, folder, manifest, {shard.name: shard.sha256 for shard in build.shards})
    if order.options.held_out:
        rows = len(tally.held_out)
        order.report(f"{folder / held_out.FILE}: {prompts} prompts of {rows} rows kept out, for evaluation.prompts")
    return manifest


def _tell(order: Order, build: Build, manifest: dict, folder: Path) -> None:
    """What the user should know of a new set."""
    report, tally = order.report, build.tally
    for key, count in tally.ignored.items():
        report(f"key {key!r} of {count} rows means nothing here and was passed over")
    for note in [*tally.notes, missing_mode(tally.modes)]:
        if note:
            report(f"note: {note}")
    report(f"prepared {folder}: {store.summary(manifest)}")


def _fill(order: Order, build: Build) -> str:
    """Writes the rows of the source, in its order, from where an earlier build was killed. Returns their form."""
    source, options, tally, begun = order.source, order.options, build.tally, build.tally.rows_in
    form, rows = find_form(source.rows(tally.notes.append), options)
    if form is None:
        return ""
    said = "" if options.form != "auto" else ", as the first row shows"
    order.report(f"{source.name}: rows of the form {form}{said}")
    if begun:
        order.report(f"going on after {begun} rows ({len(build.shards)} finished files) of an interrupted run")
        next(islice(rows, begun, begun), None)
    if options.held_out and form.name in ("text", "tokens"):
        raise UserError(f"data.held_out is {options.held_out}, but rows of the form {form.name} make no prompts")
    job = Job(
        tokenizer=order.tokenizer,
        style=order.style,
        form=form,
        max_length=options.max_length,
        overlong=options.overlong,
        context=context_size(options.overlong, options.split_context, options.max_length),
        held_out=options.held_out,
    )
    for outcome in outcomes(rows, job, options.processes):
        build.add(tally.take(outcome))
        if tally.rows_in % PROGRESS == 0:
            order.report(f"{tally.rows_in} rows read, {tally.tokens} tokens kept")
    build.finish()
    return str(form)


def _reusable_there(order: Order) -> dict | None:
    """The manifest of the set in an object store, if it is what these inputs make."""
    remote = Remote(order.options.prepared)
    files = refuse_foreign(remote)
    if (found := read_there(remote)) is None:
        return None
    old = found[0]
    changed = store.changes(old, order.inputs) or _too_poor(old["counts"], order.options)
    if not changed:
        sizes = {f"{old['at']}/{name}": known["size"] for name, known in old["files"].items()}
        changed = [f"{name} is missing or cut" for name, size in sizes.items() if files.get(name) != size]
    if changed:
        order.report(f"rebuilding {remote.name}: {'; '.join(changed)}")
        return None
    same = "same conversations, tokenizer, chat template and options"
    order.report(f"reusing {remote.name}: {same} ({store.summary(old)})")
    return old


def _too_poor(counts: dict, options: DataOptions) -> list[str]:
    """Why a folder made with laxer limits cannot be reused; empty if it can."""
    bad, share = counts["bad"], counts["supervised"] / counts["tokens"]
    poor = [f"it has {bad} bad rows, max_bad_rows is {options.max_bad_rows}"] if bad > options.max_bad_rows else []
    lean = share < options.min_supervised
    return poor + ([f"{share:.2%} are supervised, min_supervised is {options.min_supervised}"] if lean else [])


def _check(options: DataOptions) -> None:
    """UserError unless the options make sense together."""
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
    template = template_text(tokenizer)
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
