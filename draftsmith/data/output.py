"""The file that `regenerate` appends to: one conversation a line, written whole, known by its id.

A killed run loses no row that it wrote, and the next one answers what is missing: each row once, in whatever order the
prompts then are.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from draftsmith.data.prompts import Prompt, content_id
from draftsmith.errors import DataError, EnvironmentFault, UserError

SYNC_SECONDS = 1.0
"""Answers of this many seconds may be lost by a crash of the machine; none by a kill of the process."""


class Output:
    """The open file, and the prompts that it does not answer yet."""

    def __init__(self, path: Path, file: int, waiting: list[Prompt], counts: dict[str, int]) -> None:
        self.path, self.waiting = path, waiting
        self.counts = counts
        """skipped: prompts answered before; duplicates: prompts that occur again in the input."""
        self._file, self._synced = file, time.perf_counter()

    def append(self, row: dict) -> None:
        left = row_bytes(row)
        try:
            while left:  # a full disk may take a part
                left = left[os.write(self._file, left) :]
            if time.perf_counter() - self._synced > SYNC_SECONDS:
                os.fsync(self._file)
                self._synced = time.perf_counter()
        except OSError as error:
            raise EnvironmentFault(
                f"{self.path} cannot be written ({error.strerror}). The rows in it are kept: mend that and give the "
                "same command again"
            ) from error


@contextmanager
def open_output(path: Path, prompts: Sequence[Prompt], source: str) -> Iterator[Output]:
    """The output for these prompts of `source`, closed to other processes meanwhile.

    Raises UserError where nothing can be written and DataError for a damaged output, or for one in which the id of a
    prompt stands for another prompt. When no row is written, no file and no folder is left behind.
    """
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another regenerate.output") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise UserError(f"{path} is being written by another process; wait for it") from error
    try:
        unique = {prompt.id: prompt for prompt in prompts}
        done = recover(path)
        for name, asked in done.items():
            if name in unique and content_id(unique[name].messages) != asked:
                raise DataError(f"{path}: id {name!r} answers another prompt than the one in {source}.")
        waiting = [prompt for prompt in unique.values() if prompt.id not in done]
        counts = {"skipped": len(unique) - len(waiting), "duplicates": len(prompts) - len(unique)}
        yield Output(path, file, waiting, counts)
        os.fsync(file)
    finally:
        if os.fstat(file).st_size == 0:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # somebody else put something there
                for folder in made:
                    folder.rmdir()
        os.close(file)


def recover(output: Path) -> dict[str, str]:
    """Ids in the output, each with the content id of the prompt it answers. Cuts off a last line torn by a kill."""
    done: dict[str, str] = {}
    whole = 0  # bytes up to the end of the last whole line
    with output.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            try:
                row = json.loads(line)
                done[row["id"]] = row.get("asked") or content_id(row["messages"][:-1])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(
                    f"{output}, line {number}: not a conversation written by regenerate ({error!r}). "
                    "Repair or remove the line, or choose another output."
                ) from error
    if whole < output.stat().st_size:
        os.truncate(output, whole)
    return done


def row_bytes(row: dict) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
