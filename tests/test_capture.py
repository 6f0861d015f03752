"""Features on disk: the same training as with the target beside it, and never half a file."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from draftsmith.errors import EnvironmentFault
from draftsmith.features import disk
from draftsmith.targets import HFTarget
from draftsmith.telemetry import Console
from draftsmith.train import train
from tests.test_train import losses, quiet


@pytest.fixture
def offline(recipe):
    return replace(quiet(recipe), layout="offline")


@pytest.fixture
def captures(monkeypatch) -> list[int]:
    """Packs that the target has run."""
    ran, original = [], HFTarget.capture

    def counted(self, pack):
        ran.append(pack.index)
        return original(self, pack)

    monkeypatch.setattr(HFTarget, "capture", counted)
    return ran


def test_offline_equals_colocated(offline, tmp_path):
    colocated = replace(offline, layout="colocated", run=str(tmp_path / "colocated"))
    train(offline, Console())
    train(colocated, Console())
    assert losses(offline) == pytest.approx(losses(colocated), rel=5e-3)
    assert losses(offline) != losses(colocated), "features on disk are bf16"


def test_features_are_captured_once(offline, captures):
    train(offline, Console())
    num = len(captures)
    assert num > 0
    train(offline, Console())
    assert len(captures) == num


def test_cut_samples_are_captured_cut(offline, world):
    cut = replace(
        offline,
        data=replace(offline.data, overlong="cut"),
        pack=replace(offline.pack, tokens=48),
        optim=replace(offline.optim, noise="none"),
    )
    train(cut, Console())
    manifest = json.loads((Path(cut.run) / "features" / "manifest.json").read_text())
    assert max(b - a for a, b in zip(manifest["offsets"], manifest["offsets"][1:], strict=False)) == 48


def test_a_killed_capture_goes_on_and_gives_the_same_bits(offline, captures, monkeypatch, tmp_path):
    """The kill falls between the rows of a group and its mark: those rows are written again, the others are not."""
    whole = replace(offline, run=str(tmp_path / "whole"))
    train(whole, Console())
    num = len(captures)
    captures.clear()
    fill = disk.DiskFeatures._fill

    def dies(self, number):
        fill(self, number)
        if int(self.done.sum()) == 3:
            self.done[number] = 0
            self.done.flush()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(disk.DiskFeatures, "_fill", dies)
        with pytest.raises(KeyboardInterrupt):
            train(offline, Console())
    train(offline, Console())
    assert len(captures) == num + 1
    assert losses(offline) == losses(whole)


def test_groups_are_consecutive_and_within_the_budget():
    lengths = np.array([5, 5, 1, 10, 3, 7, 7])
    assert disk.group_numbers(lengths, 10).tolist() == [0, 0, 1, 2, 3, 3, 4]


@pytest.mark.parametrize("damage", ["torn manifest", "short rows"])
def test_damaged_features_are_captured_again(offline, captures, damage):
    train(offline, Console())
    num = len(captures)
    features = Path(offline.run) / "features"
    if damage == "torn manifest":
        text = (features / "manifest.json").read_text()
        (features / "manifest.json").write_text(text[: len(text) // 2])
    else:
        with open(features / "features.bin", "r+b") as rows:
            rows.truncate(100)
    shutil.rmtree(Path(offline.run) / "checkpoints")  # from the first step again: every sample is asked for
    train(offline, Console())
    assert len(captures) == 2 * num


def test_too_small_a_disk_is_said_before_anything_is_computed(offline, captures, monkeypatch):
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with pytest.raises(EnvironmentFault, match="free some space, or use layout"):
        train(offline, Console())
    assert captures == []
