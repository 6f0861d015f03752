"""The memory formula against what was measured on an H200, and its behaviour."""

from dataclasses import replace

import pytest

from draftsmith import visibility
from draftsmith.config import DFlashOptions, LossOptions, OptimOptions, PackOptions, Recipe
from draftsmith.drafters.dflash import build_config
from draftsmith.errors import UserError
from draftsmith.memory import (
    CLEARLY,
    GIB,
    TILE,
    Sizes,
    breakdown,
    describe,
    largest_pack,
    levers,
    refuse_too_large,
    sizes_of,
)
from tests.tiny import tiny_target

LARGE = Sizes(
    hidden=4096, intermediate=12_288, heads=32, kv_heads=8, head_dim=128, layers=5, taps=5, vocabulary=151_936,
    block=16, tokens=49_152, anchors=6_144, chunk=4_096, target_weights=0,
)  # fmt: skip
SMALL = replace(
    LARGE, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, vocabulary=49_152, tokens=1_024, anchors=128
)


def total(sizes: Sizes) -> float:
    return sum(breakdown(sizes).values()) / GIB


@pytest.mark.parametrize(
    ("tokens", "changes", "measured"),
    [
        (49_152, {}, 80.90),
        (16_384, {}, 36.89),
        (1_024, {}, 16.93),
        (49_152, {"recompute": "mlp"}, 60.21),
        (32_768, {"recompute": "mlp"}, 45.06),
        (32_768, {"recompute": "layer"}, 35.24),
        (16_384, {"fp8_head": True}, 38.05),
        (16_384, {"fp8_head": True, "fp8_drafter": True}, 34.86),
    ],
)
def test_formula_equals_measured_peaks(tokens: int, changes: dict, measured: float):
    """benchmarks/results/step-NVIDIA_H200.json and memory-NVIDIA_H200.json; head included, no target."""
    assert total(replace(LARGE, tokens=tokens, anchors=tokens // 8, **changes)) == pytest.approx(measured, rel=0.01)


def test_formula_is_near_for_another_shape():
    assert total(SMALL) == pytest.approx(0.722, rel=0.15)


def test_what_saves_memory_is_seen_to_save_it():
    assert total(replace(LARGE, recompute="layer")) < total(replace(LARGE, recompute="mlp")) < total(LARGE)
    assert total(replace(LARGE, muon=True)) < total(LARGE)
    assert total(replace(LARGE, tokens=24_576, anchors=3_072)) < total(LARGE)


def test_target_counts_with_its_fp8_copies():
    with_target = replace(LARGE, target_weights=8 * 10**9, target_block_weights=6 * 10**9)
    without_head = total(LARGE) - 2 * LARGE.vocabulary * LARGE.hidden / GIB
    assert total(with_target) == pytest.approx(without_head + 16 * 10**9 / GIB)
    assert total(replace(with_target, fp8_target=True)) == pytest.approx(total(with_target) + 6 * 10**9 / GIB)


def test_sums_over_packs_or_processes_need_a_buffer():
    assert breakdown(replace(LARGE, summed=True))["gradient sum"] == 4 * LARGE.matrices
    target, options = tiny_target("qwen3").config, DFlashOptions(num_layers=2, block_size=8, mask_token_id=300)
    drafter = build_config(options, target, (0, 2))
    several = Recipe(drafter=options, optim=OptimOptions(packs_per_step=2))
    for recipe, drafters, summed in (
        (Recipe(drafter=options), 1, False),
        (Recipe(drafter=options), 2, True),
        (several, 1, True),
    ):
        assert sizes_of(recipe, drafter, target, width=4, drafters=drafters).summed == summed


def test_fp32_weights_are_their_own_masters():
    assert breakdown(replace(LARGE, width=4))["masters"] == 0
    assert breakdown(LARGE)["masters"] == 4 * LARGE.matrices


def test_sizes_come_from_recipe_and_configs():
    target = tiny_target("qwen3").config
    recipe = Recipe(
        recompute="mlp", pack=PackOptions(tokens=256, anchors=32), loss=LossOptions(chunk=64, fp8=True),
        drafter=DFlashOptions(num_layers=2, block_size=8, mask_token_id=300), optim=OptimOptions(kind="muon"),
    )  # fmt: skip
    sizes = sizes_of(recipe, build_config(recipe.drafter, target, (0, 2)), target, width=4)
    assert (sizes.tokens, sizes.anchors, sizes.block, sizes.taps, sizes.chunk) == (256, 32, 8, 2, 64)
    assert (sizes.recompute, sizes.muon, sizes.fp8_head, sizes.fp8_target) == ("mlp", True, True, False)
    counted = sum(p.numel() for p in tiny_target("qwen3").parameters() if p.ndim > 1)
    assert sizes.target_weights == counted


def test_description_names_the_parts_and_their_sum():
    line = describe(breakdown(LARGE))
    assert line.startswith("80.9 GiB (weights 3.1, masters 3.9, optimizer 7.8, features 1.9, activations 54.9, ")
    assert "fp8" not in line and "target" not in line  # parts of nothing are left out


@pytest.mark.parametrize("tokens", [49_152, 65_536])
def test_what_is_clearly_too_large_is_refused_with_the_largest_pack_that_fits(tokens: int):
    sizes, capacity = replace(LARGE, tokens=tokens, anchors=tokens // 8), 48 * GIB
    with pytest.raises(UserError, match=r"and the GPU has 48\.0 GiB; the largest pack that fits is") as caught:
        refuse_too_large(sizes, capacity)
    fits = largest_pack(sizes, capacity / CLEARLY)
    assert TILE == visibility.TILE
    assert fits and f"pack.tokens {fits[0]} with pack.anchors {fits[1]}." in str(caught.value)
    assert fits == (21376, 2672), "whatever was asked for"
    refuse_too_large(replace(sizes, tokens=fits[0], anchors=fits[1]), capacity)
    assert total(replace(sizes, tokens=fits[0] + 128, anchors=fits[1] + 16)) * GIB > capacity / CLEARLY
    assert 'recompute = "mlp": ' in str(caught.value) and "drafter.fp8" in str(caught.value)


def test_what_fits_is_not_refused():
    refuse_too_large(LARGE, 80 * GIB)  # by the formula it is 1 % over: no clear case
    with pytest.raises(UserError, match="no pack fits"):
        refuse_too_large(LARGE, 8 * GIB)


def test_levers_leave_out_what_is_done_already():
    assert "mlp" not in levers(replace(LARGE, recompute="layer", fp8_drafter=True))
    assert "fp8" not in levers(replace(LARGE, width=4))
