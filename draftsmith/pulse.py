"""Where a process is: heartbeats for the watchdog, seconds per section for the metrics, spans for a trace.

    with pulse("forward"):
        ...

writes the section's name and a deadline into a small mapped file, which costs about a microsecond. A section that
outlives its deadline means a hung process, and the watchdog, another process, says so: it needs neither this process's
interpreter lock nor a collective's time-out. Sections in which a process waits for others have no deadline.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

BEAT = struct.Struct("<dQQ32s64s")
"""Deadline (monotonic seconds, 0: none), step, process id, section, name of the rank."""
WAITING = ("receive", "wait", "reduce", "exchange", "join")
"""Sections in which a process may wait for another one: who hangs is found there."""
SLOW = ("setup", "compile", "evaluate", "save")
SLOW_SECONDS = 3600.0
FIRST = 3
"""A section's first times may hold a compilation, and count as slow."""


@dataclass
class Pulse:
    """The sections of one process."""

    hang_seconds: float = 30.0
    """A section may last so long, or ten times what it took before if that is more."""
    step: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Time spent by section since the last `take`."""
    trace: list | None = None
    """While tracing: (section, step, begin, end, device events or None)."""
    _longest: dict[str, float] = field(default_factory=dict)
    _times: dict[str, int] = field(default_factory=dict)
    _map: mmap.mmap | None = None
    _name: bytes = b""
    _device_events: bool = False
    _section: str = "between"
    _base: tuple | None = None
    """While tracing a GPU: an event, and the host's time when the stream got to it."""

    def beat_into(self, path: Path, name: str) -> None:
        """From now on, write heartbeats to `path`, under this rank's name."""
        temporary = path.with_suffix(".new")
        temporary.write_bytes(BEAT.pack(0, 0, os.getpid(), b"setup", name.encode()[:64]))
        with open(temporary, "r+b") as file:
            self._map, self._name = mmap.mmap(file.fileno(), BEAT.size), name.encode()[:64]
        os.replace(temporary, path)

    def record(self, *, device_events: bool) -> None:
        """Keep spans from now on; on a GPU also when its stream got to their ends."""
        self.trace, self._device_events = [], device_events
        if device_events:
            import torch

            torch.cuda.synchronize()
            self._base = self._mark(), time.monotonic()

    def spans(self) -> list[tuple[str, int, str, float, float]]:
        """What was kept, as (section, step, "host" or "device", begin, end) in monotonic seconds; nothing more is."""
        kept, self.trace = self.trace or [], None
        found = [(section, step, "host", begin, end) for section, step, begin, end, _ in kept]
        if self._base is not None:
            import torch

            torch.cuda.synchronize()
            base, at = self._base
            for section, step, _, _, marks in kept:
                begin, end = (at + base.elapsed_time(mark) / 1000 for mark in marks)
                found.append((section, step, "device", begin, end))
        return found

    @contextmanager
    def __call__(self, section: str) -> Iterator[None]:
        begin, events, outer = time.monotonic(), self._mark(), self._section
        self._beat(section, begin)
        try:
            yield
        finally:
            end = time.monotonic()
            self.seconds[section] = self.seconds.get(section, 0.0) + end - begin
            self._times[section] = self._times.get(section, 0) + 1
            if self._times[section] > FIRST:
                self._longest[section] = max(self._longest.get(section, 0.0), end - begin)
            if self.trace is not None and (events is not None or not self._device_events):
                self.trace.append((section, self.step, begin, end, (events, self._mark())))
            self._beat(outer, end)

    def take(self) -> dict[str, float]:
        """Seconds by section since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken

    def _beat(self, section: str, now: float) -> None:
        self._section = section
        if self._map is None:
            return
        slow = section in SLOW or (section != "between" and self._times.get(section, 0) < FIRST)
        allowed = SLOW_SECONDS if slow else max(self.hang_seconds, 10 * self._longest.get(section, 0.0))
        deadline = 0.0 if section in WAITING else now + allowed
        self._map[:] = BEAT.pack(deadline, self.step, os.getpid(), section.encode()[:32], self._name)

    def _mark(self):
        if self.trace is None or not self._device_events:
            return None
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
