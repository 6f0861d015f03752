"""z-lab's layout: a Qwen3 config with a few more keys, and the body's tensors without a prefix.

Read by vLLM, SGLang, PyPI `dflash` and llama.cpp's converter. Embedding and head are the target's and are not in it.
Every key is written, because each absent one is somebody's silent default: transformers 4 reads the flat `rope_theta`,
transformers 5 and vLLM the dict; PyPI `dflash` needs `num_target_layers`; a sliding layer is causal unless `is_causal`
says otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.drafters import DFlashDrafter
from draftsmith.drafters.dflash import DFlashConfig


def zlab(drafter: DFlashDrafter, target: object, target_name: str) -> tuple[dict, dict[str, Tensor]]:
    """config.json and tensors. `target` and its name are not needed: nothing of the target is in this layout."""
    return zlab_config(drafter.config), body(drafter)


def body(drafter: DFlashDrafter) -> dict[str, Tensor]:
    """The drafter's own tensors in bf16."""
    return {name: value.detach().to(torch.bfloat16) for name, value in drafter.state_dict().items()}


def zlab_config(config: DFlashConfig) -> dict:
    values = {"architectures": ["DFlashDraftModel"], **decoder_config(config)}
    values |= {"block_size": config.block_size, "num_target_layers": config.num_target_layers}
    values["dflash_config"] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
    }
    rules = {config.causal(kind) for kind in config.kinds}
    if len(rules) == 1:  # one key for all layers: it cannot say "sliding ones causal, full ones not", the default can
        values["is_causal"] = rules.pop()
    return values


def decoder_config(config: DFlashConfig) -> dict:
    """The Qwen3 part."""
    rope = dict(config.rope_parameters or {})
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": bool(config.attention_bias),
        "attention_dropout": 0.0,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "layer_types": config.kinds,
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "max_window_layers": config.num_hidden_layers,
        "tie_word_embeddings": False,
        "initializer_range": config.initializer_range,
        "use_cache": True,
        "dtype": "bfloat16",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
