"""Checkpoints, and the fence against a second writer.

    RUN/generation                    token of the process that owns the run
    RUN/checkpoints/step-00000500/    model.safetensors, optimizer.safetensors, documents, manifest.json

A checkpoint appears under its name only when complete: it is written to a `.tmp-` folder, every file is fsynced, the
manifest comes last, all is read back, and one rename publishes it. safetensors alone loads a flipped bit without
complaint, so the manifest holds the SHA-256 of every file and of itself, and nothing is handed out before all of them
agree. There is no pickle, so a checkpoint cannot run code.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.errors import EnvironmentFault, UserError

MAGIC = "draftsmith-checkpoint"
FORMAT = 1
MANIFEST = "manifest.json"
_FOLDER = re.compile(r"step-[0-9]{8,}")
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class CorruptCheckpoint(UserError):
    """A checkpoint is not what was written. Names the file and the reason."""


class Superseded(UserError):
    """Another process has claimed the run, so this one may not write to it any more."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose every byte has been verified."""

    path: Path
    step: int
    run_id: str
    generation: str
    facts: dict
    """What `save` was given, after a trip through JSON: tuples are lists, keys are strings."""
    files: tuple[str, ...]

    def tensors(self, stem: str, device: str = "cpu") -> dict[str, Tensor]:
        """The named tensors of `stem`.safetensors, on `device`."""
        name = self._known(f"{stem}.safetensors")
        try:
            return load_file(self.path / name, device=device)
        except (SafetensorError, OSError) as error:
            raise _corrupt(self.path, name, str(error)) from error

    def document(self, name: str) -> str:
        """The text of a document such as config.json."""
        return (self.path / self._known(name)).read_bytes().decode("utf-8")

    def _known(self, name: str) -> str:
        if name not in self.files:
            raise _corrupt(self.path, name, f"not part of it (it holds {', '.join(self.files)})")
        return name


def save(
    folder_of_checkpoints: Path,
    *,
    step: int,
    run_id: str,
    generation: str,
    tensors: dict[str, dict[str, Tensor]],
    documents: dict[str, str],
    facts: dict,
) -> Path:
    """Write, read back and publish a checkpoint; returns its folder. All or nothing, even under SIGKILL.

    `tensors` maps a file stem to named tensors, `documents` a file name to text, `facts` is JSON without NaN.
    Raises EnvironmentFault when the disk fails (nothing of the attempt stays), Superseded when another process has
    claimed the run, UserError when a valid checkpoint of this step exists already.
    """
    facts = json.loads(json.dumps(facts, allow_nan=False))  # the form in which it will be read; a fault shows early
    names = [f"{stem}.safetensors" for stem in tensors] + list(documents)
    for name in [generation, *names]:
        if not _SAFE_NAME.fullmatch(name) or name == MANIFEST or names.count(name) > 1:
            raise ValueError(f"{name!r} is not a plain file name, or is used twice")
    target = folder_of_checkpoints / f"step-{step:08d}"
    temporary = folder_of_checkpoints / f".tmp-{generation}-{target.name}-{secrets.token_hex(4)}"
    run = folder_of_checkpoints.parent
    try:
        _make_folder(folder_of_checkpoints)
        _clear_the_way(target)
        os.mkdir(temporary)
        for stem, named in tensors.items():
            _write_tensors(temporary / f"{stem}.safetensors", named)
        for name, text in documents.items():
            _write(temporary / name, text.encode("utf-8"))
        files = {name: _measure(temporary / name) for name in names}
        head = {"magic": MAGIC, "format": FORMAT, "step": step, "run_id": run_id, "generation": generation}
        _write(temporary / MANIFEST, _seal({**head, "facts": facts, "files": files}))
        _check_listing(temporary, _read_manifest(temporary))
        _fsync(temporary)
        _check_fence(run, generation)
        os.rename(temporary, target)
        _fsync(folder_of_checkpoints)
    except (OSError, SafetensorError, CorruptCheckpoint) as error:
        _check_fence(run, generation)  # a new owner removes our temporary folder: then that is the reason
        raise EnvironmentFault(
            f"checkpoint {target.name} could not be written: {error}. Earlier checkpoints in {folder_of_checkpoints} "
            "are intact; free space or repair the disk, then start the same command again."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already after the rename
    return target


def load(path: Path) -> Checkpoint:
    """Verify every byte of the checkpoint in folder `path`. Raises CorruptCheckpoint naming the file and the reason."""
    manifest = _read_manifest(path)
    if path.name != f"step-{manifest['step']:08d}":
        raise _corrupt(path, MANIFEST, f"it is of step {manifest['step']}, so the folder was renamed or mixed up")
    _check_listing(path, manifest)
    for name, expected in manifest["files"].items():
        try:
            found = _measure(path / name)
        except OSError as error:
            raise _corrupt(path, name, f"cannot be read ({error.strerror})") from error
        if found != expected:
            raise _corrupt(path, name, f"SHA-256 is {found['sha256'][:12]}, not {expected['sha256'][:12]}")
    return Checkpoint(
        path=path,
        step=manifest["step"],
        run_id=manifest["run_id"],
        generation=manifest["generation"],
        facts=manifest["facts"],
        files=tuple(manifest["files"]),
    )


def newest_valid(
    folder: Path, *, run_id: str | None = None, report: Callable[[str], None] = print
) -> Checkpoint | None:
    """The newest checkpoint that verifies (and is of `run_id`), or None. Each one passed over is reported by name.

    Also removes what killed saves left behind. An unfinished folder of the generation that owns the run is left alone:
    its writer may be alive.
    """
    _remove_leftovers(folder, report)
    candidates = _candidates(folder)
    for path in candidates:
        try:
            found = load(path)
        except CorruptCheckpoint as error:
            report(f"skipped a damaged checkpoint: {error}")
            continue
        if run_id is None or found.run_id == run_id:
            return found
        report(f"skipped checkpoint {path.name}: it is of run {found.run_id}, not of {run_id}")
    if candidates:
        report(f"none of the {len(candidates)} checkpoints in {folder} can be used")
    return None


def prune(
    folder: Path, keep: int, best: str | None, *, run_id: str | None = None, verified: Collection[str] = ()
) -> list[str]:
    """Delete checkpoints older than the newest `keep` valid ones, except `best`; returns the names deleted.

    Only folders with an intact manifest of the run (`run_id`, or that of the newest valid one) and no file besides
    those it lists are deleted. Nothing is, unless `keep` (at least 2) newer ones verify now; of those in `verified`,
    which this process has written or read before, only manifest and sizes are looked at again.
    """
    if keep < 2:
        raise UserError(f"checkpoint.keep is {keep}; at least 2 are kept, so that one damaged file never ends a run")
    valid = 0
    deleted = []
    for path in _candidates(folder):
        try:
            if valid < keep and path.name not in verified:
                load(path)
            manifest = _read_manifest(path)
            _check_listing(path, manifest)
            if valid < keep:
                run_id = run_id or manifest["run_id"]
                valid += manifest["run_id"] == run_id
                continue
        except CorruptCheckpoint:
            continue  # `newest_valid` reports damage; here it only means: not ours to delete
        if path.name != best and manifest["run_id"] == run_id:
            # Renamed first: a kill half-way must not leave half a checkpoint under its name.
            doomed = folder / f".tmp-pruned-{path.name}-{secrets.token_hex(4)}"
            os.rename(path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)  # `newest_valid` removes the rest, if any
            deleted.append(path.name)
    return deleted


def claim(run: Path) -> str:
    """Make this process the owner of the run; returns its generation token. Earlier owners are fenced from now on."""
    token = secrets.token_hex(8)
    temporary = run / f".generation-{token}"
    try:
        _make_folder(run)
        _write(temporary, f"{token}\n".encode())
        os.replace(temporary, run / "generation")
        _fsync(run)
    except OSError as error:
        raise EnvironmentFault(f"the run folder {run} cannot be written: {error}") from error
    return token


def check_generation(run: Path, token: str) -> None:
    """Raise Superseded unless `token` is still the one that owns the run."""
    owner = _owner(run)
    if owner != token:
        happened = f"another process has claimed the run since (generation {owner})" if owner else "its file is gone"
        raise Superseded(
            f"this process no longer owns {run}: {happened}. It stops without writing; leave one process per run."
        )


def _candidates(folder: Path) -> list[Path]:
    """Everything named like a checkpoint, newest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _FOLDER.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def _remove_leftovers(folder: Path, report: Callable[[str], None]) -> None:
    owner = _owner(folder.parent)
    for path in sorted(folder.glob(".tmp-*")):
        alive = owner is not None and path.name.startswith(f".tmp-{owner}-")
        if path.is_symlink() or not path.is_dir() or alive:
            continue
        shutil.rmtree(path, ignore_errors=True)
        report(f"{'could not remove' if path.exists() else 'removed'} the unfinished checkpoint {path.name}")


def _clear_the_way(target: Path) -> None:
    """Move a damaged checkpoint of this name aside (it is evidence); refuse to touch a valid one."""
    if not os.path.lexists(target):
        return
    try:
        load(target)
    except CorruptCheckpoint:
        os.rename(target, target.with_name(f"damaged-{target.name}-{secrets.token_hex(4)}"))
        return
    raise UserError(f"{target} exists and is valid and is never overwritten. Resume from it, or move it away.")


def _owner(run: Path) -> str | None:
    try:
        return (run / "generation").read_text("utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None


def _check_fence(run: Path, generation: str) -> None:
    """`check_generation` for a run that anybody has claimed; a loose folder of checkpoints has no owner."""
    if _owner(run) is not None:
        check_generation(run, generation)


def _write_tensors(path: Path, named: dict[str, Tensor]) -> None:
    """Write a safetensors file, flush it to disk, and compare what can be read back with memory, bit for bit."""
    host = {name: tensor.detach().to("cpu").contiguous() for name, tensor in named.items()}
    save_file(host, path, metadata={"format": "pt"})
    os.chmod(path, path.parent.stat().st_mode & 0o666)  # safetensors makes it private; follow the umask instead
    _fsync(path)
    with safe_open(path, framework="pt") as written:
        for name, tensor in host.items():
            found = written.get_tensor(name)
            same = found.dtype == tensor.dtype and found.shape == tensor.shape
            if not same or not torch.equal(_raw(found), _raw(tensor)):
                raise OSError(errno.EIO, f"tensor {name} reads back differently", path.name)


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaN equals itself and -0 differs from 0."""
    return tensor.reshape(-1).view(torch.uint8)


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if path.read_bytes() != data:
        raise OSError(errno.EIO, "reads back differently", path.name)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    """Create the folder and its parents, each durable in the one above."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _fsync(folder.parent)


def _measure(path: Path) -> dict:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": os.fstat(file.fileno()).st_size, "sha256": digest}


def _render(value: dict) -> str:
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _seal(body: dict) -> bytes:
    """The manifest's bytes: the body, and the SHA-256 of the body."""
    digest = hashlib.sha256(_render(body).encode()).hexdigest()
    return _render({**body, "sha256": digest}).encode()


def _read_manifest(folder: Path) -> dict:
    """Parse a manifest and check everything that needs no other file."""
    path = folder / MANIFEST
    try:
        if folder.is_symlink() or path.is_symlink():
            raise _corrupt(folder, MANIFEST, "links are refused")
        if not path.is_file():
            raise _corrupt(folder, MANIFEST, "missing")
        manifest, sealed = _parse(path.read_bytes())
    except OSError as error:
        raise _corrupt(folder, MANIFEST, f"cannot be read ({error.strerror})") from error
    if manifest.get("magic") != MAGIC:
        raise _corrupt(folder, MANIFEST, "not that of a draftsmith checkpoint")
    if manifest.get("format") != FORMAT:
        raise _corrupt(folder, MANIFEST, f"format {manifest.get('format')!r}; this version reads format {FORMAT}")
    if not sealed:
        raise _corrupt(folder, MANIFEST, "changed since it was written")
    if not _is_well_formed(manifest):
        raise _corrupt(folder, MANIFEST, "a field has the wrong type, or a file name is not a plain one")
    return manifest


def _parse(data: bytes) -> tuple[dict, bool]:
    """The JSON object in `data` (empty if there is none), and whether `_seal` makes exactly these bytes of it."""
    try:
        manifest = json.loads(data)
        if not isinstance(manifest, dict):
            return {}, False
        return manifest, data == _seal({key: value for key, value in manifest.items() if key != "sha256"})
    except (ValueError, RecursionError):  # not JSON, nested without end, or a number that JSON cannot hold
        return {}, False


def _is_well_formed(manifest: dict) -> bool:
    fields = {"step": int, "run_id": str, "generation": str, "facts": dict, "files": dict}
    if any(type(manifest.get(name)) is not kind for name, kind in fields.items()) or manifest["step"] < 0:
        return False
    for name, entry in manifest["files"].items():
        if not _SAFE_NAME.fullmatch(name) or name == MANIFEST or not isinstance(entry, dict):
            return False
        if type(entry.get("size")) is not int or not _SHA256.fullmatch(str(entry.get("sha256"))):
            return False
    return True


def _check_listing(folder: Path, manifest: dict) -> None:
    """The folder holds the listed files, as regular files of the listed sizes, and nothing else."""
    files = manifest["files"]
    try:
        entries = {entry.name: entry for entry in os.scandir(folder)}
        for name in sorted(entries.keys() | files.keys()):
            if name not in entries:
                raise _corrupt(folder, name, "missing")
            if name not in files and name != MANIFEST:
                raise _corrupt(folder, name, "not part of it")
            if not entries[name].is_file(follow_symlinks=False):
                raise _corrupt(folder, name, "not a regular file; links are refused")
            size = entries[name].stat(follow_symlinks=False).st_size
            if name != MANIFEST and size != files[name]["size"]:
                raise _corrupt(folder, name, f"has {size:,} bytes, not {files[name]['size']:,}")
    except OSError as error:
        raise _corrupt(folder, error.filename or ".", f"cannot be read ({error.strerror})") from error


def _corrupt(folder: Path, name: str, reason: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{folder / name}: {reason}. Use another checkpoint, or move this folder away.")
