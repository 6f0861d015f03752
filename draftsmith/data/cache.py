"""Prepared sets in an object store: written there with the manifest last, read through a folder on this machine.

There, a set is `manifest.json` and a folder of files whose name is in it, from the manifest's hash: so a new set never
writes over files of an old one, and whoever reads sees the old set or the new one. Here, each set has a folder of its
own, named by the hash of its manifest. The shuffled order of training takes rows from everywhere in a set, so all of
it is fetched before the first step: files side by side, in pieces, continued after a kill, and compared with the
SHA-256 in the manifest before they are used. A lock beside each folder lets processes fetch in turn and keeps sets in
use from being removed when others need the room.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from draftsmith.data import store
from draftsmith.data.remote import Remote, pieces
from draftsmith.data.shards import file_hash, sync, write_whole
from draftsmith.errors import DataError, EnvironmentFault, UserError

AT_ONCE = 4
"""Files that are fetched side by side."""
PLAIN = re.compile(r"[\w-][\w.-]*")
"""Names that a file of a set may have; a manifest comes from elsewhere and is not trusted."""
VERSION = re.compile(r"[0-9a-f]{16}")
GB = 1_000_000_000
PAUSE = 0.2
"""Seconds until a set is looked at again that another process is fetching."""


@dataclass(frozen=True)
class Cache:
    """Where sets of object stores are kept on this machine, and how much of them."""

    folder: Path
    limit: int
    """Bytes."""

    @classmethod
    def of(cls, folder: str, gigabytes: float) -> Cache:
        if not folder or gigabytes <= 0:
            raise UserError(f"data.cache {folder!r}, data.cache_gb {gigabytes}: a folder, and more than 0")
        return cls(Path(folder).expanduser(), int(gigabytes * GB))

    def place(self, content: bytes) -> Path:
        """Where the set of this manifest is kept."""
        return self.folder / hashlib.sha256(content).hexdigest()[:32]

    def building(self, url: str) -> Path:
        """Where a set for this URL is made before it is uploaded."""
        return self.folder / "building" / hashlib.sha256(url.encode()).hexdigest()[:16]


class Held:
    """A set's folder on this machine, which nobody removes as long as this object lives or until it is released."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, -1
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)

    def share(self) -> None:
        """Holds it together with others; waits while one of them fetches the set."""
        fcntl.flock(self.lock, fcntl.LOCK_SH)
        self.folder.mkdir(exist_ok=True)  # if it was removed until the lock was ours

    def own(self) -> bool:
        """Holds it alone, if nobody else does; otherwise not at all."""
        fcntl.flock(self.lock, fcntl.LOCK_UN)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.folder.mkdir(exist_ok=True)
        return True

    def release(self) -> None:
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    def __del__(self) -> None:
        self.release()


def read_there(remote: Remote) -> tuple[dict, bytes] | None:
    """The manifest at a URL and its bytes; None if there is none. DataError if what is there is not `prepare`'s."""
    if not remote.exists(store.MANIFEST):
        return None
    content = remote.read_all(store.MANIFEST)
    manifest = store.parse_manifest(content, remote.name)
    if manifest["schema"] == store.SCHEMA:
        names = [*manifest["files"], manifest["at"]] if isinstance(manifest.get("at"), str) else [""]
        if not all(PLAIN.fullmatch(name) for name in names):
            raise DataError(f"{remote.name}: its manifest names files that no set has")
    return manifest, content


def fetch(url: str, cache: Cache, report: Callable[[str], None]) -> Held | None:
    """The set at a URL, whole and compared with its manifest; None if there is none."""
    remote = Remote(url)
    if (found := read_there(remote)) is None:
        return None
    manifest, content = found
    if manifest["schema"] != store.SCHEMA:
        raise DataError(
            f"{remote.name}: its format is version {manifest['schema']}, this program reads {store.SCHEMA}; "
            "run `draftsmith prepare` again"
        )
    size = sum(known["size"] for known in manifest["files"].values())
    if size > cache.limit:
        raise UserError(
            f"{remote.name} has {_size(size)}, more than data.cache may hold ({_size(cache.limit)}); "
            "raise --data.cache_gb"
        )
    held = Held(cache.place(content))
    try:
        held.share()
        while _missing(manifest, held.folder):
            if held.own():  # otherwise another process is about to fetch it: wait for that one, and look again
                _complete(remote, manifest, content, size, held.folder, cache, report)
            else:
                time.sleep(PAUSE)
            held.share()
    except BaseException:
        held.release()  # at once: the error's traceback keeps the object alive
        raise
    os.utime(held.folder)
    return held


def _missing(manifest: dict, folder: Path) -> dict[str, dict]:
    """Files that are not here, or not as they should be; the manifest itself counts too."""
    missing = {name: known for name, known in manifest["files"].items() if _differs(folder / name, known)}
    return missing if (folder / store.MANIFEST).is_file() else missing | {store.MANIFEST: {"size": 0}}


def _complete(
    remote: Remote,
    manifest: dict,
    content: bytes,
    size: int,
    folder: Path,
    cache: Cache,
    report: Callable[[str], None],
) -> None:
    """Fetches what is missing in the set's folder, which is this process's alone meanwhile."""
    missing = _missing(manifest, folder)
    missing.pop(store.MANIFEST, None)
    _make_room(cache, folder, size, missing)
    more = sum(known["size"] for known in missing.values())
    report(f"fetching {len(missing)} files, {_size(more)}, of {remote.name} to {folder}")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda one: _fetch_file(remote, manifest["at"], folder, *one), missing.items()))
    write_whole(folder / store.MANIFEST, content)


def _differs(file: Path, known: dict) -> bool:
    return not file.is_file() or file.stat().st_size != known["size"] or store.samples_hash(file) != known["samples"]


def _fetch_file(remote: Remote, version: str, folder: Path, name: str, known: dict) -> None:
    file, part = folder / name, folder / f"{name}.part"
    for attempt in range(2):  # what an earlier run left of it may be of no use
        if not part.exists() or part.stat().st_size > known["size"]:
            part.write_bytes(b"")
        with part.open("ab") as stream:
            for start, end in pieces(known["size"], stream.tell()):
                stream.write(remote.read(start, end, f"{version}/{name}"))
        sync(part)
        if file_hash(part) == known["sha256"]:
            os.rename(part, file)
            sync(folder)
            return
        part.unlink()
        if attempt:
            raise DataError(
                f"{remote.name}/{version}/{name} is damaged: its content is not what the manifest says; upload the set "
                "again (draftsmith prepare)"
            )


def _make_room(cache: Cache, keep: Path, size: int, missing: dict) -> None:
    """Removes sets that nobody uses, the longest unused first, until there is room for one of `size` bytes."""
    more = sum(known["size"] for known in missing.values()) - sum(one.stat().st_size for one in keep.glob("*.part"))
    others = [
        one for one in cache.folder.iterdir() if one.is_dir() and one.with_suffix(".lock").exists() and one != keep
    ]
    sizes = {one: sum(file.stat().st_size for file in one.iterdir()) for one in others}
    for other in sorted(others, key=lambda one: one.stat().st_mtime):
        enough = sum(sizes.values()) + size <= cache.limit and shutil.disk_usage(cache.folder).free >= more
        if enough:
            break
        lock = os.open(other.with_suffix(".lock"), os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # in use
        else:
            shutil.rmtree(other)
            del sizes[other]
        finally:
            os.close(lock)
    if sum(sizes.values()) + size > cache.limit:
        raise UserError(
            f"sets in use fill {cache.folder} with {_size(sum(sizes.values()))}, and this one has {_size(size)}; "
            "raise --data.cache_gb, or give another --data.cache"
        )
    if (free := shutil.disk_usage(cache.folder).free) < more:
        raise EnvironmentFault(f"{cache.folder} needs {_size(more)} more, and {_size(free)} are free on that disk")


def upload(local: Path, url: str, cache: Cache, report: Callable[[str], None]) -> dict:
    """Puts the prepared folder `local` at a URL, in the place of an older set; it then becomes the cache's copy.

    Returns the manifest there. A killed upload is continued by calling this again.
    """
    remote = Remote(url)
    before = refuse_foreign(remote)
    manifest = store.read_manifest(local)
    assert manifest is not None
    version = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
    sizes = {name: known["size"] for name, known in manifest["files"].items()}
    waiting = [name for name, size in sizes.items() if before.get(f"{version}/{name}") != size]
    total = _size(sum(sizes[name] for name in waiting))
    report(f"uploading {len(waiting)} of {len(sizes)} files, {total}, to {remote.name}")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda name: remote.upload(str(local / name), f"{version}/{name}"), waiting))
    there = remote.files()
    if wrong := [name for name, size in sizes.items() if there.get(f"{version}/{name}") != size]:
        raise EnvironmentFault(f"{remote.name}/{version}/{wrong[0]} has not arrived as a whole; run it again")
    content = (json.dumps(manifest | {"at": version}, indent=2) + "\n").encode()
    remote.write(store.MANIFEST, content)
    for name in there:
        if name != store.MANIFEST and name.split("/")[0] != version:
            remote.remove(name)  # of the older set; `refuse_foreign` has seen that it is one
    write_whole(local / store.MANIFEST, content)
    held = Held(cache.place(content))
    if held.own():
        shutil.rmtree(held.folder)
        os.rename(local, held.folder)
    else:
        shutil.rmtree(local)  # the very set is here already, and in use
    held.release()
    return manifest | {"at": version}


def refuse_foreign(remote: Remote) -> dict[str, int]:
    """The files at a URL. DataError if there are others than those of a prepared set, whole or half uploaded."""
    files = remote.files()
    names = [name for name in files if name != store.MANIFEST]
    if any(not VERSION.fullmatch(name.split("/")[0]) or name.count("/") != 1 for name in names):
        raise DataError(store.FOREIGN.format(remote.name))
    read_there(remote)
    return files


def _size(number: int) -> str:
    return f"{number / GB:.1f} GB" if number >= GB / 10 else f"{number / 1_000_000:.1f} MB"
