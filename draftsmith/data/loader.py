"""From the schedule to finished packs, in loader processes.

A worker is told which samples make up a pack and builds everything the step needs: tokens, positions, anchors, blocks,
labels, weights, intervals. All of it is a function of the samples, the seed and the epoch, so any number of workers,
0 included, gives the same packs in the same order.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch.utils.data import DataLoader, Dataset

from draftsmith.anchors import BlockShape, build_blocks, draw_anchors, legal_anchors
from draftsmith.config import PackOptions
from draftsmith.data.dataset import PreparedDataset
from draftsmith.data.mixture import TrainingSet
from draftsmith.errors import DataError, EnvironmentFault, UserError
from draftsmith.packing import Mix, Schedule, count_anchors
from draftsmith.types import Pack, Sample


@dataclass(frozen=True, kw_only=True)
class PackOrder:
    """What a worker needs to know about a pack: its place in the run, and its samples."""

    epoch: int
    index: int
    samples: Int[np.ndarray, " doc"]
    """Visits, as `packing` numbers them."""


@dataclass(frozen=True)
class PackBuilder(Dataset):
    """Builds packs; `builder[order]` is the pack. Cheap to send to a worker."""

    dataset: PreparedDataset | TrainingSet
    options: PackOptions
    shape: BlockShape
    seed: int
    with_anchors: bool = True
    """A target process needs no blocks: without anchors all of them are empty."""

    def __getitem__(self, order: PackOrder) -> Pack:
        return self.build(order, with_anchors=self.with_anchors)

    def build(self, order: PackOrder, *, with_anchors: bool) -> Pack:
        """The pack; without anchors all its blocks are empty (capturing features needs none)."""
        visits, rows = (part.tolist() for part in np.divmod(order.samples, len(self.dataset)))
        documents = [_cut(self.dataset[row], self.options.tokens) for row in rows]
        budget = self.options.tokens
        tokens = np.zeros(budget, np.int64)
        supervised = np.zeros(budget, bool)
        doc_start = np.zeros(budget, np.int64)
        anchor, anchor_start, anchor_end = [], [], []
        at = 0
        for document, visit in zip(documents, visits, strict=True):
            end = at + len(document.tokens)
            tokens[at:end], supervised[at:end], doc_start[at:end] = document.tokens, document.supervised, at
            num = self._num_anchors(document) if with_anchors else 0
            anchor.append(draw_anchors(document, num, self.seed, order.epoch, visit) + at)
            anchor_start.append(np.full(num, at))
            anchor_end.append(np.full(num, end))
            at = end
        doc_start[at:] = at  # the padded tail is a document of its own, never supervised
        blocks = build_blocks(
            tokens,
            supervised,
            np.concatenate(anchor),
            np.concatenate(anchor_start),
            np.concatenate(anchor_end),
            self.options.anchors,
            self.shape,
        )
        labelled = np.zeros(budget, bool)
        labelled[(blocks.anchor[:, None] + torch.arange(self.shape.block_size))[blocks.weight > 0].numpy()] = True
        return Pack(
            tokens=torch.from_numpy(tokens),
            position=torch.from_numpy(np.arange(budget) - doc_start),
            doc_start=torch.from_numpy(doc_start),
            doc_lengths=tuple(len(d.tokens) for d in documents),
            blocks=blocks,
            epoch=order.epoch,
            index=order.index,
            samples=tuple(rows),
            sample_ids=tuple(d.id for d in documents),
            num_supervised=int(supervised.sum()),
            num_labelled=int(labelled.sum()),
        )

    def _num_anchors(self, document: Sample) -> int:
        legal = np.array([len(legal_anchors(document.supervised))])
        return int(count_anchors(legal, self.options.anchors_per_document, self.options.anchor_density)[0])


def _cut(sample: Sample, num_tokens: int) -> Sample:
    """A sample no longer than the pack; `make_schedule` has refused longer ones unless cutting was asked for."""
    if len(sample.tokens) <= num_tokens:
        return sample
    return Sample(
        id=sample.id, tokens=sample.tokens[:num_tokens], supervised=sample.supervised[:num_tokens], tags=sample.tags
    )


def make_schedule(
    dataset: PreparedDataset | TrainingSet,
    options: PackOptions,
    *,
    cut: bool,
    packs_per_step: int,
    epochs: int,
    steps: int | None,
    seed: int,
    mix: Mix | None = None,
) -> tuple[Schedule, int]:
    """The run's schedule, and how many samples are cut to the pack's budget.

    Raises DataError for a sample that no pack can hold.
    """
    lengths, legal = dataset.lengths, dataset.legal_counts
    too_long = np.flatnonzero(lengths > options.tokens)
    if len(too_long) and not cut:
        worst = int(too_long[lengths[too_long].argmax()])
        raise DataError(
            f"{len(too_long)} samples are longer than pack.tokens {options.tokens} (longest: {int(lengths[worst])} "
            f"tokens, id {dataset[worst].id}); raise pack.tokens, or set data.overlong to 'cut' or 'split'"
        )
    if len(too_long):
        lengths, legal = lengths.copy(), legal.copy()
        for i in too_long:
            legal[i] = len(legal_anchors(dataset[int(i)].supervised[: options.tokens]))
        lengths[too_long] = options.tokens
    anchors = count_anchors(legal, options.anchors_per_document, options.anchor_density)
    if anchors.max(initial=0) > options.anchors:
        raise UserError(
            f"a sample draws {int(anchors.max())} anchors but pack.anchors is {options.anchors}; raise pack.anchors, "
            "or lower pack.anchors_per_document or pack.anchor_density"
        )
    if anchors.sum() == 0:
        raise DataError(
            "no sample has a legal anchor (two supervised tokens in a row), so there is nothing to train on"
        )
    schedule = Schedule(
        lengths=lengths,
        anchors=anchors,
        num_tokens=options.tokens,
        num_anchors=options.anchors,
        window=options.window,
        packs_per_step=packs_per_step,
        epochs=epochs,
        steps=steps,
        seed=seed,
        mix=mix,
    )
    return schedule, len(too_long)


def pack_stream(
    builder: PackBuilder, schedule: Schedule, places: Iterable[tuple[int, int]], workers: int
) -> Generator[Pack, None, None]:
    """The packs at these (epoch, index) places of the schedule, in order, built ahead by `workers` processes.

    Close it to end them: they do not heed SIGINT and SIGTERM, which schedulers and terminals send to all processes of
    a run, while only the main one can save. Raises EnvironmentFault, within seconds, when one of them has died.
    """
    ahead: deque[PackOrder] = deque()  # asked for, and not yet there

    def orders() -> Iterator[PackOrder]:
        for epoch, index in places:
            ahead.append(PackOrder(epoch=epoch, index=index, samples=schedule.packs(epoch)[index]))
            yield ahead[-1]

    before = signal.getsignal(signal.SIGCHLD)
    packs = iter(
        DataLoader(
            builder, batch_size=None, sampler=_Orders(orders), num_workers=workers, worker_init_fn=_leave_signals_alone
        )
    )
    # torch's handler raises a worker's death wherever the main process is, and there it would pass for a fault of
    # that place (of a collective, say). Without it, the wait for the next pack finds it out.
    signal.signal(signal.SIGCHLD, before)
    try:
        while True:
            try:
                pack = next(packs)
            except StopIteration:
                return
            except (RuntimeError, ConnectionError, EOFError) as error:
                waiting = "exited unexpectedly" in str(error)  # for a pack; otherwise a finished one died with it
                if workers and (waiting or not isinstance(error, RuntimeError)):
                    others = 0 if workers == 1 and waiting else len(ahead) - 1
                    raise EnvironmentFault(_death(builder, ahead[0], others)) from error
                raise
            ahead.popleft()
            yield pack
    finally:
        del packs


def _death(builder: PackBuilder, order: PackOrder, others: int) -> str:
    names = [builder.dataset.id(visit % len(builder.dataset)) for visit in order.samples.tolist()]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    after = f" or one of the {others} packs after it" if others else ""
    return (
        f"a loader process died while it built pack {order.index} of epoch {order.epoch} (samples {shown}){after}: it "
        "was killed or crashed. If the kernel's log says that memory ran out, lower data.workers; then start the same "
        "command again"
    )


def _leave_signals_alone(_worker: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@dataclass(frozen=True)
class _Orders:
    """A sampler is anything that can be iterated anew."""

    make: object

    def __iter__(self) -> Iterator[PackOrder]:
        return self.make()
