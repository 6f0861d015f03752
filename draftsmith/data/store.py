"""A prepared folder as a whole: whose it is, whether it is intact, and how a new one takes the place of an old one.

At no moment is there half a folder at the place: the new one grows beside it, in `.NAME.partial/set`, and is renamed.
A kill between the two renames of a replacement leaves the old one in `.NAME.replaced`, from where `recover` fetches it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from draftsmith.data.shards import file_hash, has_finished_files, sync, write_json
from draftsmith.errors import DataError, UserError

FORMAT = "draftsmith prepared conversations"
SCHEMA = 3
"""Raised whenever the same conversations would be stored in another way; older folders are then rebuilt."""
MANIFEST = "manifest.json"
FOREIGN = "{} exists and was not made by `draftsmith prepare`; name another folder"
SAMPLES, SAMPLE = 16, 65_536
"""Pieces of each file, and their bytes, that are compared whenever a folder is opened."""
SHOWN = ("max_length", "overlong", "split_context", "held_out", "train_on", "reasoning", "form", "template arguments")
"""Inputs whose old and new values a cache miss shows."""


def read_manifest(folder: Path) -> dict | None:
    """None if there is nothing at `folder`. DataError if there is something that `prepare` did not make."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    file = folder / MANIFEST
    if not file.is_file():
        raise DataError(FOREIGN.format(folder))
    return parse_manifest(file.read_bytes(), str(folder))


def parse_manifest(content: bytes, name: str) -> dict:
    """DataError if this is no manifest of `prepare`."""
    try:
        manifest = json.loads(content)
    except ValueError as error:
        raise DataError(FOREIGN.format(name)) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(FOREIGN.format(name))
    return manifest


def damage(manifest: dict, folder: Path, *, thorough: bool = False) -> str | None:
    """What is wrong with the folder of this manifest, if anything.

    Sizes and samples of the content, so that opening a large set stays quick; all of the content if `thorough`.
    """
    if manifest["schema"] != SCHEMA:
        return f"its format is version {manifest['schema']}, this program reads {SCHEMA}"
    for name, known in manifest["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != known["size"]:
            return f"{name} is damaged or missing ({known['size']} bytes recorded)"
        if samples_hash(file) != known["samples"] or (thorough and file_hash(file) != known["sha256"]):
            return f"{name} is damaged (its content is not what was written)"
    return None


def samples_hash(file: Path) -> str:
    """SHA-256 of up to `SAMPLES` pieces of a file, evenly spaced, the first and the last among them."""
    last = max(0, file.stat().st_size - SAMPLE)
    places = sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)})
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for place in places:
            stream.seek(place)
            digest.update(stream.read(SAMPLE))
    return digest.hexdigest()


def changes(old: dict, inputs: dict, folder: Path | None = None) -> list[str]:
    """Why the old set cannot be reused; empty if it can. Its files are compared if `folder` says where they are."""
    if old["schema"] != SCHEMA:
        return [f"its format is version {old['schema']}, now {SCHEMA}"]
    before = old["inputs"]
    changed = [
        f"{name} changed ({before.get(name)} -> {value})" if name in SHOWN else f"{name} changed"
        for name, value in inputs.items()
        if before.get(name) != value
    ]
    broken = damage(old, folder, thorough=True) if folder else None
    return changed + ([broken] if broken else [])


def summary(manifest: dict) -> str:
    counts = manifest["counts"]
    dropped = "".join(f", {count} dropped ({reason})" for reason, count in counts["dropped"].items())
    cut = f", {counts['cut']} cut" if counts["cut"] else ""
    cut += f", {counts['bad']} bad rows" if counts["bad"] else ""
    cut += f", {counts['held_out']} rows held out" if counts["held_out"] else ""
    cut += f", {counts['extra']} of them further turns or pieces of a row" if counts["extra"] else ""
    share = counts["supervised"] / counts["tokens"]
    return f"{counts['kept']} rows{dropped}{cut}, {counts['tokens']} tokens, {share:.1%} supervised"


def _beside(folder: Path, what: str) -> Path:
    real = folder.resolve()  # a link to another disk stays a link, and the rename within that disk
    return real.parent / f".{real.name}.{what}"


def recover(folder: Path) -> bool:
    """Ends a replacement that was killed half-way: the old folder goes back if the new one did not arrive."""
    replaced = _beside(folder, "replaced")
    if folder.exists() or not replaced.exists():
        return False
    os.rename(replaced, folder.resolve())
    return True


@contextmanager
def claim(folder: Path) -> Iterator[Path]:
    """The folder beside `folder` where it is built, for this process alone; what a killed build left is in it.

    It is gone afterwards, whether `folder` was published or the data were refused; an interrupted build leaves what it
    has finished.
    """
    partial = _beside(folder, "partial")
    partial.mkdir(parents=True, exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        # The lock is on the folder itself, so what a killed run left is free to take over.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise UserError(f"{folder} is being prepared by another process; wait for it") from error
    keep = False
    try:
        yield partial
    except BaseException as error:
        keep = has_finished_files(partial) and not isinstance(error, DataError)
        raise
    finally:
        if not keep:
            shutil.rmtree(partial, ignore_errors=True)
        os.close(handle)


def tidy(folder: Path) -> None:
    """Removes what a build that was killed after publishing left beside `folder`; not one that is to go on."""
    partial = _beside(folder, "partial")
    if partial.is_dir() and not (partial / "set").exists():
        with suppress(UserError), claim(folder):  # another process may have begun with it
            pass


def publish(built: Path, folder: Path, manifest: dict, hashes: dict[str, str]) -> dict:
    """Completes and writes the manifest, then renames `built` to `folder`; an older folder is deleted last.

    `hashes`: SHA-256 of files that are known already. Returns the complete manifest. DataError if by now something
    stands there that `prepare` did not make.
    """
    read_manifest(folder)
    folder = folder.resolve()
    (built / MANIFEST).unlink(missing_ok=True)
    files = {
        file.name: {
            "size": file.stat().st_size,
            "sha256": hashes.get(file.name) or file_hash(file),
            "samples": samples_hash(file),
        }
        for file in sorted(built.iterdir())
    }
    manifest = {"format": FORMAT, "schema": SCHEMA, **manifest, "files": files}
    write_json(built / MANIFEST, manifest)
    replaced = _beside(folder, "replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        os.rename(folder, replaced)
    os.rename(built, folder)
    sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return manifest
