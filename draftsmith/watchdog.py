"""A process beside the ranks of one host that names the one that hangs, and ends what a killed launcher left behind.

    python -m draftsmith.watchdog FOLDER LAUNCHER

FOLDER holds the ranks' heartbeats (see `pulse`); LAUNCHER is the process that started them. A rank that is stopped, or
whose section has outlived its deadline, is named with its section and step, asked for its stacks, and killed, so that
the launcher can end or restart the rest. Once the launcher is gone, ranks that have not ended by themselves are killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from draftsmith.pulse import BEAT

PERIOD = 0.5
STOPPED_SECONDS = 10.0
"""A stopped process may be somebody's debugger at work; for so long it is let be."""
ORPHAN_SECONDS = 7.0
"""Time that ranks get for a last checkpoint after their launcher has died."""


@dataclass(frozen=True)
class Beat:
    """The last heartbeat of a rank."""

    deadline: float
    step: int
    pid: int
    section: str
    name: str

    @classmethod
    def read(cls, path: Path) -> Beat:
        deadline, step, pid, section, name = BEAT.unpack(path.read_bytes())
        return cls(deadline, step, pid, section.rstrip(b"\0").decode(), name.rstrip(b"\0").decode())

    @property
    def state(self) -> str:
        """The letter of /proc: R, S, D, T (stopped), Z, or "" if the process is gone."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""


def watch(folder: Path, launcher: int) -> None:
    """Until every rank has ended (or the folder is gone)."""
    stopped: dict[str, float] = {}
    orphaned_at = 0.0
    while folder.is_dir():
        beats = [Beat.read(path) for path in sorted(folder.glob("*.beat"))]
        alive = [beat for beat in beats if beat.state not in ("", "Z")]
        if beats and not alive:
            shutil.rmtree(folder, ignore_errors=True)  # of a rank that could not do it
            return
        now = time.monotonic()
        if not _exists(launcher):
            orphaned_at = orphaned_at or now
            if now - orphaned_at > ORPHAN_SECONDS:
                _end(alive, "its launcher is gone")
        for beat in alive:
            since = stopped.setdefault(beat.name, now) if beat.state == "T" else stopped.pop(beat.name, now)
            if now - since > STOPPED_SECONDS:
                _end([beat], f"it has been stopped (SIGSTOP) for {now - since:.0f} s")
            elif beat.state != "T" and 0 < beat.deadline < now:
                _end([beat], f"it is {now - beat.deadline:.0f} s past the time that this section may take")
        time.sleep(PERIOD)


def _end(beats: list[Beat], reason: str) -> None:
    for beat in beats:
        print(
            f"draftsmith: {beat.name} hangs in section {beat.section!r} of step {beat.step} (process {beat.pid}): "
            f"{reason}. It is killed; the run continues from its last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        try:
            if beat.state != "T":
                os.kill(beat.pid, signal.SIGUSR1)  # faulthandler prints the stacks
                time.sleep(1.0)
            os.kill(beat.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended by itself meanwhile


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    watch(Path(sys.argv[1]), int(sys.argv[2]))
