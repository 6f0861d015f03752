"""How a process becomes one of a run's ranks, and how it goes: all arrive, agree on what they run, make their groups.

What goes wrong on one rank is told once, by the first that noticed: the others end quietly, because their broken
connections are only a consequence.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from draftsmith.errors import EnvironmentFault, Interrupted, UserError
from draftsmith.pulse import Pulse
from draftsmith.ranks import LEAVE_SECONDS, LostContact, Ranks, contact, leave
from draftsmith.roles import Roles

JOIN_SECONDS = 300.0
"""A rank that has not said hello by then is named, and the others end."""
PR_SET_PDEATHSIG = 1
COLLECTIVE_TIMEOUT = timedelta(hours=24)
"""Long: one rank may evaluate or save while the others wait, and whoever hangs is found by the watchdog."""


@contextmanager
def join(roles: Roles, device: torch.device, facts: dict[str, str], *, hang_seconds: float) -> Iterator[Ranks]:
    """The ranks of this run, all arrived and agreed on `facts` (recipe, versions, data), with their groups made.

    On an error the first rank that met one lets it pass; on the others SystemExit ends the process quietly.
    """
    rank = int(os.environ["RANK"])
    ranks = Ranks(roles=roles, rank=rank, device=device, pulse=Pulse(hang_seconds))
    folder: Path | None = None
    _end_with_launcher()
    try:
        _meet(ranks, facts)
        folder = _start_watchdog(ranks)
        with contact(ranks):
            _make_groups(ranks)
        yield ranks
        ranks._finish_agreeing()
        ranks.wait_for_all("end")
    except BaseException as error:
        _tell(ranks, error)
        raise
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    dist.destroy_process_group()


def _meet(ranks: Ranks, facts: dict[str, str]) -> None:
    """Say hello, wait for everybody, and compare notes. Raises UserError naming who differs or who is missing."""
    address = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    try:
        store, _, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=JOIN_SECONDS)))
    except (dist.DistError, RuntimeError, ValueError) as error:
        why = "the port is in use: another run has it" if "EADDRINUSE" in str(error) else str(error).splitlines()[0]
        raise EnvironmentFault(
            f"{ranks.name} cannot meet the others at {address}: {why}. Give this run an address and port of its own "
            "(torchrun --rdzv-endpoint, or MASTER_ADDR and MASTER_PORT)"
        ) from error
    ranks.store = store
    store.set(f"hello/{ranks.rank}", json.dumps({**facts, "host": socket.gethostname()}))
    if ranks.is_first:
        store.set("verdict", _verdict(store, ranks, facts, world))
    try:
        store.wait(["verdict"], timedelta(seconds=JOIN_SECONDS + 30))
        verdict = store.get("verdict").decode()
    except (dist.DistError, RuntimeError) as error:
        raise LostContact(f"{ranks.name} waited {JOIN_SECONDS:.0f} s for rank 0 in vain") from error
    if verdict:
        raise UserError(verdict)


def _end_with_launcher() -> None:
    """When the launcher dies this process is asked to end, and saves; the watchdog sees to it that it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _verdict(store: dist.Store, ranks: Ranks, facts: dict[str, str], world: int) -> str:
    """What is wrong with the ranks that came, or an empty text."""
    try:
        store.wait([f"hello/{rank}" for rank in range(world)], timedelta(seconds=JOIN_SECONDS))
    except (dist.DistError, RuntimeError):
        missing = [ranks.roles.name(rank) for rank in range(world) if not store.check([f"hello/{rank}"])]
        return f"{', '.join(missing)} did not arrive within {JOIN_SECONDS:.0f} s; look at the output of its host"
    for rank in range(1, world):
        other = json.loads(store.get(f"hello/{rank}"))
        wrong = [name for name in facts if other.get(name) != facts[name]]
        if wrong:
            lines = "; ".join(f"{name}: {other.get(name, 'unset')} there, {facts[name]} on rank 0" for name in wrong)
            return (
                f"{ranks.roles.name(rank)} on host {other['host']} does not fit rank 0 ({lines}); start all ranks alike"
            )
    return ""


def _start_watchdog(ranks: Ranks) -> Path | None:
    """Heartbeats into a folder of this host, watched by a process that the host's first rank starts."""
    assert ranks.store is not None
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    key, first = f"pulse/{os.environ.get('GROUP_RANK', '0')}", os.environ.get("LOCAL_RANK", "0") == "0"
    folder = None
    if first:
        folder = Path(tempfile.mkdtemp(prefix="draftsmith-pulse-"))
        ranks.store.set(key, str(folder))
    there = Path(ranks.store.get(key).decode())
    ranks.pulse.beat_into(there / f"rank-{ranks.rank}.beat", ranks.name)
    if first:
        words = [sys.executable, "-m", "draftsmith.watchdog", str(there), str(os.getppid())]
        subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
    return folder


def _make_groups(ranks: Ranks) -> None:
    roles, cuda = ranks.roles, ranks.device.type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    assert ranks.store is not None
    store = dist.PrefixStore("groups", ranks.store)
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=roles.world, timeout=COLLECTIVE_TIMEOUT)
    # Groups that only some ranks make are named by how many a rank has made before: the order matters.
    if roles.targets:
        # One group for a cell; messages between two of its ranks have a NCCL communicator and stream of their own.
        cell = roles.world // roles.cells
        members = list(range(ranks.rank // cell * cell, (ranks.rank // cell + 1) * cell))
        ranks.cell = dist.new_group(
            members, timeout=COLLECTIVE_TIMEOUT, backend=backend, use_local_synchronization=True
        )
    if ranks.target is not None and roles.target_ranks > 1:
        ranks.sharers = dist.new_group(
            roles.sharers(ranks.target), timeout=COLLECTIVE_TIMEOUT, backend=backend, use_local_synchronization=True
        )
    if roles.drafters > 1:
        members = [roles.drafter_rank(d) for d in range(roles.drafters)]
        ranks._drafters = dist.new_group(members, timeout=COLLECTIVE_TIMEOUT, backend=backend)
        if ranks.drafter is None:
            ranks._drafters = None


def _tell(ranks: Ranks, error: BaseException) -> None:
    """Let one rank speak about an error: the first that met one of its own. The others exit here."""
    if ranks.store is None or not isinstance(error, Exception):
        return
    code = getattr(error, "exit_code", 1)
    if isinstance(error, Interrupted):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # all is saved, and the launcher sends one to whoever ends last
    if isinstance(error, Interrupted) and not ranks.is_first:
        leave(ranks, code)
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    if isinstance(error, LostContact):
        time.sleep(2.0)  # whoever caused this speaks first, and the launcher names a rank that was killed
    mine = json.dumps({"rank": ranks.rank, "code": code})
    with suppress(dist.DistError, RuntimeError):
        said = ranks.store.compare_set("fault", "", mine).decode()
        if said != mine:
            leave(ranks, json.loads(said)["code"])
    _write_error_file(ranks, text)
    if ranks.is_first:
        _let_others_leave(ranks)


def _let_others_leave(ranks: Ranks) -> None:
    """Rank 0 may hold the store in which the others look for the reason; they get a moment."""
    until = time.monotonic() + LEAVE_SECONDS
    with suppress(dist.DistError, RuntimeError):
        while ranks.store is not None and time.monotonic() < until:
            if ranks.store.add("left", 0) >= ranks.roles.world - 1:
                return
            time.sleep(0.02)


def _write_error_file(ranks: Ranks, text: str) -> None:
    """For the launcher's summary, torchrun's too."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        message = {"message": text, "extraInfo": {"timestamp": str(int(time.time())), "rank": ranks.rank}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}))
