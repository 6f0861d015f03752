"""The Speculators layout: `vllm serve FOLDER` alone serves target and drafter.

The body's tensors, the target's embedding and head in bf16, and a config that names the target. Its layer ids count
hidden states, so they are the block ids plus one.

`sliding_window_non_causal` decides the in-block rule of sliding layers; full layers are bidirectional by definition,
but vLLM up to 0.32 at least makes *every* layer causal when the key is false (vllm#56692). So a drafter whose sliding
layers are causal and which has full layers too cannot be served in this layout, and is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.drafters import DFlashDrafter
from draftsmith.drafters.dflash import DFlashConfig
from draftsmith.errors import UserError
from draftsmith.export.zlab import body, decoder_config
from draftsmith.targets import HFTarget


def speculators(drafter: DFlashDrafter, target: HFTarget, target_name: str) -> tuple[dict, dict[str, Tensor]]:
    """config.json and tensors. Raises UserError for a drafter that the layout cannot express."""
    config = speculators_config(drafter.config, target_name, list(target.config.architectures or []))
    table = target.model.get_input_embeddings().weight
    shared = {"embed_tokens.weight": table, "lm_head.weight": target.head}
    # Copies: a tied table stands twice in the file, and safetensors refuses shared memory.
    return config, body(drafter) | {k: v.detach().to(torch.bfloat16).clone() for k, v in shared.items()}


def speculators_config(config: DFlashConfig, target_name: str, target_architectures: list[str]) -> dict:
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [number + 1 for number in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "num_target_layers": config.num_target_layers,
        "sliding_window_non_causal": not _causal(config),
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "transformer_layer_config": decoder_config(config),
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.block_size - 1,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": target_name, "architectures": target_architectures},
        },
    }


def _causal(config: DFlashConfig) -> bool:
    """The rule of the sliding layers, if the layout and vLLM can express it beside that of the full ones."""
    causal = {kind: config.causal(kind) for kind in config.kinds}
    if causal.get("full_attention") or (causal.get("sliding_attention") and "full_attention" in causal):
        raise UserError(
            "the speculators layout cannot serve this drafter: some layers are causal and some are full-attention "
            "layers, and vLLM reads one flag for all of them (vllm#56692); export with --to zlab"
        )
    return causal.get("sliding_attention", False)
