"""`verify` on a GPU: in bf16, what was exported drafts as it did in training, and what was spoilt does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.negative_controls import judge, spoil
from draftsmith.commands import ExportCommand
from draftsmith.telemetry import Console
from draftsmith.train import train
from draftsmith.verbs import export
from tests.overfit import make_recipe, make_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's own advice about precision and compilation is not about this code
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[Path, Path]:
    """An export whose record was measured in bf16 on the GPU, and its target. Uncompiled, so it takes seconds."""
    folder = tmp_path_factory.mktemp("gpu")
    target = make_target(folder / "target", hidden=64, heads=2)
    recipe = make_recipe(folder, target, lr=1.5e-3)
    recipe = replace(recipe, device="cuda", compile="off", pack=replace(recipe.pack, tokens=384, anchors=96))
    train(recipe, Console())
    export(ExportCommand(run=recipe.run, output=str(folder / "export"), device="cuda"))
    return folder / "export", target


def test_the_export_passes_in_bf16(exported):
    found = judge(*exported, device="cuda")
    assert found.failed == [], found.rows
    print("\n".join(row.said for row in found.rows))
    assert found.figures["reference"] > 1.5, "it learnt answers that the target gives in fp32"


@pytest.mark.parametrize("control", ["tap ids shifted by one", "two tensors swapped", "norm weights reset"])
def test_bounds_for_bf16_still_catch_what_is_wrong(control, exported, tmp_path):
    found = judge(spoil(control, exported[0], tmp_path / "spoilt"), exported[1], device="cuda")
    assert "proposals" in found.failed, found.rows


def test_the_export_passes_on_a_cpu_too(exported):
    found = judge(*exported, device="cpu")
    assert found.failed == [], "recorded in bf16, checked in fp32"
