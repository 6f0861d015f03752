"""RUN/ledger.jsonl: the packs and samples of every step, and the hash that the checkpoints record of it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from draftsmith.errors import EnvironmentFault, UserError
from draftsmith.jsonl import is_line_until


class CorruptLedger(UserError):
    """The ledger is not what was written."""


class Ledger:
    """What each step trained on: a JSON line per step, and the SHA-256 of all lines so far.

    `Ledger(path)` begins an empty one, dropping lines of a run that reached no checkpoint. The hash is that of the
    file's bytes, so `sha256sum ledger.jsonl` checks it.

    Lines that the disk does not take are kept in memory until it does: `warn` hears of it once, and `sync` insists.
    """

    def __init__(
        self, path: Path, *, warn: Callable[[str], None] = print, step: int = 0, size: int = 0, digest=None
    ) -> None:
        self._path, self._step, self._digest, self._warn = path, step, digest or hashlib.sha256(), warn
        self._pending = b""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab", buffering=0)
            self._file.truncate(size)
        except OSError as error:
            raise self._fault(error) from error

    @classmethod
    def resume(cls, path: Path, step: int, expected_hash: str, *, warn: Callable[[str], None] = print) -> Ledger:
        """Reopen at `step`: lines of later steps are cut off, torn ones too.

        Raises CorruptLedger, the file untouched, if the lines up to `step` do not hash to `expected_hash`.
        """
        digest, size = hashlib.sha256(), 0
        if path.exists():
            with open(path, "rb") as lines:
                for line in lines:
                    if not is_line_until(line, step):
                        break
                    digest.update(line)
                    size += len(line)
        if digest.hexdigest() != expected_hash:
            raise CorruptLedger(
                f"{path}: the lines up to step {step} hash to {digest.hexdigest()[:12]}, but the checkpoint recorded "
                f"{expected_hash[:12]}; the ledger was changed or is of another run. Restore it, or start a new run."
            )
        return cls(path, warn=warn, step=step, size=size, digest=digest)

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of all lines so far."""
        return self._digest.hexdigest()

    def append(self, step: int, epoch: int, pack_indexes: Sequence[int], sample_ids: Sequence[str]) -> str:
        """Record a step; returns the new hash."""
        assert step > self._step, f"step {step} after step {self._step}"
        row = {"epoch": epoch, "packs": list(pack_indexes), "samples": list(sample_ids), "step": step}
        line = json.dumps(row, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        self._digest.update(line)
        self._step = step
        waiting = bool(self._pending)
        self._pending += line
        try:
            self._write()
        except OSError as error:
            if not waiting:
                self._warn(f"{self._fault(error)}. Its lines are kept in memory until the next save; training goes on.")
        return self.hash

    def sync(self) -> None:
        """Force the lines to disk; call it before the checkpoint that records the hash. Raises EnvironmentFault."""
        try:
            self._write()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._fault(error) from error

    def _write(self) -> None:
        """What is pending; half a line may reach the disk, and its other half follows later."""
        if self._pending:
            self._pending = self._pending[self._file.write(self._pending) :]
        if self._pending:
            raise OSError(errno.ENOSPC, "the line was cut")

    def close(self) -> None:
        self._file.close()

    def _fault(self, error: OSError) -> EnvironmentFault:
        return EnvironmentFault(f"the ledger {self._path} cannot be written: {error}")
