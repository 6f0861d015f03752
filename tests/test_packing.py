"""The order of packs: complete, within budget, and a pure function of its inputs."""

from dataclasses import replace

import numpy as np
import pytest

from draftsmith.packing import Schedule, count_anchors


def schedule_of(lengths, anchors, *, num_tokens: int, num_anchors: int, **options) -> Schedule:
    defaults = {"window": 1 << 16, "packs_per_step": 1, "epochs": 1, "seed": 0}
    return Schedule(
        lengths=np.asarray(lengths, np.int64),
        anchors=np.asarray(anchors, np.int64),
        num_tokens=num_tokens,
        num_anchors=num_anchors,
        **defaults | options,
    )


def random_schedule(seed: int) -> Schedule:
    """Some set, some budgets; each sample fits a pack by itself."""
    random = np.random.default_rng(seed)
    num, num_tokens, num_anchors = random.integers([1, 20, 1], [200, 400, 60]).tolist()
    return schedule_of(
        random.integers(1, num_tokens + 1, num),
        random.integers(0, num_anchors + 1, num),
        num_tokens=num_tokens,
        num_anchors=num_anchors,
        window=int(random.integers(1, 250)),
        packs_per_step=int(random.integers(1, 5)),
        epochs=int(random.integers(1, 4)),
        seed=seed,
    )


def as_lists(packs) -> list[list[int]]:
    return [pack.tolist() for pack in packs]


RANDOM = [random_schedule(seed) for seed in range(40)]


@pytest.mark.parametrize("schedule", RANDOM)
def test_every_sample_is_packed_once_an_epoch(schedule):
    for epoch in range(schedule.epochs):
        packed = np.concatenate(schedule.packs(epoch))
        assert sorted(packed.tolist()) == list(range(len(schedule.lengths)))


@pytest.mark.parametrize("schedule", RANDOM)
def test_both_budgets_are_respected(schedule):
    for pack in schedule.packs(0):
        assert len(pack) > 0
        assert schedule.lengths[pack].sum() <= schedule.num_tokens
        assert schedule.anchors[pack].sum() <= schedule.num_anchors


@pytest.mark.parametrize("schedule", RANDOM)
def test_windows_are_packed_one_after_another(schedule):
    """Whatever the packs are, after each `window` samples a pack ends."""
    ends = np.cumsum([len(pack) for pack in schedule.packs(0)]).tolist()
    assert set(range(schedule.window, len(schedule.lengths), schedule.window)) <= set(ends)


@pytest.mark.parametrize("schedule", RANDOM)
def test_steps_cover_each_epoch_in_order(schedule):
    """Every pack of every epoch once, no step across the end of an epoch, only an epoch's last step short."""
    lanes = [schedule.step_packs(step) for step in range(schedule.num_steps)]
    everything = [(epoch, i) for epoch in range(schedule.epochs) for i in range(len(schedule.packs(epoch)))]
    assert [pack for lane in lanes for pack in lane] == everything
    for lane, following in zip(lanes, [*lanes[1:], None], strict=True):
        assert len({epoch for epoch, _ in lane}) == 1
        ends_epoch = following is None or following[0][0] != lane[0][0]
        assert len(lane) == schedule.packs_per_step or (ends_epoch and 0 < len(lane))


def test_schedule_is_a_pure_function():
    """Two fresh schedules agree, and a pack is found without the ones before."""
    walked, jumped = random_schedule(7), random_schedule(7)
    for epoch in range(6):
        walked.packs(epoch)
    assert as_lists(jumped.packs(5)) == as_lists(walked.packs(5))
    assert as_lists(walked.packs(0)) == as_lists(random_schedule(7).packs(0))


def test_company_of_a_sample_depends_on_epoch_and_seed():
    """Not only the order of the packs: which samples share a pack is drawn anew."""
    schedule = schedule_of([5] * 100, [1] * 100, num_tokens=20, num_anchors=10)
    epochs = [schedule.packs(0), schedule.packs(1), replace(schedule, seed=1).packs(0)]
    assert len({frozenset(frozenset(pack) for pack in as_lists(packs)) for packs in epochs}) == 3


def test_packs_of_a_window_are_shuffled():
    """Best fit makes the packs of short samples last; the run must not see them last."""
    lengths = np.repeat([100, 1], [200, 200])  # 200 packs of one sample, 2 packs of a hundred
    sizes = [len(pack) for pack in schedule_of(lengths, lengths * 0, num_tokens=100, num_anchors=1).packs(0)]
    assert sorted(sizes) == [1] * 200 + [100] * 2
    assert sizes != sorted(sizes)


def test_fill_on_log_normal_lengths():
    """At least 97 % of the tokens when a pack holds 30 average samples."""
    random = np.random.default_rng(0)
    lengths = np.maximum(1, random.lognormal(mean=5.0, sigma=1.0, size=6000)).astype(np.int64)
    budget = int(30 * lengths.mean())
    schedule = schedule_of(np.minimum(lengths, budget), lengths * 0 + 1, num_tokens=budget, num_anchors=budget)
    assert schedule.fill()[0] >= 0.97


def test_fill_is_the_share_of_each_budget():
    schedule = schedule_of([6, 6, 8], [1, 1, 2], num_tokens=10, num_anchors=4)
    assert schedule.fill() == (pytest.approx(20 / 30), pytest.approx(4 / 12))


def test_anchors_may_be_the_budget_that_closes_a_pack():
    schedule = schedule_of([10] * 50, [8] * 50, num_tokens=1000, num_anchors=16)
    assert [len(pack) for pack in schedule.packs(0)] == [2] * 25


def test_a_pack_full_of_anchors_still_takes_samples_without_any():
    """Long documents without anchors beside short ones with many; both budgets can be filled to the brim."""
    lengths = np.repeat([90, 10], [20, 20])
    anchors = np.repeat([0, 16], [20, 20])
    schedule = schedule_of(lengths, anchors, num_tokens=100, num_anchors=16)
    assert len(schedule.packs(0)) == 20
    assert schedule.fill() == (1.0, 1.0)


def test_sample_as_large_as_the_pack():
    schedule = schedule_of([100, 1, 99], [1, 1, 1], num_tokens=100, num_anchors=2)
    assert sorted(map(sorted, as_lists(schedule.packs(0)))) == [[0], [1, 2]]


STEADY = {"num_tokens": 10, "num_anchors": 10, "packs_per_step": 2}  # 5 packs and so 3 steps an epoch


def test_steps_cuts_epochs():
    schedule = schedule_of([10] * 5, [1] * 5, **STEADY, epochs=4, steps=2)
    assert schedule.num_steps == 2
    assert [len(schedule.step_packs(step)) for step in range(2)] == [2, 2]


def test_steps_extends_epochs():
    schedule = schedule_of([10] * 5, [1] * 5, **STEADY, epochs=1, steps=7)
    assert schedule.num_steps == 7
    assert [schedule.step_packs(step) for step in range(7)] == [
        *[((0, 0), (0, 1)), ((0, 2), (0, 3)), ((0, 4),)],
        *[((1, 0), (1, 1)), ((1, 2), (1, 3)), ((1, 4),)],
        ((2, 0), (2, 1)),
    ]


def test_without_steps_epochs_decide():
    assert schedule_of([10] * 5, [1] * 5, **STEADY, epochs=4).num_steps == 12


@pytest.mark.parametrize(
    ("legal", "per_document", "density", "expected"),
    [
        (0, 512, 0.125, 0),  # nothing to draw from
        (1, 512, 0.125, 1),  # rounded up
        (8, 512, 0.125, 1),
        (9, 512, 0.125, 2),
        (100, 512, 0.07, 7),  # 100 * 0.07 is a little more than 7 in floating point
        (8000, 512, 0.125, 512),
        (7, 512, 1.0, 7),
    ],
)
def test_anchors_of_a_document(legal, per_document, density, expected):
    assert count_anchors(np.array([legal]), per_document, density).tolist() == [expected]
