"""Drafters of others, and our own exports, read back: z-lab's layout (SpecForge writes it too) and Speculators'.

Conventions are read, never guessed. A key or tensor that is missing, unknown or of another shape is an error with its
name; so is a key whose meaning this project does not implement. Where a folder is silent on a convention that
changes the result, `silent` says so and the caller measures both readings (see `readings`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.checkpoint import MANIFEST
from draftsmith.drafters import DFlashDrafter
from draftsmith.drafters.dflash import DFlashConfig, misfits
from draftsmith.errors import EnvironmentFault, UserError
from draftsmith.export.folder import read_record
from draftsmith.targets.hf import may_be_hub_name, shard_names

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES += ("head_dim", "vocab_size", "max_position_embeddings")
# Keys without influence on the result, written by transformers 4 and 5, SpecForge and Speculators.
COSMETIC = set(Qwen3Config().to_dict()) | {
    *("auto_map", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "use_cache", "max_window_layers"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "initializer_range", "tie_word_embeddings"),
    *("attn_implementation", "_attn_implementation", "pretraining_tp", "max_anchors", "speculators_version"),
    *("has_no_defaults_at_init", "target_model_type", "model_type", "target_hidden_size"),
}
SHARED = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, kw_only=True)
class DrafterFolder:
    """A drafter whose every key and tensor is understood."""

    path: Path
    layout: str
    """zlab or speculators."""
    config: dict
    """For `DFlashConfig`."""
    tensors: dict[str, Tensor]
    """The drafter's own, by their served names."""
    shared: dict[str, Tensor]
    """Copies of the target's embedding and head that a Speculators folder holds."""
    silent: tuple[str, ...]
    """Conventions that the folder does not state: `is_causal`, `slot offset`."""
    remarks: tuple[str, ...]
    record: dict | None
    """draftsmith.json of our own exports."""

    def drafter(self) -> DFlashDrafter:
        """The drafter in fp32, its values those of the file."""
        weights = {name: tensor.float() for name, tensor in self.tensors.items()}
        return DFlashDrafter.from_files(json.dumps(self.config), weights).eval()


def find_drafter(name: str) -> Path:
    """A folder, or the local copy of a Hub drafter, ORG/NAME or ORG/NAME@REVISION. Raises UserError, EnvironmentFault.

    Only JSON and safetensors are fetched. HF_HUB_OFFLINE is honoured: then what was fetched before is found.
    """
    if Path(name).is_dir() or not may_be_hub_name(name):
        return Path(name)
    repository, _, revision = name.partition("@")
    try:
        return Path(
            snapshot_download(repository, revision=revision or None, allow_patterns=["*.json", "*.safetensors"])
        )
    except LocalEntryNotFoundError as error:
        raise EnvironmentFault(f"drafter {name!r} is no folder, and the Hub cannot be reached to fetch it") from error
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"drafter {name!r} is no folder, and cannot be fetched from the Hub: {reason}") from error


def read_folder(folder: Path) -> DrafterFolder:
    """Raises UserError naming whatever is missing, unknown, contradictory or of another shape."""
    if not folder.is_dir():
        raise UserError(f"drafter {str(folder)!r} is no folder; give one with config.json and model.safetensors")
    raw = _read_json(folder / "config.json")
    record = read_record(folder)
    layout = "speculators" if "speculators_model_type" in raw else "zlab"
    keys = _Keys(raw, folder / "config.json")
    config, stated = (_speculators if layout == "speculators" else _zlab)(keys)
    keys.finish()
    tensors, remarks = _read_tensors(folder)
    shared = {name: tensors.pop(name) for name in SHARED if layout == "speculators" and name in tensors}
    if layout == "speculators":
        tensors = _without_vocabulary_maps(tensors, config["vocab_size"], folder)
    _check_tensors(tensors, config, folder)
    sliding = "sliding_attention" in config["layer_types"]
    ours = record is not None or (folder / MANIFEST).is_file()
    silent = ["is_causal"] if sliding and not stated and not ours else []
    silent += ["slot offset"] if not ours and layout == "zlab" else []
    return DrafterFolder(
        path=folder,
        layout=layout,
        config=config,
        tensors=tensors,
        shared=shared,
        silent=tuple(silent),
        remarks=tuple(remarks),
        record=record,
    )


def refuse_other_conventions(found: DrafterFolder, config: DFlashConfig) -> None:
    """Raise UserError if weights of `found` would be run under other conventions than those they were trained with."""
    theirs = DFlashConfig.from_dict(found.config)
    options = {
        "target.layer_ids": (theirs.target_layer_ids, config.target_layer_ids),
        "drafter.mask_token_id": (theirs.mask_token_id, config.mask_token_id),
        "drafter.layer_types": (theirs.kinds, config.kinds),
        "drafter.sliding_window": (theirs.sliding_window, config.sliding_window),
        "drafter.is_causal": ([theirs.causal(k) for k in theirs.kinds], [config.causal(k) for k in config.kinds]),
        "drafter.num_heads": (theirs.num_attention_heads, config.num_attention_heads),
        "drafter.num_kv_heads": (theirs.num_key_value_heads, config.num_key_value_heads),
        "drafter.head_dim": (theirs.head_dim, config.head_dim),
        "the target's rope_parameters": (theirs.rope_parameters, config.rope_parameters),
        "the target's rms_norm_eps": (theirs.rms_norm_eps, config.rms_norm_eps),
        "the target's num_hidden_layers": (theirs.num_target_layers, config.num_target_layers),
    }
    wrong = [f"{name} is {mine} here, {given} there" for name, (given, mine) in options.items() if given != mine]
    if wrong:
        raise UserError(
            f"the drafter in {found.path} was trained with other conventions than this recipe's: {'; '.join(wrong)}"
        )


class _Keys:
    """A JSON object whose keys are taken one by one; what is left over must be known to be without influence."""

    def __init__(self, values: dict, where: object) -> None:
        self.values, self.where = dict(values), where

    def need(self, key: str, kind: type | tuple[type, ...] = object) -> Any:
        if key not in self.values or self.values[key] is None:
            raise UserError(f"{self.where}: key {key} is missing; add it with the value the drafter was trained with")
        value = self.values.pop(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise UserError(f"{self.where}: key {key} is {value!r}, which is of the wrong type")
        return value

    def take(self, key: str, default: Any = None) -> Any:
        return self.values.pop(key, default)

    def only(self, key: str, *allowed: object) -> None:
        """A key that may be absent, and whose other values mean something that is not implemented here."""
        value = self.values.pop(key, allowed[0])
        if value not in allowed:
            raise UserError(f"{self.where}: key {key} is {value!r}; supported: {', '.join(map(repr, allowed))}")

    def finish(self, known: set[str] = COSMETIC) -> None:
        unknown = sorted(self.values.keys() - known)
        if unknown:
            raise UserError(
                f"{self.where}: unknown key {unknown[0]} = {json.dumps(self.values[unknown[0]])[:60]}; "
                "its meaning is not known here, so the drafter might be read wrongly"
            )


def _zlab(keys: _Keys) -> tuple[dict, bool]:
    """The config, and whether the in-block rule is stated."""
    keys.only("architectures", ["DFlashDraftModel"])
    nested = _Keys(keys.need("dflash_config", dict), f"{keys.where}, dflash_config")
    config = _decoder(keys)
    for name in ("block_size", "num_target_layers", "mask_token_id", "target_layer_ids"):
        inner, outer = nested.take(name), keys.take(name)
        if inner is not None and outer is not None and inner != outer:
            raise UserError(f"{keys.where}: {name} is {outer!r} and, in dflash_config, {inner!r}; make them equal")
        value = outer if inner is None else inner
        if value is None:
            raise UserError(f"{keys.where}: key {name} is missing; add it with the value the drafter was trained with")
        config[name] = value
    for name in ("input_embedding_scale", "output_multiplier"):
        nested.only(name, None, 1, 1.0)
    nested.only("final_logit_softcapping", None, 0)
    nested.only("sample_from_anchor", False)
    nested.only("projector_type", "dflash", None)
    nested.take("mask_token")
    causal, flag = nested.take("causal"), keys.take("is_causal")
    if causal is not None and flag is not None and causal != flag:
        raise UserError(f"{keys.where}: is_causal is {flag} and dflash_config.causal {causal}; make them equal")
    nested.finish(set())
    flag = causal if flag is None else flag
    return _assemble(config, flag, keys.where), flag is not None


def _speculators(keys: _Keys) -> tuple[dict, bool]:
    keys.only("speculators_model_type", "dflash")
    keys.only("architectures", ["DFlashSpeculator"], ["DFlashDraftModel"])
    nested = _Keys(keys.need("transformer_layer_config", dict), f"{keys.where}, transformer_layer_config")
    config = _decoder(nested)
    nested.finish()
    aux = keys.need("aux_hidden_state_layer_ids", list)
    config["target_layer_ids"] = [number - 1 for number in aux]
    config["mask_token_id"] = keys.need("mask_token_id", int)
    config["block_size"] = keys.need("block_size", int)
    config["num_target_layers"] = keys.take("num_target_layers", max(aux) + 1)  # not part of the layout
    keys.only("draft_vocab_size", config["vocab_size"])
    keys.only("sample_from_anchor", False)
    keys.only("shift_label", False, None)
    keys.only("projector_type", "dflash")
    for name in ("auf", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim"):
        keys.take(name)  # of training, or of another projector
    for name in ("lambda_base_start", "lambda_base_decay_ratio"):
        keys.take(name)
    method = keys.take("speculators_config") or {}
    proposals = method.get("proposal_methods") or [{}]
    offered = proposals[0].get("speculative_tokens", config["block_size"] - 1)
    if offered != config["block_size"] - 1:
        raise UserError(
            f"{keys.where}: speculative_tokens is {offered}, block_size {config['block_size']}; not one less"
        )
    both_ways = keys.take("sliding_window_non_causal")
    full = "full_attention" in config["layer_types"]
    # Speculators' own rule: full layers are bidirectional, sliding ones causal unless the flag is true.
    flag = False if both_ways else (None if full else True)
    return _assemble(config, flag, keys.where), both_ways is not None


def _decoder(keys: _Keys) -> dict:
    """The Qwen3 part: sizes, RoPE, layer types."""
    keys.only("model_type", "qwen3")
    keys.only("hidden_act", "silu")
    keys.only("is_neox_style", True)
    keys.only("partial_rotary_factor", None, 1, 1.0)
    config = {name: keys.need(name, int) for name in SIZES}
    config["rms_norm_eps"] = keys.need("rms_norm_eps", (float, int))
    config["attention_bias"] = bool(keys.take("attention_bias", False))
    config["rope_parameters"] = _rope(keys)
    layers = config["num_hidden_layers"]
    kinds = keys.take("layer_types") or ["full_attention"] * layers
    wrong = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if wrong or len(kinds) != layers:
        raise UserError(f"{keys.where}: layer_types {kinds} does not name {layers} full_ or sliding_attention layers")
    window, used = keys.take("sliding_window"), keys.take("use_sliding_window")
    sliding = "sliding_attention" in kinds
    if sliding and (not isinstance(window, int) or window < 1 or used is False):
        raise UserError(
            f"{keys.where}: layer_types has sliding_attention, but sliding_window is {window!r} and "
            f"use_sliding_window {used!r}; give the window and true"
        )
    return config | {"layer_types": kinds, "sliding_window": window if sliding else None}


def _rope(keys: _Keys) -> dict:
    """RoPE from the flat spelling, the dict, or both if they agree."""
    flat, given = keys.take("rope_theta"), keys.take("rope_parameters")
    legacy = keys.take("rope_scaling")
    rope = dict(given or legacy or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    inner = rope.get("rope_theta")
    if flat is not None and inner is not None and float(flat) != float(inner):
        raise UserError(f"{keys.where}: rope_theta is {flat} and, in rope_parameters, {inner}; make them equal")
    if flat is None and inner is None:
        raise UserError(
            f"{keys.where}: key rope_theta is missing, in both spellings; without it engines assume 10000, which "
            "ruins acceptance. Add the value the drafter was trained with"
        )
    rope["rope_theta"] = flat if inner is None else inner
    if rope["rope_type"] != "default" and rope["rope_type"] not in ROPE_INIT_FUNCTIONS:
        raise UserError(f"{keys.where}: rope_type {rope['rope_type']!r} is not known")
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or rope.get("mrope_section"):
        raise UserError(f"{keys.where}: partial and multimodal rotary positions are not supported")
    return rope


def _assemble(config: dict, is_causal: bool | None, where: object) -> dict:
    """The keys of `DFlashConfig`, checked against each other."""
    config = dict(config)
    taps, mask = config.pop("target_layer_ids"), config.pop("mask_token_id")
    layers, block = config["num_target_layers"], config["block_size"]
    if not isinstance(taps, list) or not taps or not all(isinstance(i, int) and 0 <= i < layers for i in taps):
        raise UserError(f"{where}: target_layer_ids {taps} are not blocks of a target of {layers}")
    if not isinstance(mask, int) or not 0 <= mask < config["vocab_size"]:
        raise UserError(f"{where}: mask_token_id {mask!r} is no row of a table of {config['vocab_size']}")
    if not isinstance(block, int) or block < 2:
        raise UserError(f"{where}: block_size is {block!r}; it must be at least 2")
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        raise UserError(f"{where}: num_attention_heads is no multiple of num_key_value_heads")
    config["dflash_config"] = {"mask_token_id": mask, "target_layer_ids": taps}
    config |= {"is_causal": is_causal, "model_type": "qwen3", "tie_word_embeddings": False}
    config |= {"use_sliding_window": config["sliding_window"] is not None, "architectures": ["DFlashDraftModel"]}
    return config | {"max_window_layers": config["num_hidden_layers"]}


def _read_json(path: Path) -> dict:
    if not path.is_file():
        raise UserError(f"{path}: no such file; a drafter's folder needs it")
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object")
    return value


def _read_tensors(folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    index = folder / "model.safetensors.index.json"
    names = shard_names(index) if index.is_file() else ["model.safetensors"]
    tensors: dict[str, Tensor] = {}
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}: no such file; a drafter's folder needs it")
        try:
            tensors |= load_file(folder / name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{folder / name} cannot be read: {error}") from error
    kinds = {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    remarks = []
    if torch.float16 in kinds:
        remarks.append("weights are float16: activations of `fc` overflow in it, so engines must not compute in it")
    if strange := kinds - {torch.float16, torch.bfloat16, torch.float32}:
        raise UserError(f"{folder}: weights are {', '.join(map(str, strange))}; supported: bfloat16, float32, float16")
    if all(name.startswith("model.") for name in tensors):
        remarks.append("tensor names carry the prefix `model.`, which vLLM would double")
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    return tensors, remarks


def _without_vocabulary_maps(tensors: dict[str, Tensor], vocab_size: int, folder: Path) -> dict[str, Tensor]:
    """Maps to a reduced draft vocabulary are dropped if they keep every token, and refused otherwise."""
    left = dict(tensors)
    d2t, t2d = left.pop("d2t", None), left.pop("t2d", None)
    if (d2t is not None and (len(d2t) != vocab_size or bool(d2t.any()))) or (t2d is not None and not bool(t2d.all())):
        raise UserError(f"{folder}: a reduced draft vocabulary (d2t, t2d) is not supported")
    return left


def _check_tensors(tensors: dict[str, Tensor], config: dict, folder: Path) -> None:
    plain = {**config, "rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}  # of no influence on shapes
    with torch.device("meta"):
        expected = DFlashDrafter(DFlashConfig.from_dict(plain)).state_dict()
    wrong = misfits(expected, tensors)
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise UserError(f"{folder}: {'; '.join(wrong[:3])}{more}")
