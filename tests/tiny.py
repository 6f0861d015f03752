"""A tiny tokenizer and tiny random targets, shared by the tests. Nothing is downloaded; building takes milliseconds."""

from __future__ import annotations

from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1, 2: padding, bos, eos."""

NUM_TOKENS = 259
"""Ids of `tiny_tokenizer`: the specials and the 256 bytes."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML that adds no system turn of its own."""

KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte plus the three specials: 259 ids, eos `<|im_end|>`, pad `<|endoftext|>`."""
    vocab = {token: index for index, token in enumerate([*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def tiny_target(
    kind: Literal["llama", "qwen2", "qwen3"] = "llama",
    *,
    tied: bool = True,
    layers: int = 4,
    hidden: int = 32,
    vocab: int = 320,
    heads: int = 4,
    head_dim: int | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """A random float32 model in eval mode, the same for the same arguments; its greedy text varies with the prompt.

    Two query heads to a key head, FFN 2 * hidden, 2048 positions. Ids 259 to vocab - 1 are rows that no text uses and
    that the model does not write (their rows are near zero), as in real padded vocabularies.
    """
    config_class, model_class = KINDS[kind]
    config = config_class(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=head_dim or hidden // heads,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.1 * torch.randn(weight.shape, generator=generator))
            else:
                # Against the usual 0.02: layers large enough to drown the input's own embedding, which a tied
                # head would otherwise simply repeat for ever.
                table = "embed" in name or "lm_head" in name
                std = 0.3 if table else 1.5 / weight.shape[-1] ** 0.5
                weight.copy_(std * torch.randn(weight.shape, generator=generator))
                if table:
                    weight[NUM_TOKENS:] *= 0.01
    model.generation_config.bos_token_id, model.generation_config.eos_token_id = 1, 2
    model.generation_config.pad_token_id = 0
    return model
