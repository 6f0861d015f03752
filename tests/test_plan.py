"""`plan`: its sizes are those of the models and the wire, its figures are those that were measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import step, target
from draftsmith.cli import main
from draftsmith.config import DFlashOptions, to_toml
from draftsmith.drafters.dflash import DFlashDrafter, build_config
from draftsmith.figures import LINKS, STAGES, read_figures
from draftsmith.plan import splits
from draftsmith.shapes import Shape
from tests.conftest import with_options
from tests.test_cli import mistake  # noqa: F401

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
EIGHT = ("plan", "--target.path", "Qwen/Qwen3-8B", "--optim.packs_per_step", "16", "--gpus", "8")


def shape(name: str = "Qwen/Qwen3-8B", **drafter: Any) -> Shape:
    config = read_figures("").targets[name]
    return Shape(config=config, drafter=DFlashOptions(**drafter), tokens=49_152, anchors=6_144)


def said(capsys: pytest.CaptureFixture, *words: str) -> str:
    main([str(word) for word in words])
    return capsys.readouterr().out


def speeds(text: str) -> dict[str, int]:
    """Tokens per second by layout."""
    rows = re.findall(r"^(\d+ (?:colocated|offline|\+ \d+)) +([\d,]+) ", text, re.MULTILINE)
    return {name: int(number.replace(",", "")) for name, number in rows}


# Sizes


@pytest.mark.parametrize("kind", [{}, {"num_heads": 8, "num_kv_heads": 2, "head_dim": 4, "intermediate_size": 48}])
def test_weights_are_those_of_the_models(world, kind):
    options = DFlashOptions(num_layers=3, block_size=4, mask_token_id=300, **kind)
    config = AutoConfig.from_pretrained(world / "target")
    given = json.loads((world / "target" / "config.json").read_text())
    sizes = Shape(config=given, drafter=options, tokens=160, anchors=24, layer_ids=(0, 2))
    drafter = DFlashDrafter(build_config(options, config, (0, 2)))
    assert sizes.drafter_weights == sum(weight.numel() for weight in drafter.parameters())
    model = AutoModelForCausalLM.from_pretrained(world / "target")
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    assert sizes.tables + sizes.target_block_weights == sum(weight.numel() for weight in matrices)


def test_operations_are_those_of_the_benchmarks():
    benchmark, sizes = step.Shape(tokens=49_152, anchors=6_144), shape()
    assert sizes.taps == (1, 9, 17, 25, 33)
    assert sizes.target_flop == target.useful_flop(benchmark, 34)
    assert sizes.drafter_flop == step.useful_flop(benchmark, benchmark.anchors * 15)
    windows = {"layer_types": ("sliding_attention",) * 5, "sliding_window": 512}
    windowed = step.Shape(tokens=49_152, anchors=6_144, window=512)
    assert shape(**windows).drafter_flop == step.useful_flop(windowed, benchmark.anchors * 15)


def test_a_hybrid_27b_has_27b_weights():
    sizes = shape("Qwen/Qwen3.5-27B")
    assert sizes.tables + sizes.target_block_weights == pytest.approx(26.9e9, rel=0.01)
    assert sizes.taps == (1, 16, 31, 46, 61)
    assert sizes.target_flop / sizes.tokens == pytest.approx(48.1e9, rel=0.02)


# Figures


def test_figures_are_those_that_were_measured():
    """Within 3 %: measured again, the table follows when it has moved."""
    rows = read_figures("").rows
    results = {
        name: [
            row
            for row in json.loads((RESULTS / f"{name}-NVIDIA_H200.json").read_text())["rows"]
            if row.get("fp8", False) in (False, "none") and row.get("recompute", "none") == "none"
        ]
        for name in ("target", "step")
    }
    target_seconds = next(row["seconds_median"] for row in results["target"] if row["compiled"])
    assert rows["target"]["seconds"] == pytest.approx(target_seconds, rel=0.03)
    on = {row["tokens"]: row["seconds_median"] for row in results["step"] if row["compile"] == "on"}
    per_token = (on[49_152] - on[16_384]) / (49_152 - 16_384)
    assert rows["drafter"]["seconds"] == pytest.approx(49_152 * per_token, rel=0.03)
    assert rows["optimizer"]["seconds"] == pytest.approx(on[49_152] - 49_152 * per_token, abs=0.01)
    assert all(row["how"] and row["source"] for row in rows.values())
    assert set(rows) == {*STAGES, *LINKS}


def test_seconds_are_scaled_by_operations():
    figures = read_figures("")
    assert figures.seconds("target", shape()) == (figures.rows["target"]["seconds"], "measured")
    seconds, how = figures.seconds("target", shape("Qwen/Qwen3.5-27B"))
    factor = shape("Qwen/Qwen3.5-27B").target_flop / shape().target_flop
    assert seconds == pytest.approx(factor * figures.rows["target"]["seconds"])
    assert how == f"measured with Qwen/Qwen3-8B, scaled x {factor:.3f} by FLOP"


def test_own_figures_are_taken_as_they_are(tmp_path, capsys, world):
    rows = [{"stage": "target", "seconds": 2.0}, {"stage": "drafter", "seconds": 3.0}]
    rows.append({"stage": "optimizer", "seconds": 0.5})
    (tmp_path / "mine.json").write_text(json.dumps({"device": "my GPU", "rows": rows}))
    words = ("--target.path", world / "target", "--pack.tokens", 100, "--gpus", 1, "--figures", tmp_path / "mine.json")
    text = said(capsys, "plan", *words)
    assert "target, my GPU" in text and "3.0000 s a pack: measured" in text
    assert "expected     18 tokens/s, 5.500 s a step" in text


# What it says


def test_a_split_of_eight(capsys):
    text = said(capsys, *EIGHT, "--layout", "split", "--pipeline.targets", "3")
    assert "processes    8 on 1 host, one for each GPU" in text
    assert "ranks 0 to 4: drafters 0 to 4\n             ranks 5 to 7: targets 0 to 2" in text
    assert "cells        1 of 8 ranks" in text
    pack = 49_152 * 5 * 4_096 * 2
    assert f"{2 * 5 * pack / 1e9:.3g} GB on a target: 2 slots x 5 drafters" in text
    assert f"{2 * pack / 1e9:.3g} GB on a drafter: 2 landing buffers" in text
    assert f"{4 * (shape().drafter_weights + 1) / 1e9:.3g} GB on a drafter" in text
    expected = int(re.findall(r"expected +([\d,]+) tokens", text)[0].replace(",", ""))
    assert speeds(text)["3 + 5"] == expected
    assert f"{expected / 49_152 * pack / 15 / 1e6:.3g} MB/s on each of 15 links" in text


def test_the_best_layout_of_eight(capsys):
    text = said(capsys, *EIGHT)
    found = speeds(text)
    assert list(found) == ["8 colocated", *(f"{t} + {8 - t}" for t in range(1, 8))]
    assert max(found, key=lambda name: found[name]) == "8 colocated" and "best: 8 colocated." in text
    assert max(list(found)[1:], key=lambda name: found[name]) == "4 + 4" and "The best split, 4 + 4," in text
    assert found["3 + 5"] == pytest.approx(3 * 49_152 / 1.1337, rel=0.01)


def test_hosts_are_split_alike(capsys):
    words = ("--target.path", "Qwen/Qwen3-8B", "--gpus", "64", "--optim.packs_per_step", "64")
    text = said(capsys, "plan", *words, "--layout", "split", "--pipeline.targets", "24")
    assert "64 on 8 hosts" in text and "8 of 8 ranks, all like ranks 0 to 7" in text
    assert "ranks 0 to 4: drafters 0, 8, 16, 24, 32" in text
    assert list(speeds(text))[1:] == [f"{8 * t} + {64 - 8 * t}" for t in range(1, 8)]
    assert splits(64, 8, 2, 0.9) == [16, 32, 48]
    assert splits(20, 8, 1, 0.5) == [7, 8, 9, 10, 11, 12, 13]


def test_uneven_packs_are_named(capsys):
    text = said(capsys, *EIGHT[:3], "--optim.packs_per_step", "8", "--gpus", "5")
    assert "8 packs on 5 drafters use 80% of them; a multiple of\n             5 (optim.packs_per_step)" in text


def test_replicas_of_several_ranks(capsys):
    words = ("--layout", "split", "--pipeline.targets", "6", "--pipeline.target_ranks", "2")
    text = said(capsys, *EIGHT, *words)
    assert "3 copies of the target, each shared by 2 target ranks" in text and "ranks 2 to 7: targets 0 to 5" in text
    assert list(speeds(text)) == ["8 colocated", "2 + 6", "4 + 4", "6 + 2"]


def test_features_on_disk(capsys):
    text = said(capsys, *EIGHT, "--layout", "offline")
    assert "features from disk" in text and list(speeds(text)) == ["8 offline"]


def test_train_can_be_planned_with_its_own_options(recipe, tmp_path, capsys):
    file = tmp_path / "my.toml"
    file.write_text(to_toml(with_options(recipe, "optim", packs_per_step=2)))
    planned = said(capsys, "train", file, "--plan", "--pipeline.processes", 2, "--log.every", 5)
    assert planned == said(capsys, "plan", file, "--gpus", 2)
    assert "2 on 1 host" in planned and "2 packs of 160 tokens and 24 anchors" in planned
    assert not Path(recipe.run).exists()


def test_without_a_number_it_plans_what_train_would_start(recipe, tmp_path, capsys):
    file = tmp_path / "my.toml"
    file.write_text(to_toml(recipe))
    assert "processes    1 on 1 host" in said(capsys, "train", file, "--plan")
    split = ("--layout", "split", "--pipeline.targets", 2, "--pipeline.drafters", 1)
    assert "processes    3 on 1 host" in said(capsys, "plan", file, *split)


def test_no_torch_is_imported():
    code = f"import sys; from draftsmith.cli import main; main({list(EIGHT)}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    assert torch  # it is there


def test_memory_decides_what_is_possible(capsys):
    words = ("plan", "--target.path", "Qwen/Qwen3.5-27B", "--gpus", "8", "--optim.packs_per_step", "24")
    text = said(capsys, *words, "--layout", "split", "--pipeline.targets", "5")
    assert re.search(r"8 colocated .* needs 170 GiB of 139", text)
    assert "best: 5 + 3." in text and "Colocated is not possible, see above; smaller packs" in text
    assert "memory       on a drafter 127." in text
    slots = 2 * 3 * 49_152 * 5 * 5_120 * 2 / 2**30
    assert f"on a target {50.1 + slots + 5.7:.1f} GiB (target 50.1, slots {slots:.1f}, capture 5.7)" in text
    halves = said(capsys, *words, "--pack.tokens", 24_576, "--pack.anchors", 3_072)
    assert "best: 8 colocated." in halves


def test_the_documentation_shows_real_output(capsys):
    words = ("plan", "--target.path", "Qwen/Qwen3-8B", "--gpus", "8", "--optim.packs_per_step", "8")
    text = said(capsys, *words, "--layout", "split", "--pipeline.targets", "3")
    page = (RESULTS.parents[1] / "docs" / "planning.md").read_text()
    assert "\n".join(f"    {line}" if line else "" for line in text.splitlines()) in page


def test_options_that_no_figure_covers_are_named(capsys):
    text = said(capsys, *EIGHT, "--target.fp8", "True", "--optim.kind", "muon", "--gpus", "1")
    assert "not in these seconds: optim.kind muon\n" in text


def test_options_change_the_seconds_by_what_was_measured(capsys):
    """All of FP8, colocated: the simulator against the run of benchmarks/results/colocated-NVIDIA_H200.json."""
    figures = read_figures("")
    seconds, how = figures.seconds("drafter", shape(), ["loss.fp8", "target.fp8"])
    assert seconds == pytest.approx(figures.rows["drafter"]["seconds"] * figures.options["loss.fp8"]["factor"])
    assert how == "measured, x 0.901 for loss.fp8"
    options = ("--target.fp8", "True", "--loss.fp8", "True", "--drafter.fp8", "True")
    text = said(capsys, "plan", "--target.path", "Qwen/Qwen3-8B", "--gpus", "1", *options)
    rate = float(re.search(r"expected +([\d,]+) tokens/s", text)[1].replace(",", ""))
    rows = json.loads((RESULTS / "colocated-NVIDIA_H200.json").read_text())["rows"]
    measured = next(row["budget_tokens_per_s"] for row in rows if row["fp8"] == "target drafter head")
    assert rate == pytest.approx(measured, rel=0.06)
    step = json.loads((RESULTS / "step-NVIDIA_H200.json").read_text())["rows"]
    at = {row["fp8"]: row["seconds_median"] for row in step if (row["tokens"], row["compile"]) == (16_384, "on")}
    assert figures.options["loss.fp8"]["factor"] == pytest.approx(at["head"] / at["none"], rel=0.01)
    assert figures.options["drafter.fp8"]["factor"] == pytest.approx(at["drafter head"] / at["head"], rel=0.01)


def test_a_hub_target_needs_its_config_only(capsys, world, monkeypatch):
    asked = []

    def download(name: str, file: str, *, revision: str | None) -> str:
        asked.append((name, file, revision))
        return str(world / "target" / "config.json")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    text = said(capsys, "plan", "--target.path", "some/model", "--target.revision", "abc", "--gpus", "1")
    assert asked == [("some/model", "config.json", "abc")] and text.startswith("some/model, NVIDIA H200")


def test_memory_of_another_gpu_and_what_goes_to_disk(capsys):
    words = ("plan", "--target.path", "Qwen/Qwen3-8B", "--gpus", "1")
    assert "needs 95 GiB of 80" in said(capsys, *words, "--memory_gib", "80")
    text = said(capsys, *words)
    assert "needs" not in text
    numbers = shape().drafter_weights * (2 + 4 + 4 + 4)
    assert f"disk         {numbers / 1e9:.1f} GB a checkpoint" in text


# Mistakes


@pytest.mark.parametrize(
    "words, message",
    [
        (("--gpus", "0"), "gpus is 0; it must be at least 1"),
        (("--gpus_per_host", "0"), "gpus_per_host is 0"),
        (("--pipeline.queue_depth", "0"), "pipeline.queue_depth is 0"),
        (("--gpus", "41"), "optim.packs_per_step is 16 and there are 41 drafter ranks"),
        (("--layout", "split"), "needs pipeline.targets and pipeline.drafters"),
        (("--layout", "split", "--pipeline.targets", "3", "--pipeline.drafters", "4"), "makes 7 processes"),
        (("--pipeline.targets", "3"), 'no effect with layout = "colocated"'),
        (("--target.path", "nowhere"), "no folder with a config.json, and no hub name ORG/NAME"),
        (("--memory_gib", "0"), "memory_gib is 0.0"),
        (("--figures", "nowhere.json"), "figures nowhere.json cannot be read: No such file"),
    ],
)
def test_mistakes(mistake, words, message):  # noqa: F811
    assert message in mistake.one_line(*EIGHT, *words)


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "no result file with device and rows"),
        ("[]", "no result file with device and rows"),
        ('{"device": "x", "rows": [{"seconds": 1}]}', "no result file with device and rows"),
        ('{"device": "x", "rows": [{"stage": "target", "seconds": -1}]}', "seconds of stage 'target' is -1"),
        ('{"device": "x", "rows": [{"stage": "target"}]}', "seconds of stage 'target' is None"),
        ('{"device": "x", "rows": [{"stage": "drafter", "seconds": NaN}]}', "seconds of stage 'drafter' is nan"),
        ('{"device": "x", "rows": [{"stage": "load", "seconds": 1}]}', "unknown stage 'load'; one of: target, drafter"),
        (
            '{"device": "x", "rows": [{"stage": "target", "seconds": 1, "target": "y", "tokens": 1, "anchors": 1}]}',
            "target 'y' is not one of Qwen/Qwen3-8B",
        ),
    ],
)
def test_figures_that_cannot_be_used(mistake, tmp_path, content, message):  # noqa: F811
    (tmp_path / "figures.json").write_text(content)
    assert message in mistake.one_line(*EIGHT, "--figures", tmp_path / "figures.json")


def test_a_config_that_is_no_json(mistake, tmp_path):  # noqa: F811
    (tmp_path / "config.json").write_text("{")
    assert "config.json is not valid JSON" in mistake.one_line("plan", "--gpus", 1, "--target.path", tmp_path)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"hidden_size": 8}, "has no num_"),
        ({"num_experts": 8, "num_hidden_layers": 8, "hidden_size": 8}, "a target with experts cannot be scaled"),
    ],
)
def test_targets_that_are_not_known(mistake, tmp_path, config, message):  # noqa: F811
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert message in mistake.one_line("plan", "--gpus", 1, "--target.path", tmp_path)
