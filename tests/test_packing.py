"""The order of packs: complete, within budget, and a pure function of its inputs."""

from dataclasses import replace

import numpy as np
import pytest

from draftsmith.errors import UserError
from draftsmith.packing import Cap, Mix, Schedule, count_anchors, place_window


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


def conversations(num: int, num_tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Lengths (log-normal, mean 700) and legal positions, whose share of the length varies from row to row."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(np.log(700) - 0.5, 1.0, num), 16, num_tokens).astype(np.int64)
    return lengths, np.maximum(0, (lengths * random.beta(4, 2, num)).astype(np.int64) - 1)


@pytest.mark.parametrize(("num_tokens", "num_anchors", "waste"), [(49_152, 6_144, 0.01), (8_192, 1_024, 0.03)])
def test_waste_on_log_normal_lengths(num_tokens, num_anchors, waste):
    """With a density that asks for 97 % of the slots, both budgets are filled."""
    lengths, legal = conversations(65_536, num_tokens)
    density = 0.97 * num_anchors / num_tokens / (legal.sum() / lengths.sum())
    anchors = count_anchors(legal, num_anchors, density)
    tokens, slots = schedule_of(lengths, anchors, num_tokens=num_tokens, num_anchors=num_anchors).fill()
    assert tokens >= 1 - waste
    assert slots >= 0.95


@pytest.mark.parametrize("per_pack", [2, 12, 70])
def test_two_scarce_budgets_are_both_used(per_pack):
    """Where as many anchors are asked for as there are slots, neither budget hides the other's room."""
    lengths, legal = conversations(6_000, 700 * per_pack)
    anchors = count_anchors(legal, 100 * per_pack, 100 / 700 / (legal.sum() / lengths.sum()))
    schedule = schedule_of(lengths, anchors, num_tokens=700 * per_pack, num_anchors=100 * per_pack)
    assert min(schedule.fill()) >= {2: 0.85, 12: 0.96, 70: 0.97}[per_pack]


@pytest.mark.parametrize("seed", range(6))
def test_large_windows_hold_every_sample_within_budget(seed):
    random = np.random.default_rng(seed)
    num_tokens, num_anchors = random.integers([2_000, 50], [60_000, 8_000]).tolist()
    lengths, legal = conversations(int(random.integers(2_048, 9_000)), num_tokens, seed)
    anchors = count_anchors(legal, num_anchors, float(random.uniform(0.01, 0.5)))
    packs = place_window(lengths, anchors, num_tokens, num_anchors).members()
    assert sorted(np.concatenate(packs).tolist()) == list(range(len(lengths)))
    for pack in packs:
        assert lengths[pack].sum() <= num_tokens and anchors[pack].sum() <= num_anchors


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


def test_later_epochs_are_counted_as_they_are_packed():
    random = np.random.default_rng(3)
    lengths, legal = conversations(9_000, 20_000, 3)
    anchors = count_anchors(legal, 2_500, 0.12)
    schedule = schedule_of(lengths, anchors, num_tokens=20_000, num_anchors=2_500, epochs=4, window=4_000)
    mixed = replace(schedule, mix=Mix(weight=random.uniform(0.2, 2.0, 9_000), key=np.arange(9_000, dtype=np.uint64)))
    for one in (schedule, mixed):
        counts = np.diff(one.steps_before).tolist()
        assert counts == [len(one.packs(epoch)) for epoch in range(4)]
    assert len(set(np.diff(mixed.steps_before))) > 1


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


# Mixing: how often an epoch sees each row


def mixed(weights, caps=(), *, lengths=None, seed=0, epochs=1) -> Schedule:
    """One row per weight, its number its key."""
    weights = np.asarray(weights, float)
    mix = Mix(weight=weights, key=np.arange(len(weights), dtype=np.uint64), caps=tuple(caps))
    lengths = [5] * len(weights) if lengths is None else lengths
    return schedule_of(lengths, [1] * len(weights), num_tokens=20, num_anchors=10, mix=mix, seed=seed, epochs=epochs)


def seen(schedule: Schedule, epoch: int) -> np.ndarray:
    """How often the epoch sees each row."""
    return np.bincount(schedule.rows(epoch), minlength=len(schedule.lengths))


def test_weights_of_one_change_nothing():
    schedule = schedule_of([5] * 100, [1] * 100, num_tokens=20, num_anchors=10)
    assert as_lists(mixed([1] * 100).packs(3)) == as_lists(schedule.packs(3))


def test_whole_weights_repeat_rows_as_further_visits():
    schedule = mixed([2] * 10 + [0] * 10 + [3] * 10)
    visits = np.sort(np.concatenate(schedule.packs(0)))
    expected = [row + 30 * visit for row in range(30) for visit in range([2, 0, 3][row // 10])]
    assert visits.tolist() == sorted(expected)


@pytest.mark.parametrize("weight", [0.25, 1.5, 0.1])
def test_fractional_weights_are_exact_over_epochs_and_right_in_each(weight):
    counts = np.array([seen(mixed([weight] * 4_000), epoch) for epoch in range(20)])
    assert np.isin(counts, [np.floor(weight), np.ceil(weight)]).all()
    assert (counts.sum(axis=0) == 20 * weight).all()
    assert np.abs(counts.mean(axis=1) - weight).max() < 0.04


def test_a_rows_visits_do_not_depend_on_other_rows():
    whole = mixed([0.3] * 200)
    mix = whole.mix
    kept = np.arange(0, 200, 3)
    part = replace(whole, lengths=whole.lengths[kept], anchors=whole.anchors[kept])
    part = replace(part, mix=Mix(weight=mix.weight[kept], key=mix.key[kept]))
    assert seen(part, 4).tolist() == seen(whole, 4)[kept].tolist()


def test_mixing_depends_on_epoch_and_seed():
    drawn = [seen(mixed([0.5] * 200, seed=seed), epoch).tolist() for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert len(set(map(tuple, drawn))) == 3


def test_caps_limit_the_visits_of_a_tag():
    member = np.arange(300) < 200
    schedule = mixed([1] * 300, [Cap(tag="math", member=member, limit=40)], epochs=2)
    for epoch in range(2):
        counts = seen(schedule, epoch)
        assert counts[member].sum() == 40 and (counts[~member] == 1).all()
    assert seen(schedule, 0).tolist() != seen(schedule, 1).tolist()  # other rows in another epoch


def test_caps_take_each_row_once_before_any_twice():
    counts = seen(mixed([3] * 50, [Cap(tag="math", member=np.ones(50, bool), limit=70)]), 0)
    assert sorted(counts.tolist()) == [1] * 30 + [2] * 20


def test_caps_in_tokens():
    lengths = np.random.default_rng(0).integers(1, 20, 400)
    cap = Cap(tag="math", member=np.ones(400, bool), limit=1_000, in_tokens=True)
    schedule = mixed([1] * 400, [cap], lengths=lengths)
    assert 980 < lengths[schedule.rows(0)].sum() <= 1_000
    assert schedule.fill()[0] == pytest.approx(lengths[schedule.rows(0)].sum() / (20 * len(schedule.packs(0))))


def test_an_epoch_without_rows_is_refused():
    with pytest.raises(UserError, match="epoch 0 sees not a single row"):
        mixed([0] * 5).packs(0)
