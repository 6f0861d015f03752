"""Packs from a prepared set: the same for any number of workers, and for any neighbours."""

from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from draftsmith.config import PackOptions
from draftsmith.data.dataset import PreparedDataset, open_prepared
from draftsmith.data.loader import PackBuilder, PackOrder, make_schedule, pack_stream
from draftsmith.errors import DataError, UserError
from draftsmith.types import Pack, Sample
from tests.handmade import block_shape, document

SHAPE = block_shape(4, window=6)
OPTIONS = PackOptions(tokens=60, anchors=12, anchors_per_document=4, anchor_density=0.5)


class ListedDataset(PreparedDataset):
    """A prepared set whose rows are given."""

    def __init__(self, samples: list[Sample]) -> None:
        super().__init__(Path(), {"counts": {"kept": len(samples)}})
        self.samples = samples
        self._lengths = np.array([len(s.tokens) for s in samples])
        self._legal = np.array([int((s.supervised[:-1] & s.supervised[1:]).sum()) for s in samples])

    @property
    def lengths(self) -> np.ndarray:
        return self._lengths

    @property
    def legal_counts(self) -> np.ndarray:
        return self._legal

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


# Lengths 5 to 28, the first four tokens a prompt, one document without any supervision.
DATASET = ListedDataset(
    [document(5 + i, first=10 * i, supervised=list(range(4, 5 + i)), name=f"row {i}") for i in range(24)]
    + [document(20, supervised=[], name="prompt only")]
)


def schedule_of(dataset=DATASET, options=OPTIONS, *, cut=False, steps=None, epochs=1):
    return make_schedule(dataset, options, cut=cut, packs_per_step=2, epochs=epochs, steps=steps, seed=5)


def build(samples: list[int], *, dataset=DATASET, options=OPTIONS, epoch=0) -> Pack:
    order = PackOrder(epoch=epoch, index=0, samples=np.array(samples))
    return PackBuilder(dataset, options, SHAPE, 5)[order]


def contents(value) -> list:
    """Every field at any depth, tensors as type, shape and bytes."""
    if is_dataclass(value):
        return [entry for field in fields(value) for entry in contents(getattr(value, field.name))]
    if isinstance(value, torch.Tensor):
        return [(value.dtype, tuple(value.shape), value.numpy().tobytes())]
    return [value]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # torch counts the machine's cores
def test_packs_do_not_depend_on_the_number_of_workers(world):
    dataset = open_prepared(world / "prepared")
    options = PackOptions(tokens=160, anchors=24, anchors_per_document=8, anchor_density=0.5)
    schedule, _ = make_schedule(dataset, options, cut=False, packs_per_step=2, epochs=2, steps=None, seed=0)
    builder = PackBuilder(dataset, options, SHAPE, 0)
    streams = [
        [contents(pack) for pack in pack_stream(builder, schedule, schedule.places(), workers)] for workers in (0, 1, 4)
    ]
    assert len(streams[0]) == len(schedule.packs(0)) + len(schedule.packs(1))
    assert streams[0] == streams[1] == streams[2]


def test_a_stream_may_begin_at_any_step():
    schedule, _ = schedule_of(steps=9)
    builder = PackBuilder(DATASET, OPTIONS, SHAPE, 5)
    whole = [contents(p) for p in pack_stream(builder, schedule, schedule.places(), 0)]
    skipped = sum(len(schedule.step_packs(step)) for step in range(4))
    assert [contents(p) for p in pack_stream(builder, schedule, schedule.places(4), 0)] == whole[skipped:]


def test_stream_follows_the_schedule():
    schedule, _ = schedule_of(epochs=2)
    packs = list(pack_stream(PackBuilder(DATASET, OPTIONS, SHAPE, 5), schedule, schedule.places(), 0))
    expected = [(epoch, i) for epoch in range(2) for i in range(len(schedule.packs(epoch)))]
    assert [(p.epoch, p.index) for p in packs] == expected
    first = [row for p in packs if p.epoch == 0 for row in p.samples]
    assert sorted(first) == list(range(25))


def test_pack_holds_its_documents_and_an_unsupervised_tail():
    pack = build([0, 3, 7])
    assert pack.doc_lengths == (5, 8, 12)
    assert pack.num_tokens == 25
    assert pack.tokens.tolist() == [*range(5), *range(30, 38), *range(70, 82), *[0] * 35]
    assert pack.position.tolist() == [*range(5), *range(8), *range(12), *range(35)]
    assert pack.doc_start.tolist() == [0] * 5 + [5] * 8 + [13] * 12 + [25] * 35
    assert (pack.samples, pack.sample_ids) == ((0, 3, 7), ("row 0", "row 3", "row 7"))
    assert pack.num_supervised == 1 + 4 + 8


def test_anchors_stay_in_their_documents():
    """As many as the document's legal positions ask for, none in a prompt, none in the tail."""
    pack = build([3, 24, 7])  # of 3, 0 and 7 legal positions
    anchors = pack.blocks.anchor[pack.blocks.anchor >= 0]
    assert len(anchors) == 2 + 0 + 4
    legal = {*range(4, 7), *range(28 + 4, 28 + 11)}
    assert set(anchors.tolist()) <= legal


def relative_anchors(pack: Pack, document: int) -> list[int]:
    start = sum(pack.doc_lengths[:document])
    end = start + pack.doc_lengths[document]
    return [a - start for a in pack.blocks.anchor.tolist() if start <= a < end]


def test_anchors_do_not_depend_on_neighbours():
    alone = relative_anchors(build([15]), 0)
    assert relative_anchors(build([3, 15]), 1) == alone
    assert relative_anchors(build([15, 20]), 0) == alone
    assert relative_anchors(build([15], options=replace(OPTIONS, tokens=80)), 0) == alone


def test_anchors_are_redrawn_each_epoch():
    assert len({tuple(relative_anchors(build([20], epoch=epoch), 0)) for epoch in range(8)}) > 4


def test_a_second_visit_of_a_row_draws_other_anchors():
    first, second, alone = build([20]), build([20 + len(DATASET)]), build([20, 20 + len(DATASET)])
    assert (second.samples, second.sample_ids) == ((20,), ("row 20",))
    assert torch.equal(first.tokens, second.tokens)
    assert relative_anchors(first, 0) != relative_anchors(second, 0)
    assert relative_anchors(alone, 1) == relative_anchors(second, 0)
    assert (alone.samples, alone.doc_lengths) == ((20, 20), (25, 25))


def test_no_label_crosses_documents_that_begin_supervised():
    """Every document supervised throughout, every anchor drawn: labels stay below the document's end."""
    dataset = ListedDataset([document(6, first=10 * i, name=str(i)) for i in range(4)])
    options = PackOptions(tokens=24, anchors=20, anchors_per_document=5, anchor_density=1.0)
    pack = build([0, 1, 2, 3], dataset=dataset, options=options)
    blocks = pack.blocks
    assert (blocks.anchor >= 0).all()
    owner = blocks.anchor[:, None].expand(-1, 4) // 6
    assert torch.equal((blocks.label // 10)[blocks.weight > 0], owner[blocks.weight > 0])
    assert blocks.anchor.tolist() == [6 * i + a for i in range(4) for a in range(5)]


def test_num_labelled_counts_tokens_not_slots():
    """Labels of two overlapping blocks are counted once; the anchor's own token is no label."""
    dataset = ListedDataset([document(8)])
    options = PackOptions(tokens=10, anchors=7, anchors_per_document=7, anchor_density=1.0)
    pack = build([0], dataset=dataset, options=options)
    assert (pack.num_supervised, pack.num_labelled) == (8, 7)  # all but token 0
    few = build([0], dataset=dataset, options=PackOptions(tokens=10, anchors=1, anchors_per_document=1))
    assert few.num_labelled == int((few.blocks.weight > 0).sum())


def test_pack_of_prompts_alone_has_empty_blocks():
    pack = build([24])
    assert (pack.blocks.anchor == -1).all()
    assert (pack.blocks.num_rows, pack.num_supervised, pack.num_labelled) == (0, 0, 0)


def test_pack_without_anchors_is_the_same_otherwise():
    """Capturing features to disk needs the tokens only."""
    builder = PackBuilder(DATASET, OPTIONS, SHAPE, 5)
    order = PackOrder(epoch=0, index=0, samples=np.array([3, 7]))
    bare, full = builder.build(order, with_anchors=False), builder[order]
    assert (bare.blocks.anchor == -1).all()
    assert torch.equal(bare.tokens, full.tokens)
    assert torch.equal(bare.doc_start, full.doc_start)


# What no pack can hold


LONG = ListedDataset([document(70, supervised=list(range(50, 70)), name="long"), document(20, name="short")])


def test_sample_longer_than_the_pack_is_refused():
    with pytest.raises(DataError, match=r"1 samples are longer than pack.tokens 60 \(longest: 70 tokens, id long\)"):
        schedule_of(LONG)


def test_sample_longer_than_the_pack_is_cut_and_counted():
    """Its anchors are half the legal positions of what is left, 9 instead of 19."""
    options = replace(OPTIONS, anchors_per_document=12)
    schedule, num_cut = schedule_of(LONG, options, cut=True)
    assert num_cut == 1
    assert schedule.lengths.tolist() == [60, 20]
    assert schedule.anchors.tolist() == [5, 10]
    pack = build([0], dataset=LONG, options=options)
    assert pack.doc_lengths == (60,)
    assert pack.num_supervised == 10
    assert (pack.blocks.anchor[pack.blocks.anchor >= 0] < 59).all()


def test_cutting_does_not_change_the_dataset():
    dataset = ListedDataset(LONG.samples)
    schedule_of(dataset, cut=True)
    assert dataset.lengths.tolist() == [70, 20]
    assert dataset.legal_counts.tolist() == [19, 19]


def test_schedule_and_packs_agree_about_the_number_of_anchors():
    for dataset, cut in ((DATASET, False), (LONG, True)):
        schedule, _ = schedule_of(dataset, cut=cut)
        for row, expected in enumerate(schedule.anchors):
            assert (build([row], dataset=dataset).blocks.anchor >= 0).sum() == expected


def test_anchor_budget_below_one_samples_need_is_refused():
    options = PackOptions(tokens=60, anchors=3, anchors_per_document=4, anchor_density=0.5)
    with pytest.raises(UserError, match="a sample draws 4 anchors but pack.anchors is 3"):
        schedule_of(DATASET, options)


def test_set_without_a_legal_anchor_is_refused():
    dataset = ListedDataset([document(9, supervised=[3, 5, 7])])
    with pytest.raises(DataError, match="no sample has a legal anchor"):
        schedule_of(dataset)
