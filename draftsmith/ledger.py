"""RUN/ledger.jsonl: the packs and samples of every step, and the hash that the checkpoints record of it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from draftsmith.errors import EnvironmentFault, UserError
from draftsmith.jsonl import is_line_until


class CorruptLedger(UserError):
    """The ledger is not what was written."""


class Ledger:
    """What each step trained on: a JSON line per step, and the SHA-256 of all lines so far.

    `Ledger(path)` begins an empty one, dropping lines of a run that reached no checkpoint. The hash is that of the
    file's bytes, so `sha256sum ledger.jsonl` checks it.
    """

    def __init__(self, path: Path, *, step: int = 0, size: int = 0, digest=None):
        self._path, self._step, self._digest = path, step, digest or hashlib.sha256()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab", buffering=0)
            self._file.truncate(size)
        except OSError as error:
            raise self._fault(error) from error

    @classmethod
    def resume(cls, path: Path, step: int, expected_hash: str) -> Ledger:
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
        return cls(path, step=step, size=size, digest=digest)

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of all lines so far."""
        return self._digest.hexdigest()

    def append(self, step: int, epoch: int, pack_indexes: Sequence[int], sample_ids: Sequence[str]) -> str:
        """Record a step, in one write; returns the new hash. Raises EnvironmentFault when the disk fails."""
        assert step > self._step, f"step {step} after step {self._step}"
        row = {"epoch": epoch, "packs": list(pack_indexes), "samples": list(sample_ids), "step": step}
        line = json.dumps(row, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, "the line was cut")
        except OSError as error:
            raise self._fault(error) from error
        self._digest.update(line)
        self._step = step
        return self.hash

    def sync(self) -> None:
        """Force the lines to disk; call it before the checkpoint that records the hash."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._fault(error) from error

    def close(self) -> None:
        self._file.close()

    def _fault(self, error: OSError) -> EnvironmentFault:
        return EnvironmentFault(f"the ledger {self._path} cannot be written: {error}")
