"""This process among the others of a run: one process per GPU, and what they tell each other.

Without torchrun's environment variables a process is alone, and everything here is free of cost. Messages between
ranks are tensors and JSON, never pickles. `joining` makes them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from draftsmith.errors import EnvironmentFault
from draftsmith.pulse import Pulse
from draftsmith.roles import Roles

LEAVE_SECONDS = 3.0
TEXT = 4
"""Tag of texts between ranks."""


class LostContact(EnvironmentFault):
    """A collective failed: most often because another rank has ended. Starting again may help."""

    exit_code = 1


@dataclass
class Ranks:
    """This process's place in the run. `alone()` for one process, `joining.join` for what torchrun started."""

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
                    leave(self, json.loads(self.store.get("fault"))["code"])
                time.sleep(pause)
                pause = min(0.2, 2 * pause)
            return self.store.get(key).decode()


def alone(device: torch.device, hang_seconds: float = 30.0) -> Ranks:
    return Ranks(roles=Roles(), rank=0, device=device, pulse=Pulse(hang_seconds))


def started_by_launcher() -> bool:
    """Whether torchrun, or our own `launch`, started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


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


def leave(ranks: Ranks, code: int) -> None:
    with suppress(dist.DistError, RuntimeError):
        if ranks.store is not None:
            ranks.store.add("left", 1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a collective that never ends must not hold up the exit
