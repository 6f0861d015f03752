"""Features from target ranks to drafter ranks: fixed buffers, announced before they are sent, credit for each slot.

A link joins one target and one drafter; the ranks of a cell have a process group for it, apart from the
drafters' gradients. Both ends know the schedule, so they agree on the order of packs. For each pack the target takes
a free slot, captures into it, announces the pack (a small message on the host) and sends it, GPU to GPU. The drafter
posts the receive only after the announcement, since a posted receive occupies the GPU until it is answered, and gives
the slot back (a credit) once the data have landed:

    target                         drafter
    capture into slot
    HEADER  (what, which pack)  ─►
    features                    ─► landing buffer
                                ◄─ CREDIT: the slot is free again

`queue_depth` slots per link are the back-pressure: a target that is ahead waits for a credit. A drafter that ends early
answers with STOP instead; the target then stops and says END on all its links. A target's error travels in its header.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from draftsmith.errors import EnvironmentFault
from draftsmith.ranks import Ranks, contact
from draftsmith.roles import Delivery
from draftsmith.types import Features, Pack

DATA, END, ERROR = 1, 2, 3
CREDIT, STOP, EVALUATE = 1, 2, 3
HEADER, WORD, BULK = 1, 2, 3
"""Tags of the messages of a link."""
TEXT_BYTES = 512
HEADER_SIZE = 8 + TEXT_BYTES // 8


class TargetFailed(EnvironmentFault):
    """A target rank met an error and said so."""


def pack_number(pack: Pack) -> int:
    """A number of a pack's documents, so that both ends can tell that they mean the same."""
    digest = hashlib.sha256(f"{pack.epoch}/{pack.index}/{'/'.join(pack.sample_ids)}".encode())
    return int.from_bytes(digest.digest()[:7], "big")


@dataclass
class Idle:
    """How long one end waited: from the end of one piece of work to the beginning of the next, on its device."""

    cuda: bool
    waited: float = 0.0
    busy: float = 0.0
    _marks: list = field(default_factory=list)

    def begin(self) -> None:
        self._marks.append(self._now())

    end = begin

    def read(self) -> None:
        """Add up what is over: everything but the last piece of work, which may still be running."""
        while len(self._marks) >= 4:  # begin, end, begin, end
            begin, end, after = self._marks[:3]
            self.busy += _seconds(begin, end)
            self.waited += _seconds(end, after)
            del self._marks[:2]

    def _now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(begin, end) -> float:
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1000


class Sender:
    """The target's end of one link."""

    def __init__(self, ranks: Ranks, target: int, drafter: int, shape: tuple[int, int], dtype, depth: int) -> None:
        self.ranks, self.group = ranks, ranks.cell
        self.peer = ranks.roles.drafter_rank(drafter)
        self.slots = [torch.empty(shape, dtype=dtype, device=ranks.device) for _ in range(depth)]
        self._free = deque(self.slots)
        self._sent: deque[tuple[Tensor, list[dist.Work], Tensor]] = deque()
        """Slots on their way, with the messages that must not be freed before."""
        self._stopped = False
        self._asked = False

    @property
    def has_slot(self) -> bool:
        """Whether a slot is free already."""
        return bool(self._free)

    def take(self) -> Tensor | None:
        """A free slot, waited for if need be; None when the drafter has stopped."""
        while not self._free and not self._stopped:
            self.hear()
        return None if self._stopped else self._free.popleft()

    def hear(self) -> None:
        """Wait for one word of the drafter."""
        word = torch.zeros(1, dtype=torch.int64)
        with self.ranks.pulse("wait"), contact(self.ranks):
            dist.recv(word, src=self.peer, group=self.group, tag=WORD)
        if word.item() == CREDIT:
            slot, works, _ = self._sent.popleft()
            with contact(self.ranks):
                for work in works:
                    work.wait()
            self._free.append(slot)
        elif word.item() == EVALUATE:
            self._asked = True
        else:
            self._stopped = True

    def asked_to_evaluate(self) -> bool:
        """Wait for the drafter's next request to evaluate; False when it stops instead."""
        while not self._asked and not self._stopped:
            self.hear()
        asked, self._asked = self._asked and not self._stopped, False
        return asked

    def send(self, slot: Tensor, delivery: Delivery, number: int, notes: tuple[int, int, int]) -> None:
        """Announce and send a filled slot. `notes`: microseconds waited and busy so far, and a wish to stop."""
        header = _header(DATA, [delivery.step, delivery.lane.number, number, *notes])
        with self.ranks.pulse("send"), contact(self.ranks):
            works = [dist.isend(header, self.peer, group=self.group, tag=HEADER)]
            works.append(dist.isend(slot, self.peer, group=self.group, tag=BULK))
        self._sent.append((slot, [work for work in works if work is not None], header))

    def close(self, kind: int, text: str = "") -> None:
        """Say END or ERROR, and hear what the drafter still has to say."""
        with contact(self.ranks):
            work = dist.isend(_header(kind, [], text), self.peer, group=self.group, tag=HEADER)
        while kind == END and not self._stopped:
            self.hear()
        with contact(self.ranks):
            work.wait()


class Receiver:
    """The drafter's end of all its links: called with a pack, it gives the features that belong to it.

    There are two landing buffers. While a step reads one, the next pack lands in the other if it is announced by then.
    """

    def __init__(self, ranks: Ranks, order: Iterator[Delivery], shape: tuple[int, int], dtype: torch.dtype) -> None:
        """`order`: this drafter's packs, in its order."""
        self.ranks, self._order = ranks, order
        self.peers = {target: ranks.roles.target_rank(target) for target, _ in ranks.links}
        self.idle = Idle(ranks.device.type == "cuda")
        self.notes: dict[int, tuple[int, int]] = {}
        """Microseconds that each target has waited and been busy."""
        self._told = [0, 0]
        self.stop_wanted = False
        """A target rank was asked to end."""
        self._buffers = deque(_Buffer(torch.empty(shape, dtype=dtype, device=ranks.device)) for _ in range(2))
        self._stream = torch.cuda.Stream(ranks.device) if ranks.device.type == "cuda" else None
        self._landed: deque[tuple[Delivery, list[int], _Buffer]] = deque()
        self._reading: _Buffer | None = None
        self._coming: Delivery | None = next(order, None)
        self._words: deque[tuple[dist.Work | None, Tensor]] = deque()
        self._headers = {target: self._expect(target) for target in self.peers}

    def __call__(self, pack: Pack) -> Features:
        """The features of a pack; they are overwritten when the pack after the next is asked for."""
        if self._reading is not None:
            self.idle.end()
            self._reading.mark_read()
            self._buffers.append(self._reading)
        with self.ranks.pulse("receive"):
            if not self._landed:
                self._land()
            delivery, values, buffer = self._landed.popleft()
            self._check(pack, delivery, values)
            buffer.wait()
            self.idle.begin()
            if self._coming is not None and bool(self._headers[self._coming.target][0][0]):
                self._land()
        self._reading = buffer
        return Features(context=buffer.tensor)

    def take_notes(self) -> tuple[float, float]:
        """Seconds that the targets have waited and been busy since the last call."""
        now = [sum(note[part] for note in self.notes.values()) for part in (0, 1)]
        waited, busy = ((new - old) / 1e6 for new, old in zip(now, self._told, strict=True))
        self._told = now
        return waited, busy

    def ask_to_evaluate(self, target: int) -> None:
        self._say(target, EVALUATE)

    def stop(self) -> None:
        """Tell the targets to end, and let what they have sent already land."""
        spare = self._reading or self._buffers[0]  # what has landed is not needed any more
        for target in self.peers:
            self._say(target, STOP)
        with self.ranks.pulse("receive"):
            for target in self.peers:
                while self._announced(target)[0] == DATA:
                    self._take(target, spare)
            for work, _ in self._words:
                _wait(work, self.ranks)

    def _check(self, pack: Pack, delivery: Delivery, values: list[int]) -> None:
        found, expected = values[1:4], [delivery.step, delivery.lane.number, pack_number(pack)]
        if found != expected or (pack.epoch, pack.index) != (delivery.epoch, delivery.index):
            raise TargetFailed(
                f"{self._name(delivery.target)} sent pack {values[2]} of step {values[1]} (number {values[3]}), but "
                f"{self.ranks.name} is at pack {expected[1]} of step {expected[0]} (number {expected[2]}); all ranks "
                "must see the same data and recipe"
            )
        self.notes[delivery.target] = (values[4], values[5])
        self.stop_wanted |= bool(values[6])

    def _land(self) -> None:
        """Let the next pack of the order land in a free buffer."""
        delivery, buffer = self._coming, self._buffers.popleft()
        assert delivery is not None, "more packs are asked for than the schedule has"
        values = self._announced(delivery.target)
        if values[0] != DATA:
            raise TargetFailed(
                f"{self._name(delivery.target)} ended before pack {delivery.lane.number} of step {delivery.step}"
            )
        self._take(delivery.target, buffer)
        self._say(delivery.target, CREDIT)
        self._landed.append((delivery, values, buffer))
        self._coming = next(self._order, None)

    def _announced(self, target: int) -> list[int]:
        """Wait for a target's next header."""
        header, work = self._headers[target]
        _wait(work, self.ranks)
        values = header[:8].tolist()
        if values[0] == ERROR:
            text = bytes(header[8:].view(torch.uint8).tolist()).rstrip(b"\0").decode("utf-8", "replace")
            raise TargetFailed(f"{self._name(target)} failed: {text}")
        if values[0] == DATA:
            self._headers[target] = self._expect(target)
        return values

    def _expect(self, target: int) -> tuple[Tensor, dist.Work | None]:
        header = torch.zeros(HEADER_SIZE, dtype=torch.int64)
        with contact(self.ranks):
            return header, dist.irecv(header, self.peers[target], group=self.ranks.cell, tag=HEADER)

    def _take(self, target: int, buffer: _Buffer) -> None:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            buffer.wait_until_read()
            with contact(self.ranks):
                work = dist.irecv(buffer.tensor, self.peers[target], group=self.ranks.cell, tag=BULK)
            _wait(work, self.ranks)  # on a GPU it is the stream that waits
            buffer.mark_landed()

    def _say(self, target: int, word: int) -> None:
        message = torch.tensor([word], dtype=torch.int64)
        with contact(self.ranks):
            self._words.append((dist.isend(message, self.peers[target], group=self.ranks.cell, tag=WORD), message))
        while len(self._words) > 64:  # long received; a message must outlive its sending
            _wait(self._words.popleft()[0], self.ranks)

    def _name(self, target: int) -> str:
        return self.ranks.roles.name(self.peers[target])


class _Buffer:
    """A landing buffer, and on a GPU the moments at which it was last read and filled."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._read = torch.cuda.Event() if tensor.is_cuda else None
        self._landed = torch.cuda.Event() if tensor.is_cuda else None

    def mark_read(self) -> None:
        if self._read:
            self._read.record()

    def wait_until_read(self) -> None:
        if self._read:
            self._read.wait()

    def mark_landed(self) -> None:
        if self._landed:
            self._landed.record()

    def wait(self) -> None:
        if self._landed:
            self._landed.wait()


def _wait(work: dist.Work | None, ranks: Ranks) -> None:
    assert work is not None, "this rank is not a member of the link"
    with contact(ranks):
        work.wait()


def send_tensors(ranks: Ranks, peer: int, tensors: list[Tensor]) -> None:
    """A list of tensors to a rank of the cell, one after the other; `receive_tensors` takes them in the same order."""
    with contact(ranks):
        for tensor in tensors:
            dist.send(tensor.contiguous(), peer, group=ranks.cell, tag=BULK)


def receive_tensors(ranks: Ranks, peer: int, tensors: list[Tensor]) -> None:
    """Fill tensors with what `send_tensors` sends."""
    with contact(ranks):
        for tensor in tensors:
            there = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            dist.recv(there, peer, group=ranks.cell, tag=BULK)
            tensor.copy_(there)


def _header(kind: int, values: list[int], text: str = "") -> Tensor:
    header = torch.zeros(HEADER_SIZE, dtype=torch.int64)
    header[: 1 + len(values)] = torch.tensor([kind, *values], dtype=torch.int64)
    data = text.encode()[:TEXT_BYTES]
    header[8:].view(torch.uint8)[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[
        : len(data)
    ]
    return header
