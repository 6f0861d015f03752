"""DFlash: a small block-diffusion drafter (arXiv 2602.06036).

The target's tapped features are projected and normed once (`fc`, `hidden_norm`) and injected into every layer as keys
and values of the context. A block of [anchor token, mask, mask, ...] then becomes B - 1 proposals in one pass: the
state at slot k predicts the token at the slot's own position. Embedding and head are the target's.

`config.json` and the tensor names are z-lab's, which vLLM, SGLang and PyPI `dflash` read: what is trained is what is
served.
"""

from __future__ import annotations

import json
from typing import no_type_check

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, Qwen3Config

from draftsmith.config import DFlashOptions
from draftsmith.drafters.layers import DecoderLayer, RMSNorm, Rotary
from draftsmith.errors import UserError
from draftsmith.flex import flex_mask
from draftsmith.types import Blocks, Draft, Features, Intervals
from draftsmith.visibility import dense_mask, intervals, row_masks


@no_type_check  # jaxtyping's checks cannot wrap the __init__ that transformers gives to configs
class DFlashConfig(Qwen3Config):
    """A Qwen3 config and the keys `block_size`, `dflash_config`, `num_target_layers`, `is_causal` (z-lab's format)."""

    block_size: int = 16
    num_target_layers: int | None = None
    dflash_config: dict | None = None
    is_causal: bool | None = None

    @property
    def mask_token_id(self) -> int:
        return self.dflash_config["mask_token_id"]

    @property
    def kinds(self) -> list[str]:
        """The layers' types, in order."""
        return list(self.layer_types or ())

    @property
    def target_layer_ids(self) -> list[int]:
        return self.dflash_config["target_layer_ids"]

    def causal(self, layer_type: str) -> bool:
        """In-block rule: servers run sliding layers causally and full layers both ways unless `is_causal` says so."""
        return layer_type == "sliding_attention" if self.is_causal is None else self.is_causal


def build_config(options: DFlashOptions, target: PretrainedConfig, layer_ids: tuple[int, ...]) -> DFlashConfig:
    """The drafter's architecture from run options and the target's config; from here on only the result is read."""
    heads = options.num_heads or target.num_attention_heads
    head_dim = options.head_dim or getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
    types = list(options.layer_types or ["full_attention"] * options.num_layers)
    kv_heads = options.num_kv_heads or target.num_key_value_heads
    sliding = "sliding_attention" in types
    _check(options, target, types, heads, kv_heads, sliding)
    # What rotates in the drafter is its whole head; a target's partial rotation must not be copied.
    rope = {k: v for k, v in target.rope_parameters.items() if k not in ("partial_rotary_factor", "mrope_section")}
    config = DFlashConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=options.intermediate_size or target.intermediate_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters=rope,
        layer_types=types,
        use_sliding_window=sliding,
        sliding_window=options.sliding_window if sliding else None,
        max_window_layers=options.num_layers,
        tie_word_embeddings=False,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=target.pad_token_id,
        architectures=["DFlashDraftModel"],
    )
    config.block_size = options.block_size
    config.num_target_layers = target.num_hidden_layers
    config.dflash_config = {"mask_token_id": options.mask_token_id, "target_layer_ids": list(layer_ids)}
    if options.is_causal is not None:
        config.is_causal = options.is_causal
    return config


def _check(options, target, types: list[str], heads: int, kv_heads: int, sliding: bool) -> None:
    if len(types) != options.num_layers:
        raise UserError(
            f"drafter.layer_types names {len(types)} layers, drafter.num_layers is {options.num_layers}; "
            "give one type per layer"
        )
    if sliding and not options.sliding_window:
        raise UserError("drafter.layer_types has sliding_attention, so drafter.sliding_window must be at least 1")
    if options.sliding_window and not sliding:
        raise UserError(
            "drafter.sliding_window has no effect without a sliding_attention layer; "
            "set drafter.layer_types or remove the window"
        )
    if heads % kv_heads:
        raise UserError(f"drafter.num_heads {heads} is not a multiple of drafter.num_kv_heads {kv_heads}")
    if options.block_size < 2:
        raise UserError(f"drafter.block_size is {options.block_size}; slot 0 is the anchor, so it must be at least 2")
    if not 0 <= options.mask_token_id < target.vocab_size:
        raise UserError(
            f"drafter.mask_token_id {options.mask_token_id} has no row in the target's embedding "
            f"(0 to {target.vocab_size - 1}); choose an id that never occurs in text"
        )


def config_json(config: DFlashConfig) -> str:
    """`config.json` as servers read it: every key written, the served class name, and no `is_causal: null`."""
    values = {k: v for k, v in config.to_dict().items() if not (k == "is_causal" and v is None)}
    values["architectures"] = ["DFlashDraftModel"]
    # transformers 4 reads the flat key, transformers 5 and vLLM the dict
    values["rope_theta"] = values["rope_parameters"]["rope_theta"]
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def misfits(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """One phrase for each tensor that is missing, not expected, or of another shape, by name."""
    wanted, given = ({name: tuple(t.shape) for name, t in named.items()} for named in (expected, found))
    return [
        f"tensor {name} is {given.get(name, 'missing')}, expected {wanted.get(name, 'no such tensor')}"
        for name in sorted(wanted | given)
        if wanted.get(name) != given.get(name)
    ]


class DFlashDrafter(PreTrainedModel):
    """The drafter. Parameters are exactly the served ones: 11 per layer, and fc, hidden_norm, norm."""

    config_class = DFlashConfig
    config: DFlashConfig
    base_model_prefix = ""
    _no_split_modules = ["DecoderLayer"]

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList([DecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.rotary = Rotary(config)
        self.post_init()

    @classmethod
    def from_files(cls, config: str, weights: dict[str, Tensor]) -> DFlashDrafter:
        """A drafter from the text of its `config.json` and its named tensors; every tensor must be there and fit."""
        drafter = cls(DFlashConfig.from_dict(json.loads(config)))
        drafter.load_state_dict(weights)
        return drafter

    def forward(
        self,
        features: Features,
        context_position: Int[Tensor, " tok"],
        embedded: Float[Tensor, "anc slot hid"],
        blocks: Blocks,
    ) -> Draft:
        """Every block of a pack at once. `embedded` is the target's embedding of `blocks.tokens`."""
        spans = {"full_attention": blocks.full, "sliding_attention": blocks.sliding}
        make_mask = flex_mask if embedded.is_cuda else dense_mask
        masks = {kind: make_mask(spans[kind], features.context.shape[0]) for kind in set(self.config.kinds)}
        context = self.project(features.context, context_position)
        slots = embedded.shape[1]
        hidden = self._decode(embedded.flatten(0, 1), blocks.position.flatten(), context, masks, slots)
        return Draft(hidden=hidden.unflatten(0, (-1, slots - 1)))

    def project(
        self, context: Float[Tensor, "tok tap_hid"], position: Int[Tensor, " tok"]
    ) -> list[tuple[Float[Tensor, "tok kv_head dim"], Float[Tensor, "tok kv_head dim"]]]:
        """Keys and values of context tokens for every layer; computed once per committed token when serving."""
        feature = self.hidden_norm(self.fc(context))
        rope = self.rotary(position)
        return [layer.self_attn.keys_values(feature, rope) for layer in self.layers]

    def propose(
        self,
        context: list[tuple[Float[Tensor, "tok kv_head dim"], Float[Tensor, "tok kv_head dim"]]],
        embedded: Float[Tensor, "slot hid"],
    ) -> Float[Tensor, "drafted hid"]:
        """One block of a single document whose context is exactly the cached tokens, as a server drafts it.

        The states of slots 1 and later, which the target's head turns into proposals.
        """
        start, size = context[0][0].shape[0], embedded.shape[0]
        anchor = torch.tensor([start]).numpy()
        masks = {}
        for kind in set(self.config.kinds):
            window = self.config.sliding_window if kind == "sliding_attention" else None
            spans = intervals(anchor, anchor * 0, size, window=window, causal=self.config.causal(kind))
            masks[kind] = dense_mask(spans, start).to(embedded.device)
        position = torch.arange(start, start + size, device=embedded.device)
        with torch.compiler.set_stance("force_eager"):  # lengths differ from call to call
            return self._decode(embedded, position, context, masks, size)

    def propose_rows(
        self,
        context: list[tuple[Float[Tensor, "row tok kv_head dim"], Float[Tensor, "row tok kv_head dim"]]],
        embedded: Float[Tensor, "row slot hid"],
        position: Int[Tensor, "row slot"],
        masks: dict[str, Bool[Tensor, "row slot key"]],
    ) -> Float[Tensor, "row drafted hid"]:
        """A block for each row of a static cache of contexts; the mask of each kind of layer says which keys exist."""
        rows, slots = position.shape
        hidden = self._decode(embedded.flatten(0, 1), position.flatten(), context, masks, slots)
        return hidden.unflatten(0, (rows, -1))

    def row_masks(self, start: Int[np.ndarray, " row"], num_context: int) -> dict[str, Bool[Tensor, "row slot key"]]:
        """Masks for `propose_rows`, on the drafter's device: row r has `start[r]` of `num_context` context tokens."""
        masks, size = {}, self.config.block_size
        for kind in set(self.config.kinds):
            window = self.config.sliding_window if kind == "sliding_attention" else None
            spans = intervals(start, start * 0, size, window=window, causal=self.config.causal(kind))
            masks[kind] = row_masks(
                Intervals(**{k: v.to(self.device) for k, v in vars(spans).items()}), size, num_context
            )
        return masks

    def _decode(self, x, position, context, masks, slots: int) -> Float[Tensor, "kept hid"]:
        rope = self.rotary(position)
        for layer, kind, keys_values in zip(self.layers, self.config.kinds, context, strict=True):
            x = layer(x, rope, keys_values, masks[kind], slots if layer is self.layers[-1] else 0)
        return self.norm(x)
