"""The loop: it learns, it measures, and nothing goes wrong in silence."""

from __future__ import annotations

import errno
import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith import checkpoint
from draftsmith.checks import check_recipe
from draftsmith.config import Recipe
from draftsmith.data.dataset import PreparedDataset
from draftsmith.errors import DataError, Diverged, EnvironmentFault, UserError
from draftsmith.ledger import Ledger
from draftsmith.targets import HFTarget
from draftsmith.telemetry import Console
from draftsmith.train import train
from draftsmith.types import Features
from tests.conftest import make_recipe, with_options


def lines(recipe: Recipe) -> list[dict]:
    """Lines about training; those about evaluation are left out."""
    text = (Path(recipe.run) / "metrics.jsonl").read_text()
    return [row for row in map(json.loads, text.splitlines()) if "evaluation" not in row]


def losses(recipe: Recipe) -> list[float]:
    return [row["loss"] for row in lines(recipe)]


def newest(recipe: Recipe) -> checkpoint.Checkpoint:
    found = checkpoint.newest_valid(Path(recipe.run) / "checkpoints")
    assert found is not None
    return found


def quiet(recipe: Recipe, **optim) -> Recipe:
    """Few steps, no decoding, metrics at each step."""
    recipe = with_options(with_options(recipe, "evaluation", prompts=""), "log", every=1)
    return with_options(recipe, "optim", **{"steps": 4, **optim})


@pytest.fixture(scope="module")
def overfitted(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, dict]:
    """A run that learned the conversations nearly by heart, and its results."""
    recipe = make_recipe(world, tmp_path_factory.mktemp("overfitted"))
    recipe = with_options(recipe, "optim", steps=300, lr=6e-3)
    recipe = with_options(recipe, "pack", tokens=440, anchors=128, anchors_per_document=24, anchor_density=1.0)
    recipe = with_options(recipe, "checkpoint", every=100)
    # 21 tokens: prefill's, and five whole blocks of four
    recipe = with_options(recipe, "evaluation", every=300, limit=24, max_new_tokens=21, at_start=True)
    recipe = with_options(recipe, "log", every=5)
    return recipe, train(recipe, Console())


def test_serving_accepts_what_training_promised(overfitted):
    recipe, results = overfitted
    promised = lines(recipe)[-1]["accept"]
    assert promised > 3.5, "nearly every block of 4 is right"
    assert results["accept_length_pooled_after"] == pytest.approx(promised, rel=0.05)
    assert results["accept_length_after"] > 2 * results["accept_length_before"]


def test_an_overfitted_drafter_changes_no_output(overfitted):
    _, results = overfitted
    assert results["lossless"] is True and results["prompts"] == 24


def test_loss_falls(overfitted):
    recipe, _ = overfitted
    assert losses(recipe)[-1] < 0.3 * losses(recipe)[0]


def test_metrics_hold_every_promised_key(overfitted):
    recipe, _ = overfitted
    row = lines(recipe)[-1]
    assert row["step"] == row["steps"] == 300
    for key in ("loss", "accept", "accuracy", "topk_accuracy", "lr", "grad_norm", "tokens_per_second"):
        assert math.isfinite(row[key]), key
    assert len(row["accuracy_by_slot"]) == 3 and all(0 <= share <= 1 for share in row["accuracy_by_slot"])
    assert row["accuracy_by_slot"][0] <= row["topk_accuracy"] + 0.1 <= 1.1
    assert 0 < row["padding"] < 1 and 0 < row["labelled"] <= 1 and row["skipped"] == 0
    assert "nonfinite" not in row


def test_metrics_are_strict_json(overfitted):
    recipe, _ = overfitted

    def refuse(word: str):
        raise AssertionError(f"{word} is not JSON")

    for line in (Path(recipe.run) / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_the_best_checkpoint_is_kept(recipe, monkeypatch):
    """Decoded accept length is best at the first of three evaluations; later ones would push it out."""
    scores = iter([3.0, 2.0, 1.0])

    def fake(report):
        return {
            "accept_length": next(scores),
            "accept_length_pooled": 1.0,
            "lossless": True,
            "num_near_ties": 0,
            "prompts": 2,
        }

    monkeypatch.setattr("draftsmith.report.Report._own_evaluation", fake)
    recipe = with_options(with_options(recipe, "evaluation", every=4), "checkpoint", every=2)
    results = train(recipe, Console())
    assert results["best"] == {"checkpoint": "step-00000004", "accept_length": 3.0}
    kept = sorted(path.name for path in (Path(recipe.run) / "checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000010", "step-00000012"]


def test_accumulated_packs_make_one_step(recipe):
    train(quiet(recipe, packs_per_step=4), Console())
    ledger = [json.loads(line) for line in (Path(recipe.run) / "ledger.jsonl").read_text().splitlines()]
    assert [len(row["packs"]) for row in ledger][0] == 4
    assert all(len(set(row["packs"])) == len(row["packs"]) <= 4 for row in ledger)
    assert len(losses(recipe)) == 4


def test_accumulation_order_of_division(recipe, world, tmp_path):
    """Two packs in one step have the gradient of their weighted sum: the same norm as both packs in one pack."""
    wide = with_options(quiet(recipe, steps=1), "pack", tokens=2000, anchors=400)
    lanes = replace(quiet(recipe, steps=1, packs_per_step=100), run=str(tmp_path / "lanes"))
    train(wide, Console())
    train(lanes, Console())
    (one,), (many,) = lines(wide), lines(lanes)
    assert one["loss"] == pytest.approx(many["loss"], rel=1e-4)
    assert one["grad_norm"] == pytest.approx(many["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("noise", ["uniform", "gaussian"])
def test_noise_changes_the_loss_reproducibly(recipe, tmp_path, noise):
    plain = quiet(recipe)
    noisy = replace(quiet(recipe, noise=noise, noise_scale=0.5), run=str(tmp_path / "noisy"))
    again = replace(noisy, run=str(tmp_path / "again"))
    for each in (plain, noisy, again):
        train(each, Console())
    assert losses(noisy) == losses(again) != losses(plain)


@pytest.mark.parametrize("scaled", [True, False])
def test_training_with_and_without_feature_scales(recipe, scaled):
    recipe = quiet(recipe, steps=30, feature_scale=scaled)
    train(recipe, Console())
    found = losses(recipe)
    assert sum(found[-5:]) < 0.9 * sum(found[:5])


def test_a_set_with_nothing_legal_is_refused(recipe, monkeypatch):
    monkeypatch.setattr(
        PreparedDataset, "legal_counts", property(lambda self: torch.zeros(len(self), dtype=torch.int64).numpy())
    )
    with pytest.raises(DataError, match="no sample has a legal anchor"):
        train(recipe, Console())
    assert not Path(recipe.run).exists()


def test_a_step_with_nothing_supervised_is_skipped(recipe, monkeypatch, capsys):
    """Packs without labels cost a step and a warning, not NaN weights."""
    from draftsmith.data.loader import PackBuilder

    build = PackBuilder.build
    monkeypatch.setattr(
        PackBuilder,
        "build",
        lambda self, order, *, with_anchors: build(self, order, with_anchors=with_anchors and order.index != 1),
    )
    train(quiet(recipe, steps=3), Console())
    assert [row["unsupervised"] for row in lines(recipe)] == [0, 1, 0]
    assert [row["skipped"] for row in lines(recipe)] == [0, 0, 0]  # nothing went wrong, so it does not end the run
    assert lines(recipe)[1]["loss"] is None
    assert "1 steps up to 2 had nothing supervised" in capsys.readouterr().out
    assert all(value.isfinite().all() for value in newest(recipe).tensors("model").values())


def poison(monkeypatch: pytest.MonkeyPatch, is_bad) -> None:
    """One NaN among the features of the packs for which `is_bad(epoch, index)`."""
    capture = HFTarget.capture

    def captured(self, pack):
        context = capture(self, pack).context
        if is_bad(pack.epoch, pack.index):
            context = context.clone()
            context[1, 0] = float("nan")
        return Features(context=context)

    monkeypatch.setattr(HFTarget, "capture", captured)


def test_a_step_on_non_finite_features_changes_nothing(recipe, monkeypatch, capsys):
    poison(monkeypatch, lambda epoch, index: (epoch, index) == (0, 3))
    recipe = with_options(quiet(recipe, steps=4), "checkpoint", every=3)
    train(recipe, Console())
    before, after = (checkpoint.load(Path(recipe.run) / "checkpoints" / f"step-0000000{n}") for n in (3, 4))
    for stem in ("model", "optimizer"):
        old, new = before.tensors(stem), after.tensors(stem)
        assert all(torch.equal(old[name], new[name]) for name in old)
    assert "step 4 changed nothing" in (said := capsys.readouterr().out)
    assert "pack 3 of epoch 0" in said


def test_the_warning_names_the_bad_pack_among_several_steps(recipe, monkeypatch, capsys):
    poison(monkeypatch, lambda epoch, index: (epoch, index) == (0, 1))
    train(with_options(quiet(recipe, steps=4), "log", every=4), Console())
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1 and "step 2 " in warnings[0] and "pack 1 of epoch 0" in warnings[0]


def test_too_many_skipped_steps_end_the_run(recipe, monkeypatch):
    poison(monkeypatch, lambda epoch, index: index >= 4)
    recipe = with_options(quiet(recipe, steps=12, max_skipped=3), "checkpoint", every=2)
    with pytest.raises(Diverged, match="3 steps were skipped") as raised:
        train(recipe, Console())
    assert raised.value.exit_code == 5
    assert newest(recipe).step == 6
    assert len(losses(recipe)) == 7


def test_one_bad_pack_does_not_spoil_the_channel_sizes(recipe, monkeypatch):
    poison(monkeypatch, lambda epoch, index: index == 0)
    train(quiet(recipe, steps=3), Console())
    assert newest(recipe).tensors("optimizer")["channel_size"].isfinite().all()
    assert [row["skipped"] for row in lines(recipe)] == [1, 0, 0]


def full_disk(monkeypatch: pytest.MonkeyPatch, fails) -> None:
    """Writing tensors fails with ENOSPC in the saves (counted from 1) for which `fails(number)`."""
    write, saves = checkpoint._write_tensors, []

    def failing(path, named):
        if path.name == "model.safetensors":
            saves.append(path)
        if fails(len(saves)):
            raise OSError(errno.ENOSPC, "No space left on device", path.name)
        write(path, named)

    monkeypatch.setattr(checkpoint, "_write_tensors", failing)


def saves_often(recipe: Recipe) -> Recipe:
    return with_options(quiet(recipe, steps=6), "checkpoint", every=1)


def test_a_full_disk_is_a_warning_at_first(recipe, monkeypatch, capsys):
    full_disk(monkeypatch, lambda number: number in (2, 3))
    train(saves_often(recipe), Console())
    said = capsys.readouterr().out
    assert said.count("No space left on device") == 2 and said.count("Training goes on") == 2
    assert newest(recipe).step == 6


def full_for_the_ledger(monkeypatch: pytest.MonkeyPatch, steps: range) -> None:
    """The disk takes no line of the ledger while these steps are the last."""
    write = Ledger._write

    def failing(self):
        if self._step in steps:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self)

    monkeypatch.setattr(Ledger, "_write", failing)


def test_a_disk_too_full_for_the_ledger_is_a_failed_save(recipe, monkeypatch, capsys):
    full_for_the_ledger(monkeypatch, range(2, 5))
    recipe = with_options(quiet(recipe, steps=6), "checkpoint", every=3)
    train(recipe, Console())
    said = capsys.readouterr().out
    assert said.count("kept in memory until the next save") == 1 and said.count("Training goes on.") == 1
    ledger = (Path(recipe.run) / "ledger.jsonl").read_bytes()
    assert ledger.count(b"\n") == 6 and newest(recipe).facts["ledger"] == hashlib.sha256(ledger).hexdigest()
    assert [path.name for path in (Path(recipe.run) / "checkpoints").iterdir()] == ["step-00000006"]


def test_a_ledger_that_cannot_be_written_at_the_end_ends_the_run_with_an_error(recipe, monkeypatch):
    full_for_the_ledger(monkeypatch, range(5, 7))
    with pytest.raises(EnvironmentFault, match="the ledger .* cannot be written: .*No space left") as raised:
        train(saves_often(recipe), Console())
    assert raised.value.exit_code == 3 and newest(recipe).step == 4


def test_a_disk_that_stays_full_ends_the_run_after_three_saves(recipe, monkeypatch):
    full_disk(monkeypatch, lambda number: number >= 2)
    with pytest.raises(EnvironmentFault, match="No space left") as raised:
        train(saves_often(recipe), Console())
    assert raised.value.exit_code == 3
    assert newest(recipe).step == 1
    assert len(losses(recipe)) == 4


def test_a_full_disk_at_the_last_save_ends_the_run_with_an_error(recipe, monkeypatch):
    full_disk(monkeypatch, lambda number: number == 6)
    with pytest.raises(EnvironmentFault, match="No space left"):
        train(saves_often(recipe), Console())
    assert newest(recipe).step == 5
    assert not (Path(recipe.run) / "results.json").exists()


def test_a_checkpoint_that_could_not_be_saved_is_not_the_best(recipe, monkeypatch):
    full_disk(monkeypatch, lambda number: number == 1)
    recipe = with_options(with_options(recipe, "optim", steps=2), "evaluation", every=1, limit=1, max_new_tokens=4)
    assert train(recipe, Console())["best"]["checkpoint"] == "step-00000002"


def test_warm_start_from_a_checkpoint(recipe, overfitted, tmp_path):
    donor = newest(overfitted[0])
    warm = replace(quiet(recipe, lr=1e-6), init=str(donor.path))
    train(warm, Console())
    assert losses(warm)[0] < 1.0
    cold = replace(quiet(recipe), run=str(tmp_path / "cold"))
    train(cold, Console())
    assert losses(cold)[0] > 3.0


def test_warm_start_names_what_does_not_fit(recipe, overfitted):
    donor = newest(overfitted[0])
    wrong = replace(with_options(recipe, "drafter", intermediate_size=48), init=str(donor.path))
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.down_proj\.weight is \(32, 64\), expected \(32, 48\)"):
        train(wrong, Console())
    assert not Path(recipe.run).exists()


def test_warm_start_from_nowhere(recipe, tmp_path):
    with pytest.raises(UserError, match="is no folder"):
        train(replace(recipe, init=str(tmp_path / "nowhere")), Console())
    assert not Path(recipe.run).exists()


def test_norms_move_in_fp32(overfitted):
    norms = {k: v for k, v in newest(overfitted[0]).tensors("model").items() if "norm" in k}
    assert norms and all(not torch.equal(value, torch.ones_like(value)) for value in norms.values())


def test_options_without_effect_are_refused(recipe):
    for changed in (with_options(recipe, "optim", noise="uniform"), with_options(recipe, "optim", noise_scale=0.1)):
        with pytest.raises(UserError, match=r"optim\.noise"):
            check_recipe(changed)
