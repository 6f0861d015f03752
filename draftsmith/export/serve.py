"""Commands that serve an export, and what an engine's loader would object to.

SGLang could not be run where this was written, so its rules are our own reading of its source (0.5.23,
`models/dflash.py`, `dflash_utils.py`), checked before it is ever started.
"""

from __future__ import annotations

import json
import shlex

from draftsmith.engines import launch

VLLM = f"vLLM (tested with {launch.VLLM} on a CPU)"
SGLANG = "SGLang (0.5.23 read, not run)"


def serve_commands(config: dict, folder: str, target: str, revision: str | None = None) -> dict[str, str]:
    """Engine and version to the command; only engines that can read the layout. `revision` is the target's."""
    block = config["block_size"]
    pinned = f" --revision {shlex.quote(revision)}" if revision else ""
    vllm_pinned = pinned + pinned.replace("--revision", "--tokenizer-revision")
    if "speculators_model_type" in config:  # the folder is local, so the revision is that of the target it names
        return {VLLM: f"vllm serve {shlex.quote(folder)}{vllm_pinned}"}
    speculative = json.dumps({"method": "dflash", "model": folder, "num_speculative_tokens": block - 1})
    return {
        VLLM: f"vllm serve {shlex.quote(target)}{vllm_pinned} --speculative-config {shlex.quote(speculative)}",
        SGLANG: (
            f"python -m sglang.launch_server --model-path {shlex.quote(target)}{pinned} --speculative-algorithm DFLASH "
            f"--speculative-draft-model-path {shlex.quote(folder)} --speculative-num-draft-tokens {block} "
            "--speculative-draft-model-quantization unquant"  # else it inherits a quantised target's (sglang#35629)
        ),
    }


def vllm_remarks(config: dict) -> list[str]:
    """What vLLM can only do under conditions."""
    kinds = set(config.get("layer_types") or config.get("transformer_layer_config", {}).get("layer_types") or ())
    if len(kinds) > 1:
        return ["vLLM serves mixed sliding and full layers with its V2 model runner only (not on a CPU)"]
    return []


def sglang_objections(config: dict, vocab_size: int, num_target_layers: int) -> list[str]:
    """What SGLang's loader would refuse or silently guess in a z-lab config."""
    nested = config.get("dflash_config") or {}
    found = []
    if config.get("architectures") != ["DFlashDraftModel"]:
        found.append(f"architectures {config.get('architectures')} select another class")
    taps = nested.get("target_layer_ids", config.get("target_layer_ids"))
    if not taps:
        found.append("target_layer_ids is absent, so SGLang guesses it (sglang#37475)")
    elif not all(isinstance(i, int) and 0 <= i < num_target_layers for i in taps):
        found.append(f"target_layer_ids {taps} are outside the target's {num_target_layers} blocks")
    mask = nested.get("mask_token_id", config.get("mask_token_id"))
    if not isinstance(mask, int) or not 0 <= mask < vocab_size:
        found.append(f"mask_token_id {mask} has no row in the target's table of {vocab_size}")
    if nested.get("block_size", config.get("block_size")) is None:
        found.append("block_size is absent")
    if config.get("hidden_act") != "silu":
        found.append(f"hidden_act {config.get('hidden_act')!r}: SGLang supports silu")
    if "sliding_attention" in (config.get("layer_types") or ()) and not config.get("sliding_window"):
        found.append("a sliding layer without sliding_window")
    return found
