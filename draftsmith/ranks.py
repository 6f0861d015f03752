"""This process among the others of a run: one process per GPU, and what they tell each other.

Without torchrun's environment variables a process is alone, and everything here is free of cost. Messages between
ranks are tensors and JSON, never pickles. What goes wrong on one rank is told once, by the first that noticed:
the others end quietly, because their broken connections are only a consequence.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from draftsmith.errors import EnvironmentFault, Interrupted, UserError
from draftsmith.pulse import Pulse
from draftsmith.roles import Roles

JOIN_SECONDS = 300.0
"""A rank that has not said hello by then is named, and the others end."""
LEAVE_SECONDS = 3.0
PR_SET_PDEATHSIG = 1
TEXT = 4
"""Tag of texts between ranks."""
COLLECTIVE_TIMEOUT = timedelta(hours=24)
"""Long: one rank may evaluate or save while the others wait, and whoever hangs is found by the watchdog."""


class LostContact(EnvironmentFault):
    """A collective failed: most often because another rank has ended. Starting again may help."""

    exit_code = 1


@dataclass
class Ranks:
    """This process's place in the run. `alone()` for one process, `join` for what torchrun started."""

    roles: Roles
    rank: int
    device: torch.device
    pulse: Pulse
    store: dist.Store | None = None
    _pending: dist.Work | None = None
    _flag: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int32))
    _drafters: Any = None
    cell: Any = None
    """The group in which features travel; see `roles`."""
    sharers: Any = None
    """The group of target ranks that share one copy of the weights with this one."""

    @property
    def is_first(self) -> bool:
        """Rank 0 writes the run's files and speaks."""
        return self.rank == 0

    @property
    def name(self) -> str:
        return self.roles.name(self.rank)

    @property
    def drafter(self) -> int | None:
        return self.roles.drafter_of(self.rank)

    @property
    def target(self) -> int | None:
        return self.roles.target_of(self.rank)

    @property
    def links(self) -> list[tuple[int, int]]:
        """(target, drafter) pairs that this rank is one end of."""
        return [link for link in self.roles.links() if link[0] == self.target or link[1] == self.drafter]

    @property
    def mesh(self) -> DeviceMesh | None:
        """The ranks that share this target's weights."""
        return None if self.sharers is None else DeviceMesh.from_group(self.sharers, self.device.type)

    def agree_to_stop(self, wanted: bool) -> bool:
        """Whether any drafter rank wants to stop; among several, as of the step before, so that nobody waits."""
        if self._drafters is None:
            return wanted
        before, flag = self._finish_agreeing(), torch.tensor([int(wanted)], dtype=torch.int32)
        self._flag, self._pending = flag, dist.all_reduce(flag, group=self._drafters, async_op=True)
        return before

    def _finish_agreeing(self) -> bool:
        if self._pending is None:
            return False
        with self.pulse("exchange"), contact(self):  # rank 0 may be saving or evaluating
            self._pending.wait()
        self._pending = None
        return bool(self._flag.item())

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over the drafter ranks, in place."""
        if self._drafters is not None:
            with self.pulse("exchange"), contact(self):
                dist.all_reduce(tensor, group=self._drafters)
        return tensor

    def sum_later(self, tensor: Tensor) -> dist.Work | None:
        """The same, begun but not waited for; call `wait()` of what is returned before `tensor` is read."""
        return None if self._drafters is None else dist.all_reduce(tensor, group=self._drafters, async_op=True)

    def swap(self, mine: Tensor, theirs: Tensor, drafter: int) -> None:
        """Send a tensor to another drafter rank and receive its own."""
        peer = self.roles.drafter_rank(drafter)
        with contact(self):
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)])
            for work in works:
                work.wait()

    @torch.no_grad()
    def take_from_first(self, tensors: list[Tensor]) -> None:
        """Every drafter's tensors become those of rank 0, so that all start from the same bits."""
        if self._drafters is not None:
            for tensor in tensors:
                with contact(self):
                    there = tensor.to(self.device) if tensor.device != self.device else tensor
                    dist.broadcast(there, src=0, group=self._drafters)
                    if there is not tensor:
                        tensor.copy_(there)

    def share(self, value: Any = None, *, with_targets: bool = False) -> Any:
        """A JSON value that rank 0 gives and every drafter rank receives; every target rank too, if so said by all."""
        if self.store is None:
            return value
        if not self.is_first:
            return json.loads(self.hear(0))
        others = range(1, self.roles.world)
        self.tell(json.dumps(value), [r for r in others if with_targets or self.roles.drafter_of(r) is not None])
        return value

    def tell(self, text: str, peers: Sequence[int]) -> None:
        """A text to other ranks, each of which must `hear` it. Not by the store, which outlives a rank that dies."""
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        with contact(self):
            for peer in peers:
                dist.send(torch.tensor([len(data)]), peer, tag=TEXT)
                dist.send(data, peer, tag=TEXT)

    def hear(self, peer: int) -> str:
        """The next text of another rank, waited for."""
        size = torch.zeros(1, dtype=torch.int64)
        with contact(self):
            dist.recv(size, peer, tag=TEXT)
            data = torch.zeros(int(size), dtype=torch.uint8)
            dist.recv(data, peer, tag=TEXT)
        return bytes(data.tolist()).decode()

    @contextmanager
    def in_turn(self, name: str) -> Iterator[None]:
        """The first process of each role on a host before the others: it fills caches that they then find on disk.

        Targets that share weights cannot take turns, since they run in step.
        """
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.roles.world))
        host = self.rank // local
        here = range(host * local, min(self.roles.world, (host + 1) * local))
        peers = [rank for rank in here if (self.roles.target_of(rank) is None) == (self.target is None)]
        alone = self.store is None or self.sharers is not None or len(peers) == 1
        with self.pulse("compile"):
            if not alone and self.rank != peers[0]:
                self.get(f"{name}/{peers[0]}")
            yield
            if not alone and self.rank == peers[0]:
                self.put(f"{name}/{peers[0]}", "done")

    def put(self, name: str, text: str) -> None:
        """Leave a text in the store for other ranks; nobody waits for it to be read."""
        assert self.store is not None
        with contact(self):
            self.store.set(f"share/{name}", text)

    def wait_for_all(self, name: str) -> None:
        """Every rank gets here before any goes on."""
        if self.store is None:
            return
        with self.pulse("join"):
            with contact(self):
                dist.all_reduce(torch.zeros(1))  # which breaks when a rank has died
                seen = self.store.add(f"seen/{name}", 1)
                # Rank 0 may hold the store: it leaves when the others need it no more.
                until = time.monotonic() + LEAVE_SECONDS
                while self.is_first and seen < self.roles.world and time.monotonic() < until:
                    time.sleep(0.01)
                    seen = self.store.add(f"seen/{name}", 0)

    def get(self, name: str) -> str:
        """The text that another rank leaves in the store, waited for; end quietly if a rank reports an error."""
        assert self.store is not None
        key, pause = f"share/{name}", 0.001
        with contact(self):
            while not self.store.check([key]):
                if self.store.check(["fault"]):
                    _leave(self, json.loads(self.store.get("fault"))["code"])
                time.sleep(pause)
                pause = min(0.2, 2 * pause)
            return self.store.get(key).decode()


def alone(device: torch.device, hang_seconds: float = 30.0) -> Ranks:
    return Ranks(roles=Roles(), rank=0, device=device, pulse=Pulse(hang_seconds))


def started_by_launcher() -> bool:
    """Whether torchrun, or our own `launch`, started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


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


@contextmanager
def contact(ranks: Ranks) -> Iterator[None]:
    """A failed collective as LostContact."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = str(error).strip().splitlines()[0][:200]
        raise LostContact(f"{ranks.name} lost contact with another rank: {reason}") from error


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
        _leave(ranks, code)
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    if isinstance(error, LostContact):
        time.sleep(2.0)  # whoever caused this speaks first, and the launcher names a rank that was killed
    mine = json.dumps({"rank": ranks.rank, "code": code})
    with suppress(dist.DistError, RuntimeError):
        said = ranks.store.compare_set("fault", "", mine).decode()
        if said != mine:
            _leave(ranks, json.loads(said)["code"])
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


def _leave(ranks: Ranks, code: int) -> None:
    with suppress(dist.DistError, RuntimeError):
        if ranks.store is not None:
            ranks.store.add("left", 1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a collective that never ends must not hold up the exit


def _write_error_file(ranks: Ranks, text: str) -> None:
    """For the launcher's summary, torchrun's too."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        message = {"message": text, "extraInfo": {"timestamp": str(int(time.time())), "rank": ranks.rank}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}))
