"""The reference forward: hand-made facts about it, and agreement with the trained code it shares nothing with."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith import reference
from draftsmith.drafters.dflash import DFlashDrafter
from draftsmith.export.zlab import zlab_config
from draftsmith.reference import Reference, read_config, rope_frequencies, visible
from draftsmith.visibility import dense_mask, intervals
from tests.handmade import random_features, tiny_drafter

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn, mscale": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
}


def write(drafter: DFlashDrafter, folder: Path, **changes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**zlab_config(drafter.config), **changes}))
    save_file({k: v.detach().clone() for k, v in drafter.state_dict().items()}, folder / "model.safetensors")
    return folder


def both(drafter: DFlashDrafter, folder: Path, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The drafter's and the reference's output for one block after `length` tokens."""
    features = random_features(length, drafter).context
    block = torch.randn(
        drafter.config.block_size, drafter.config.hidden_size, generator=torch.Generator().manual_seed(3)
    )
    with torch.no_grad():
        ours = drafter.propose(drafter.project(features, torch.arange(length)), block)
        theirs = Reference.from_folder(folder).hidden(features, block)[1:]
    return ours, theirs


VARIANTS = {
    "full": {},
    "sliding": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 5},
    "window shorter than the block": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 3},
    "mixed": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5},
    "mixed, both ways": {
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 12,
        "is_causal": False,
    },
    "causal": {"is_causal": True},
    "another head size": {"head_dim": 16, "num_heads": 6, "num_kv_heads": 3},
    "block 16": {"block_size": 16},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_reference_agrees_with_the_trained_code(name, tmp_path):
    drafter = tiny_drafter(**VARIANTS[name])
    ours, theirs = both(drafter, write(drafter, tmp_path), 19)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ROPES)
def test_reference_agrees_for_every_rope(name, tmp_path):
    before = tiny_drafter()
    before.config.rope_parameters = ROPES[name]
    drafter = DFlashDrafter(before.config)
    drafter.load_state_dict(before.state_dict())
    ours, theirs = both(drafter, write(drafter, tmp_path), 40)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    plain, _ = both(tiny_drafter(), write(tiny_drafter(), tmp_path), 40)
    assert (ours - plain).abs().max() > 0.05, "the scaling makes a difference, so agreement means something"


@pytest.mark.parametrize("name", [name for name in ROPES if name != "default"])
def test_frequencies_equal_those_of_transformers(name):
    config = tiny_drafter(head_dim=16).config
    config.rope_parameters = ROPES[name]
    wanted, scale = ROPE_INIT_FUNCTIONS[ROPES[name]["rope_type"]](config, torch.device("cpu"))
    found, ours = rope_frequencies(ROPES[name], 16, config.max_position_embeddings)
    torch.testing.assert_close(found.float(), wanted)
    assert ours == pytest.approx(scale)


def test_unknown_rope_is_an_error():
    with pytest.raises(ValueError, match="'longrope' is not known"):
        rope_frequencies({"rope_type": "longrope", "rope_theta": 1e4, "factor": 2}, 8, 100)


def test_visible_by_hand():
    assert visible(2, 3, None, False).all()
    assert visible(2, 3, None, True).int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert visible(2, 3, 2, True).int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("causal", [False, True])
def test_visible_equals_the_intervals(window, causal):
    spans = intervals(np.array([7]), np.array([0]), 4, window=window, causal=causal)
    assert torch.equal(dense_mask(spans, 7), visible(7, 4, window, causal))


def test_reading_of_both_layouts_is_the_same():
    from draftsmith.export.speculators import speculators_config

    for options in VARIANTS["full"], VARIANTS["sliding"], VARIANTS["mixed, both ways"]:
        config = tiny_drafter(**options).config
        assert read_config(zlab_config(config)) == read_config(speculators_config(config, "t", []))


def test_missing_keys_are_errors():
    config = zlab_config(tiny_drafter().config)
    for key in ("rope_parameters", "layer_types", "block_size", "head_dim", "dflash_config"):
        with pytest.raises(KeyError, match=key):
            read_config({k: v for k, v in config.items() if k != key})


def test_the_reference_shares_no_code_with_the_trainer():
    tree = ast.parse(Path(reference.__file__).read_text())
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    allowed = {"torch", "safetensors", "jaxtyping", "json", "math", "dataclasses", "pathlib", "__future__"}
    assert {name.split(".")[0] for name in names} <= allowed
