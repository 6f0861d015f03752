"""RUN/trace.json: what every rank did in some steps, for chrome://tracing or Perfetto.

A rank has two tracks: where its host was, and on a GPU when its stream got there. Times of one host are of one clock;
those of several hosts are put together by the time of day, so they are as good as the hosts' clocks.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from draftsmith.ranks import Ranks

SKIPPED = 3
"""Steps before the first one of the trace: these may compile."""


class Trace:
    """Records the spans of some steps of this rank; call `at` before each step, and `finish` after the last."""

    def __init__(self, ranks: Ranks, num_steps: int, first_step: int, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self.steps = range(first_step + SKIPPED, first_step + SKIPPED + num_steps)
        self._done = num_steps == 0

    def at(self, step: int) -> None:
        """Step number `step` (from 0) is about to begin."""
        if self._done:
            return
        if step in self.steps and self.ranks.pulse.trace is None:
            self.ranks.pulse.record(device_events=self.ranks.device.type == "cuda")
        elif step >= self.steps.stop:
            self.finish()

    def finish(self) -> None:
        """Hand the spans to rank 0, which writes the file."""
        if self._done:
            return
        self._done = True
        mine = json.dumps(events(self.ranks, self.ranks.pulse.spans()))
        if self.ranks.store is None:
            write(self.folder / "trace.json", [mine])
        elif self.ranks.is_first:
            others = [self.ranks.get(f"trace/{rank}") for rank in range(1, self.ranks.roles.world)]
            write(self.folder / "trace.json", [mine, *others])
        else:
            self.ranks.put(f"trace/{self.ranks.rank}", mine)


def events(ranks: Ranks, spans: list[tuple[str, int, str, float, float]]) -> list[dict]:
    """Chrome's trace events of one rank; times in microseconds since the epoch."""
    day = time.time() - time.monotonic()
    name = {"name": "process_name", "ph": "M", "pid": ranks.rank, "args": {"name": ranks.name}}
    tracks = [
        {"name": "thread_name", "ph": "M", "pid": ranks.rank, "tid": number, "args": {"name": track}}
        for number, track in enumerate(("host", "device"))
    ]
    return [
        name,
        *tracks,
        *(
            {
                "name": section,
                "ph": "X",
                "pid": ranks.rank,
                "tid": int(track == "device"),
                "ts": (begin + day) * 1e6,
                "dur": (end - begin) * 1e6,
                "args": {"step": step},
            }
            for section, step, track, begin, end in spans
        ),
    ]


def write(path: Path, ranks: list[str]) -> None:
    temporary = path.with_name(".trace.tmp")
    found = [event for text in ranks for event in json.loads(text)]
    temporary.write_text(json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}))
    os.replace(temporary, path)
