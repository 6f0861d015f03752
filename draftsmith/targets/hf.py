"""A frozen transformers causal LM of the Llama, Qwen2 or Qwen3 family as a target.

Feature i is the *output* of block i, `hidden_states[i + 1]` of transformers, before the next block's norm. Capturing
runs the blocks up to the last tapped one and writes each tap straight into the feature buffer; neither the final norm
nor the head is run.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from draftsmith.config import TargetOptions
from draftsmith.errors import UserError
from draftsmith.flex import flex_mask
from draftsmith.fp8 import frozen_copy
from draftsmith.shapes import default_layer_ids
from draftsmith.targets.packed_attention import NAME, document_spans
from draftsmith.types import Features, Pack
from draftsmith.visibility import dense_mask

FAMILIES = ("llama", "qwen2", "qwen3")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")


class HFTarget:
    """See `targets.base.Target`. Weights are frozen; documents of a pack do not see each other."""

    def __init__(self, model: PreTrainedModel, tokenizer, layer_ids: tuple[int, ...], fingerprint: str = "") -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.layer_ids = layer_ids
        self.fingerprint = fingerprint
        self.eos_ids = _eos_ids(getattr(model, "generation_config", None), model.config, tokenizer)
        # transformers renamed the argument that takes the cache (5.17 to 5.24); one look settles it.
        named = inspect.signature(type(self.model.model).forward).parameters
        self.blocks = list(model.model.layers[: max(layer_ids) + 1])  # what `capture` runs
        self._cache_name = "cache" if "cache" in named else "past_key_values"

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def head(self) -> Float[Tensor, "voc hid"]:
        return self.model.get_output_embeddings().weight

    def embed(self, tokens: Int[Tensor, " *n"]) -> Float[Tensor, "*n hid"]:
        return self.model.get_input_embeddings()(tokens)

    @torch.no_grad()
    def capture(self, pack: Pack, out: Float[Tensor, "tok tap_hid"] | None = None) -> Features:
        decoder, size = self.model.model, self.config.hidden_size
        position = pack.position[None]
        spans = document_spans(pack.doc_start)
        mask = flex_mask(spans, 0) if spans.blk_lo.is_cuda else dense_mask(spans, 0)[None, None]
        hidden = self.embed(pack.tokens)[None]
        rope = decoder.rotary_emb(hidden, position)
        context = hidden.new_empty(pack.tokens.shape[0], len(self.layer_ids) * size) if out is None else out
        for number, layer in enumerate(self.blocks):
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rope, position_ids=position)
            if number in self.layer_ids:
                at = self.layer_ids.index(number) * size
                context[:, at : at + size] = hidden[0]
        return Features(context=context)

    def new_cache(self) -> DynamicCache:
        return DynamicCache()

    @torch.no_grad()
    def extend(
        self, tokens: Int[Tensor, " n"], cache: DynamicCache
    ) -> tuple[Float[Tensor, "n voc"], Float[Tensor, "n tap_hid"]]:
        with torch.compiler.set_stance("force_eager"):  # lengths differ from call to call
            out = self.model(
                input_ids=tokens[None], use_cache=True, output_hidden_states=True, **{self._cache_name: cache}
            )
        taps = [out.hidden_states[number + 1] for number in self.layer_ids]
        return out.logits[0], torch.cat(taps, dim=-1)[0]

    def compile_layers(self) -> None:
        """Compile each block for capturing; all of them share one code object, so this is one compilation."""
        for layer in self.blocks:
            layer.compile(dynamic=False)

    def capture_in_fp8(self) -> None:
        """Features come from FP8 copies of the blocks' linear layers from now on; `extend` keeps the real weights."""
        self.blocks = [frozen_copy(layer) for layer in self.blocks]
        self.fingerprint += "-fp8"  # features kept on disk are not those of the real weights


def read_config(options: TargetOptions) -> PretrainedConfig:
    """The target's config. Raises UserError for a path that is no model of a supported family."""
    if not options.path:
        raise UserError("target.path is not given; set it to the target's folder or hub name")
    if Path(options.path).is_dir() and not (Path(options.path) / "config.json").is_file():
        raise UserError(f"target.path {options.path!r} has no config.json; give a Hugging Face model folder")
    if not may_be_hub_name(options.path) and not Path(options.path).is_dir():
        raise UserError(f"target.path {options.path!r}: no such folder; give a model folder, or a hub name ORG/NAME")
    try:
        config = AutoConfig.from_pretrained(
            options.path, revision=options.revision, trust_remote_code=options.trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"target.path {options.path!r} could not be read as a model: {reason}") from error
    if config.model_type not in FAMILIES:
        raise UserError(
            f"target.path {options.path!r} is of family {config.model_type!r}; supported: {', '.join(FAMILIES)}"
        )
    if method := _quantisation(options.path, config):
        raise UserError(
            f"target.path {options.path!r} is quantised ({method}), and this project computes with whole weights only; "
            "train on its bf16 model and serve the drafter with either (docs/serving.md)"
        )
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise UserError(f"target.path {options.path!r} has sliding-window layers, which are not supported yet")
    rope = getattr(config, "rope_parameters", None) or {}
    if (part := rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0))) not in (None, 1.0):
        raise UserError(
            f"target.path {options.path!r} has partial_rotary_factor {part}: transformers rotates the whole head of a "
            f"{config.model_type} and engines a part of it, so the served target would be another; not supported"
        )
    return config


def _quantisation(path: str, config: PretrainedConfig) -> str | None:
    """The method by which a model's weights are quantised; ModelOpt may say so in a file of its own."""
    found = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if found:
        found = found if isinstance(found, dict) else vars(found)
        return str(found.get("quant_method") or found.get("quant_algo") or "method not stated")
    return "modelopt" if (Path(path) / "hf_quant_config.json").is_file() else None


def shard_names(index: Path) -> list[str]:
    """The weight files that an index names. Raises UserError for one that is not in the folder itself."""
    try:
        names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is no index of weights: key weight_map is missing or damaged") from error
    if not names:
        raise UserError(f"{index}: key weight_map is empty")
    for name in names:
        if not _PLAIN_NAME.fullmatch(name):
            raise UserError(f"{index}: {name!r} is no plain file name; weights are read from their own folder only")
    return names


def may_be_hub_name(path: str) -> bool:
    """ORG/NAME, unless ORG is a folder here: then a missing NAME is a slip, and no reason to ask the network."""
    parts = path.split("/")
    return len(parts) == 2 and bool(parts[0].strip(".~")) and not Path(parts[0]).exists()


def load_target(
    options: TargetOptions, device: torch.device, num_draft_layers: int = 1, mesh: DeviceMesh | None = None
) -> HFTarget:
    """Load and freeze the target that the options name. Raises UserError for what cannot be a target.

    The processes of `mesh`, if there is one, share the weights: each keeps a part of every block and gets the rest when
    the block runs (FSDP2), so they must run in step. Embedding and head are whole on each.
    """
    layer_ids = tap_ids(options, read_config(options), num_draft_layers)
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    named = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    if (index := Path(options.path) / "model.safetensors.index.json").is_file():
        shard_names(index)
    logging.disable_progress_bar()  # transformers' own; it would tear our lines
    try:
        model = AutoModelForCausalLM.from_pretrained(
            options.path, dtype=getattr(torch, dtype), attn_implementation=NAME, use_safetensors=True, **named
        )
        tokenizer = AutoTokenizer.from_pretrained(options.path, **named)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"target.path {options.path!r}: its weights or tokenizer cannot be read: {reason}") from error
    if mesh is None:
        model = model.to(device=device)
        return HFTarget(model, tokenizer, layer_ids, fingerprint(model))
    whole = fingerprint(model)
    _share(model, mesh, device)
    return HFTarget(model, tokenizer, layer_ids, whole)


def _share(model: PreTrainedModel, mesh: DeviceMesh, device: torch.device) -> None:
    """Block by block, so that no more than one whole block is on the device."""
    model.requires_grad_(False)
    for layer in model.model.layers:
        fully_shard(layer.to(device), mesh=mesh)
    model.to(device=device)


def tap_ids(options: TargetOptions, config: PretrainedConfig, num_draft_layers: int) -> tuple[int, ...]:
    """The blocks to tap: those asked for, checked, or DFlash's choice."""
    layer_ids = options.layer_ids
    if layer_ids is None:
        layer_ids = default_layer_ids(config.num_hidden_layers, num_draft_layers)
    _check_layer_ids(layer_ids, config.num_hidden_layers)
    return tuple(layer_ids)


def load_tokenizer(options: TargetOptions):
    """The target's tokenizer alone, for the verbs that need no weights."""
    read_config(options)
    return AutoTokenizer.from_pretrained(
        options.path, revision=options.revision, trust_remote_code=options.trust_remote_code
    )


def end_ids(options: TargetOptions, tokenizer) -> tuple[int, ...]:
    """Tokens that end the target's answer, by its config, its generation config and its tokenizer; no weights read."""
    config = read_config(options)
    try:
        generation = GenerationConfig.from_pretrained(options.path, revision=options.revision or "main")
    except OSError:  # a model folder need not have one
        generation = None
    return tuple(sorted(_eos_ids(generation, config, tokenizer)))


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 over the config and, for each weight tensor, its name, shape and a spread of 4,096 of its values."""
    config = json.loads(model.config.to_json_string())
    for name in ("_name_or_path", "transformers_version"):  # where it lies and who read it do not make it another one
        config.pop(name, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.reshape(-1)
        sample = flat[:: max(1, flat.numel() // 4096)].float().cpu().contiguous()
        digest.update(f"{name}{tuple(tensor.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def choose_mask_token(tokenizer, vocab_size: int, wanted: int | None) -> int:
    """The mask token's id: the one asked for, checked, or the first row of the embedding past the tokenizer's ids."""
    used = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("eos", "pad", "bos", "unk")}
    if wanted is None:
        if len(tokenizer) < vocab_size:
            return len(tokenizer)
        spare = [i for i in tokenizer.added_tokens_decoder if i not in used.values()]
        spare = [i for i in spare if tokenizer.added_tokens_decoder[i].content not in (tokenizer.chat_template or "")]
        raise UserError(
            "drafter.mask_token_id is not given and the target's embedding has no unused row; choose an id that never "
            f"occurs in text, for example one of these special tokens: {spare[:8]}"
        )
    for name, number in used.items():
        if wanted == number:
            raise UserError(
                f"drafter.mask_token_id {wanted} is the tokenizer's {name} token, which occurs in text; "
                "choose an id that never does, or leave it out to have an unused one chosen"
            )
    return wanted


def _check_layer_ids(layer_ids: tuple[int, ...], num_layers: int) -> None:
    """The last block is refused: its tuple entry in transformers is already normed, and servers disagree about it."""
    wrong = [i for i in layer_ids if not 0 <= i < num_layers - 1]
    if wrong or not layer_ids or len(set(layer_ids)) != len(layer_ids):
        raise UserError(
            f"target.layer_ids {list(layer_ids)}: give distinct 0-based blocks from 0 to {num_layers - 2} "
            "(the last block cannot be tapped)"
        )


def _eos_ids(generation: GenerationConfig | None, config: PretrainedConfig, tokenizer) -> frozenset[int]:
    ids = set()
    for source in (getattr(generation, "eos_token_id", None), config.eos_token_id, tokenizer.eos_token_id):
        ids.update(source if isinstance(source, list) else [source])
    return frozenset(i for i in ids if i is not None)
