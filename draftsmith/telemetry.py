"""What a run says: lines of metrics on disk, progress on the console, TensorBoard if asked.

Nothing here may end a run: when the metrics file or the tracker fails in mid-run, that is a warning. Text that is
printed loses its control characters first, so a prompt or a name cannot move the cursor, recolour or hide anything.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from draftsmith.errors import EnvironmentFault
from draftsmith.jsonl import is_line_until

_ESCAPE = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x1b\x9b]\[?[0-?]*[ -/]*[@-~]")
_DIRECTION = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """`text` without terminal escapes, control and direction-changing characters. Newline and tab stay."""
    kept = _DIRECTION.sub("", _ESCAPE.sub("", text))
    return "".join(c for c in kept if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs", "Zl", "Zp"))


class MetricsFile:
    """RUN/metrics.jsonl: one JSON object a line, each with its step."""

    def __init__(self, path: Path, *, step: int = 0, warn: Callable[[str], None]):
        """Continue after `step`: lines of later steps are cut off, and so is a torn last line.

        `warn` hears about write failures in mid-run; a file that cannot be opened raises EnvironmentFault.
        """
        self._path, self._warn = path, warn
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                _cut(path, step)
            self._file = open(path, "ab", buffering=0)
        except OSError as error:
            raise EnvironmentFault(f"the metrics file {path} cannot be written: {error}") from error

    def write(self, record: dict[str, Any]) -> None:
        """Append one line. NaN and infinity become null, and their keys are listed under "nonfinite"."""
        assert type(record.get("step")) is int, f"a line of metrics needs its step: {record}"
        nonfinite: list[str] = []
        row = {key: _finite(value, key, nonfinite) for key, value in record.items()}
        if nonfinite:
            row["nonfinite"] = nonfinite
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            before = os.fstat(self._file.fileno()).st_size
            if self._file.write(line) != len(line):
                self._file.truncate(before)  # half a line would spoil the next one
                raise OSError("the disk is full")
        except OSError as error:
            self._warn(f"metrics of step {record['step']} are not in {self._path}: {error}")

    def close(self) -> None:
        self._file.close()


class Console:
    """Plain lines, or colour and a progress bar when `out` is a terminal. The only place that knows rich.

    A reader that is gone (`| head`, a closed terminal) or a full disk behind `>` ends the lines, never the work.
    """

    def __init__(self, out: io.TextIOBase | None = None):
        self._out: Any = out or sys.stdout or io.StringIO()  # none: the process was started with it closed
        self._rich: Any = None
        self._bar: Any = None
        if self._out.isatty():
            from rich.console import Console as RichConsole

            self._rich = RichConsole(file=self._out, highlight=False, markup=False, emoji=False)

    def say(self, text: str) -> None:
        """Print text as it is, save for control characters."""
        self._print(clean(text), None)

    @property
    def colour(self) -> bool:
        return self._rich is not None

    def show(self, text: Any) -> None:
        """Print text that is escaped already: a str as it is, a rich Text with its styles."""
        if self._rich is None:
            self._print(str(text), None)
        else:
            self._write(lambda: self._rich.print(text, soft_wrap=True))

    def marked(self, pieces: Sequence[tuple[str, bool]]) -> None:
        """Print pieces of one text, the true ones marked: green in a terminal, [in brackets] elsewhere."""
        if self._rich is None:
            self._print(clean("".join(f"[{text}]" if mark else text for text, mark in pieces)), None)
            return
        from rich.text import Text

        line = Text()
        for text, mark in pieces:
            line.append(clean(text), style="green" if mark else None)
        self._write(lambda: self._rich.print(line, soft_wrap=True))

    def warn(self, text: str) -> None:
        """Print one line that stands out."""
        self._print("warning: " + clean(text).replace("\n", " "), "yellow")

    def step(self, record: dict[str, Any]) -> None:
        """Print one line of progress, and move the bar in a terminal.

        Keys, all but `step` optional: step, steps, loss, accept (tokens per target pass), accuracy (0..1),
        tokens_per_second, lr, eta (seconds).
        """
        self._print(clean(_progress_line(record)), None)
        if self._rich is not None and record.get("steps"):
            self._advance(record["step"], record["steps"])

    def close(self) -> None:
        """Take the bar off the screen; call it however the run ends, or the cursor stays hidden."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _advance(self, step: int, steps: int) -> None:
        if self._bar is None:
            from rich.progress import Progress

            # Refreshed by hand: a refresh thread would be copied into forked loader workers.
            self._bar = Progress(console=self._rich, auto_refresh=False, transient=True)
            self._bar.add_task("training", total=steps)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=step, total=steps, refresh=True)

    def _print(self, text: str, style: str | None) -> None:
        encoding = self._out.encoding or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)  # an ASCII locale must not end a run
        if self._rich is None:
            self._write(lambda: print(text, file=self._out, flush=True))
        else:
            self._write(lambda: self._rich.print(text, style=style, soft_wrap=True))

    def _write(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self._rich, self._bar = None, None
            if isinstance(self._out, io.TextIOWrapper):
                silence(self._out)
            if not isinstance(error, BrokenPipeError) and sys.stderr is not None:
                print(f"draftsmith: nothing more is printed ({error}); the work goes on", file=sys.stderr)


def silence(stream: TextIO) -> None:
    """Lead what is written from now on, and what waits to be, to nowhere; Python would try again when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class Silent(Console):
    """For processes that are not the first: what they would say, the first one says."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())

    def _print(self, text: str, style: str | None) -> None:
        """Say nothing."""


class TensorBoard:
    """Scalars of each record as TensorBoard events in `folder`, from the step after `step`."""

    def __init__(self, folder: Path, *, step: int = 0, warn: Callable[[str], None]):
        """Raises EnvironmentFault if the package is missing."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise EnvironmentFault(
                "log.tensorboard is on, but the tensorboard package is missing: "
                "pip install 'draftsmith[tensorboard]', or leave log.tensorboard off"
            ) from error
        self._warn = warn
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Add the finite numbers of `record`. The first failure is a warning, and the last attempt."""
        if self._writer is None:
            return
        try:
            for key, value in record.items():
                if key != "step" and type(value) in (int, float) and math.isfinite(value):
                    self._writer.add_scalar(key, value, record["step"])
        except (OSError, RuntimeError, ValueError) as error:
            self._give_up(error)

    def close(self) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        except (OSError, RuntimeError, ValueError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._writer = None
        self._warn(f"TensorBoard failed and is off for the rest of this run: {error}")


def _cut(path: Path, step: int) -> None:
    """Rewrite the file without lines of later steps and without lines that are not whole."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if is_line_until(line, step)]
    if kept != lines:
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(b"".join(kept))
        os.replace(temporary, path)


def _finite(value: Any, key: str, nonfinite: list[str]) -> Any:
    """`value` with null for what JSON cannot hold; the dotted keys of those go to `nonfinite`."""
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite.append(key)
        return None
    if isinstance(value, dict):
        return {name: _finite(item, f"{key}.{name}", nonfinite) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item, f"{key}.{index}", nonfinite) for index, item in enumerate(value)]
    return value


def _progress_line(record: dict[str, Any]) -> str:
    of = f"/{record['steps']}" if record.get("steps") else ""
    forms = {
        "loss": "loss {:.4f}",
        "accept": "accept {:.2f}",
        "accuracy": "accuracy {:.3f}",
        "tokens_per_second": "{:,.0f} tok/s",
        "target_wait": "targets wait {:.0%}",
        "drafter_wait": "drafters wait {:.0%}",
        "lr": "lr {:.2e}",
    }
    parts = [f"step {record['step']}{of}"]
    parts += [form.format(record[key]) for key, form in forms.items() if record.get(key) is not None]
    if record.get("eta") is not None and math.isfinite(record["eta"]):
        minutes, seconds = divmod(round(record["eta"]), 60)
        parts.append(f"ETA {minutes // 60}:{minutes % 60:02d}:{seconds:02d}")
    return "  ".join(parts)
