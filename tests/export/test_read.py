"""Drafters read back: bit for bit what was written, and one clear error for everything that is not understood."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from draftsmith.drafters.dflash import DFlashConfig, DFlashDrafter
from draftsmith.errors import EnvironmentFault, UserError
from draftsmith.export import EXPORTS, read
from draftsmith.export.read import read_folder
from draftsmith.targets import HFTarget
from tests.handmade import tiny_drafter
from tests.test_reference import VARIANTS
from tests.tiny import tiny_target, tiny_tokenizer

SPECFORGE = {  # as its exporter writes it: block_size at the top, no dict spelling of RoPE, a map for remote code
    "auto_map": {"AutoModel": "modeling_dflash.DFlashDraftModel"},
    "rope_scaling": None,
    "max_window_layers": 2,
    "transformers_version": "4.57.1",
}


def write(folder: Path, layout: str, drafter: DFlashDrafter) -> Path:
    target = HFTarget(tiny_target("qwen3"), tiny_tokenizer(), (0, 2))
    config, tensors = EXPORTS[layout](drafter, target, "t")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def zlab(tmp_path) -> Path:
    return write(tmp_path / "zlab", "zlab", tiny_drafter())


def edit(folder: Path, drop: str = "", nested: str = "dflash_config", **changes) -> Path:
    """Change or drop keys of config.json, at the top or one table down."""
    config = json.loads((folder / "config.json").read_text()) | changes
    config.pop(drop, None)
    config.get(nested, {}).pop(drop, None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def edit_tensors(folder: Path, change) -> Path:
    tensors = load_file(folder / "model.safetensors")
    tensors = change(tensors) or tensors
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("layout", EXPORTS)
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("mixed", "causal")])
def test_ours_to_theirs_to_ours_is_bit_identical(layout, name, tmp_path):
    drafter = tiny_drafter(**VARIANTS[name])
    first = write(tmp_path / "first", layout, drafter)
    found = read_folder(first)
    assert found.layout == layout
    again = write(tmp_path / "again", layout, found.drafter())
    assert (again / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (first, again))
    for config in (before, after):
        for table in (config, config.get("transformer_layer_config", {})):
            for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
                table.pop(key, None)  # of no use to a drafter, so not read
    assert before == after


def test_values_are_those_of_bf16(zlab):
    drafter = tiny_drafter()
    found = read_folder(zlab).drafter().state_dict()
    assert all(torch.equal(found[k], v.to(torch.bfloat16).float()) for k, v in drafter.state_dict().items())


@pytest.mark.parametrize("name", ["mixed", "causal"])
def test_rules_that_only_zlab_can_state(name, tmp_path):
    drafter = tiny_drafter(**VARIANTS[name])
    found = read_folder(write(tmp_path / "first", "zlab", drafter))
    config = DFlashConfig.from_dict(found.config)
    assert [config.causal(k) for k in config.kinds] == [drafter.config.causal(k) for k in drafter.config.kinds]


def test_specforge_folder(zlab):
    nested = {"mask_token_id": 300, "target_layer_ids": [0, 2]}
    found = read_folder(edit(zlab, "rope_parameters", **SPECFORGE, dflash_config=nested))
    assert found.config["block_size"] == 8
    assert found.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_what_a_folder_does_not_say_is_named(tmp_path):
    drafter = tiny_drafter(**VARIANTS["sliding"])
    folder = write(tmp_path / "zlab", "zlab", drafter)
    assert read_folder(folder).silent == ("slot offset",)
    assert read_folder(edit(folder, "is_causal")).silent == ("is_causal", "slot offset")


@pytest.mark.parametrize(
    ("drop", "said"),
    [
        ("target_layer_ids", "key target_layer_ids is missing"),
        ("mask_token_id", "key mask_token_id is missing"),
        ("head_dim", "key head_dim is missing"),
        ("rms_norm_eps", "key rms_norm_eps is missing"),
        ("dflash_config", "key dflash_config is missing"),
    ],
)
def test_a_missing_key_is_named(zlab, drop, said):
    with pytest.raises(UserError, match=said):
        read_folder(edit(zlab, drop))


def test_a_lost_rope_base_is_an_error(zlab):
    config = json.loads((zlab / "config.json").read_text())
    del config["rope_theta"], config["rope_parameters"]
    (zlab / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="key rope_theta is missing, in both spellings"):
        read_folder(zlab)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_theta": 5.0}, "rope_theta is 5.0 and, in rope_parameters, 10000.0"),
        ({"block_size": 16}, "block_size is 16 and, in dflash_config, 8"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"architectures": ["DFlash2DraftModel"]}, "architectures is"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is None"),
        ({"logit_scale": 2.0}, "unknown key logit_scale = 2.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"hidden_size": "32"}, "key hidden_size is '32'"),
        ({"num_target_layers": 2, "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]}}, "not blocks"),
        ({"dflash_config": {"mask_token_id": 320, "target_layer_ids": [0, 2]}}, "mask_token_id 320 is no row"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2], "selector_rank": 4}}, "selector_rank"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0]}}, "tensor fc.weight is"),
        ({"num_key_value_heads": 3}, "no multiple"),
    ],
)
def test_keys_that_are_wrong_or_unknown(zlab, changes, said):
    with pytest.raises(UserError, match=said):
        read_folder(edit(zlab, **changes))


def renamed(tensors: dict) -> None:
    tensors["layers.0.self_attn.query.weight"] = tensors.pop("layers.0.self_attn.q_proj.weight")


def halved(tensors: dict) -> None:
    tensors["norm.weight"] = tensors["norm.weight"][:16]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (renamed, "layers.0.self_attn.q_proj.weight is missing.*query.weight is .*no such tensor"),
        (halved, r"tensor norm.weight is \(16,\), expected \(32,\)"),
        (lambda tensors: tensors | {"lm_head.weight": torch.ones(2, 2)}, "lm_head.weight is .*no such tensor"),
    ],
)
def test_tensors_that_are_missing_unknown_or_misshaped(zlab, change, said):
    with pytest.raises(UserError, match=said):
        read_folder(edit_tensors(zlab, change))


def test_half_precision_is_remarked(zlab):
    edit_tensors(zlab, lambda tensors: {k: v.half() for k, v in tensors.items()})
    assert "float16" in read_folder(zlab).remarks[0]


def test_a_reduced_vocabulary_is_refused(tmp_path):
    folder = write(tmp_path / "s", "speculators", tiny_drafter())
    edit_tensors(folder, lambda tensors: tensors | {"d2t": torch.zeros(100, dtype=torch.long)})
    with pytest.raises(UserError, match="reduced draft vocabulary"):
        read_folder(folder)
    with pytest.raises(UserError, match="draft_vocab_size is 100"):
        read_folder(edit(folder, draft_vocab_size=100))


def test_a_weight_map_cannot_leave_the_folder(zlab):
    index = zlab / "model.safetensors.index.json"
    for name in ("../model.safetensors", "/etc/x.safetensors", ".hidden.safetensors"):
        index.write_text(json.dumps({"weight_map": {"fc.weight": name}}))
        with pytest.raises(UserError, match="is no plain file name"):
            read_folder(zlab)


def test_a_prefix_is_taken_off_and_remarked(zlab):
    edit_tensors(zlab, lambda tensors: {f"model.{k}": v for k, v in tensors.items()})
    assert "prefix" in read_folder(zlab).remarks[0]


ANSWER = {"prompt": [1], "tokens": [2], "cycles": []}
MEASURED = {"dtype": "float32", "max_new_tokens": 4, "accept_length_pooled": 1.0, "answers": [ANSWER], "proposals": []}
RECORD = {
    "format": "draftsmith-export",
    "layout": "zlab",
    "files": dict.fromkeys(("config.json", "model.safetensors", "README.md"), {}),
    "trained": {"block_size": 3},
    "fingerprints": {},
    "measured": MEASURED,
}


def test_a_sound_record_is_read(zlab):
    (zlab / "draftsmith.json").write_text(json.dumps(RECORD))
    assert read_folder(zlab).record == RECORD


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other"},
        {"files": {"../../etc/passwd": {}}},
        {"measured": None},
        {"measured": MEASURED | {"answers": []}},
        {"measured": MEASURED | {"answers": [ANSWER | {"prompt": [-1]}]}},
        {"measured": MEASURED | {"answers": [ANSWER | {"prompt": ["x"]}]}},
        {"measured": MEASURED | {"dtype": "int8"}},
        {"measured": MEASURED | {"proposals": [{"answer": 0, "committed": 1, "tokens": [[1]], "logits": [[1.0]]}]}},
        {
            "measured": MEASURED
            | {"proposals": [{"answer": 9, "committed": 1, "tokens": [[1]] * 2, "logits": [[1]] * 2}]}
        },
        {"measured": MEASURED | {"answers": ["x"]}},
        {"measured": MEASURED | {"answers": [{"prompt": [1], "tokens": [2]}]}},
        {"measured": MEASURED | {"proposals": ["x"]}},
        {"measured": MEASURED | {"proposals": [{"answer": 0, "committed": 1, "tokens": [["x"]] * 2}]}},
        {"trained": {}},
    ],
)
def test_a_record_that_is_not_ours_is_an_error(zlab, changes):
    (zlab / "draftsmith.json").write_text(json.dumps(RECORD | changes))
    with pytest.raises(UserError, match="draftsmith.json is damaged"):
        read_folder(zlab)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_no_readable_config(tmp_path, text):
    if text:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="config.json"):
        read_folder(tmp_path)


def test_a_drafter_is_found_by_its_hub_name(tmp_path, monkeypatch):
    asked = []

    def fetch(name, **options):
        asked.append((name, options["revision"], options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(read, "snapshot_download", fetch)
    assert read.find_drafter("org/name") == read.find_drafter("org/name@v1") == tmp_path
    assert asked == [("org/name", r, ["*.json", "*.safetensors"]) for r in (None, "v1")], "no code, no pickles"
    assert read.find_drafter(str(tmp_path)) == tmp_path and read.find_drafter("runs/a/b") == Path("runs/a/b")
    assert len(asked) == 2, "folders are not asked for"


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (LocalEntryNotFoundError("x"), EnvironmentFault, "'org/name' is no folder, and the Hub cannot be reached"),
        (ValueError("bad id\nmore"), UserError, "cannot be fetched from the Hub: bad id$"),
    ],
)
def test_a_hub_drafter_that_cannot_be_fetched(monkeypatch, error, kind, said):
    def fetch(name, **options):
        raise error

    monkeypatch.setattr(read, "snapshot_download", fetch)
    with pytest.raises(kind, match=said) as found:
        read.find_drafter("org/name")
    assert type(found.value) is kind
