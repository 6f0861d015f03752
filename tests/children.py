"""Verbs in child processes that start quickly and may be killed, interrupted or watched.

The server behind them has imported everything once; a child is a fork of it. Faults are armed inside the child, so a
kill happens at a chosen call and nobody has to sleep and hope.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

# Imported for the server's sake: what verbs would import when they run.
from draftsmith import capture, checkpoint, cli, demo, job, optim, supply, train, verbs  # noqa: F401
from draftsmith.data.loader import PackBuilder
from draftsmith.features import wire
from draftsmith.targets import HFTarget

torch.set_num_threads(1)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.children"])


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something bad at the `nth` call (from 1) of `call`, counted from the save number `save` on."""

    call: str
    nth: int
    effect: Literal["signal", "sleep", "full disk", "nan", "out of memory"] = "signal"
    """What happens at the call: this process gets `signal`; it takes `seconds` longer; it fails with ENOSPC; all
    numbers of the features it makes are NaN; the backward pass of the loss it makes finds no memory."""
    seconds: float = 0.0
    signal: int = signal.SIGKILL
    save: int = 0
    times: int = 1
    """2: at the next call once more. And so on."""
    whole_group: bool = False
    """The signal goes to the child's process group, loader workers included, as a job scheduler sends it."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a child ended: exit code (negative: that signal), and all it printed."""

    code: int | None
    output: str


CALLS: dict[str, tuple[object, str]] = {
    "optimizer step": (optim.MasterAdamW, "step"),
    "loss": (train, "pack_loss"),
    "capture": (HFTarget, "capture"),
    "fsync": (os, "fsync"),
    "rename": (os, "rename"),
    "prune": (checkpoint, "prune"),
    "claim": (checkpoint, "claim"),
    "write": (checkpoint, "_write_tensors"),
    "send": (wire.Sender, "send"),
    "receive": (wire.Receiver, "__call__"),
    "evaluate": (supply, "evaluate"),
    "load": (PackBuilder, "__getitem__"),
}
ALWAYS = 10**9
"""As `Fault.times`."""


def start(
    words: Sequence[str],
    log: Path,
    *,
    fault: Fault | None = None,
    audit: Path | None = None,
    environment: dict[str, str] | None = None,
):
    """A child that runs `draftsmith WORDS`, already started; its output goes to `log`."""
    child = _context.Process(target=_run, args=(list(words), log, fault, audit, environment or {}))
    child.start()
    return child


def run(words: Sequence[str], log: Path, *, fault: Fault | None = None, audit: Path | None = None) -> Ended:
    """The same, to its end."""
    child = start(words, log, fault=fault, audit=audit)
    return finish(child, log)


def finish(child, log: Path) -> Ended:
    child.join(120)
    if child.is_alive():
        child.kill()
        raise AssertionError(f"the child did not end: {log.read_text()}")
    return Ended(code=child.exitcode, output=log.read_text())


def _run(words: list[str], log: Path, fault: Fault | None, audit: Path | None, environment: dict[str, str]) -> None:
    os.setsid()
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # loader workers start as they do for a user
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if fault:
        _arm(fault)
    events: list[str] = []
    if audit:
        # Imports are over (the server did them), so every event from here on comes from a verb's own work.
        sys.addaudithook(lambda name, args: events.append(str(args)) if name == "pickle.find_class" else None)
    try:
        cli.main(words)
    finally:
        if audit:
            audit.write_text("".join(f"{event}\n" for event in events))


def _no_memory(gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _arm(fault: Fault) -> None:
    counted = {"saves": 0, "calls": 0}

    def wrap(name: str, wrapper: Callable) -> None:
        place, attribute = CALLS[name] if name != "save" else (checkpoint, "save")
        original = getattr(place, attribute)
        setattr(place, attribute, lambda *args, **options: wrapper(original, *args, **options))

    def save(original: Callable, *args, **options):
        counted["saves"] += 1
        return original(*args, **options)

    def call(original: Callable, *args, **options):
        if counted["saves"] >= fault.save:
            counted["calls"] += 1
        if not fault.nth <= counted["calls"] < fault.nth + fault.times:
            return original(*args, **options)
        if fault.effect == "signal":
            (os.killpg if fault.whole_group else os.kill)(os.getpid(), fault.signal)
        elif fault.effect == "sleep":
            time.sleep(fault.seconds)
        elif fault.effect == "full disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        made = original(*args, **options)
        if fault.effect == "nan":
            made.context.fill_(torch.nan)
        elif fault.effect == "out of memory":
            made.total.register_hook(_no_memory)
        return made

    wrap("save", save)
    wrap(fault.call, call)
