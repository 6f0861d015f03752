"""The drafter's parts: RMSNorm, rotary positions, SwiGLU, and a decoder layer that injects context as keys and values.

Qwen3's layer, except that keys and values come from two places: the target's projected features for the context, and
the block's own states for the draft slots. Queries, output projection, MLP and residual exist for draft slots only.
(DFlash, arXiv 2602.06036, section 4; tensor names as in z-lab's checkpoints.)
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.drafters.attention import attend, attend_rows


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*n size"]) -> Float[Tensor, "*n size"]:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


@torch.library.custom_op(
    "draftsmith::rotary_tables",
    mutates_args=(),
    schema="(Tensor position, Tensor frequencies, float scale) -> (Tensor, Tensor)",
)
def rotary_tables(position: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, [n, dim] each. An operation of its own because torch.compile would otherwise compute them anew
    for every head, in every kernel that rotates: 2 % of a step.
    """
    angle = position.float()[:, None] * frequencies
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos() * scale, angle.sin() * scale


@rotary_tables.register_fake
def _(position, frequencies, scale):
    table = frequencies.new_empty(position.shape[0], 2 * frequencies.shape[0])
    return table, torch.empty_like(table)


class Rotary(nn.Module):
    """Cosine and sine tables of rotary positions (arXiv 2104.09864), in fp32 whatever the module is cast to.

    The frequencies are no buffer, because a cast of the module would round them: bf16 tables are radians off at a few
    thousand tokens.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        rope: dict[str, Any] = dict(config.rope_parameters or {})
        if rope["rope_type"] == "default":
            exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
            self.frequencies, self.scale = rope["rope_theta"] ** -exponent, 1.0
        else:
            self.frequencies, self.scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))

    def forward(self, position: Int[Tensor, " n"]) -> tuple[Float[Tensor, "n dim"], Float[Tensor, "n dim"]]:
        if self.frequencies.device != position.device:
            self.frequencies = self.frequencies.to(position.device)
        return rotary_tables(position, self.frequencies, float(self.scale))


def rotate(
    x: Float[Tensor, "n head dim"], tables: tuple[Float[Tensor, "n dim"], Float[Tensor, "n dim"]]
) -> Float[Tensor, "n head dim"]:
    """Rotary positions on halves (neox layout)."""
    cos, sin = (table[:, None].to(x.dtype) for table in tables)
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def drafted(x: Float[Tensor, "q n"], slots: int) -> Float[Tensor, "kept n"]:
    """Slots 1 and later of each block of so many slots; everything if it is 0."""
    return x.unflatten(0, (-1, slots))[:, 1:].flatten(0, 1) if slots else x


class Attention(nn.Module):
    """Draft slots attend to projected context and to draft slots; per-head norms on queries and keys."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, hidden, bias=bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps)

    def keys_values(
        self, x: Float[Tensor, "n hid"], rope: tuple[Tensor, Tensor]
    ) -> tuple[Float[Tensor, "n kv_head dim"], Float[Tensor, "n kv_head dim"]]:
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return rotate(key, rope), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def forward(
        self,
        x: Float[Tensor, "q hid"],
        rope: tuple[Tensor, Tensor],
        context: tuple[Float[Tensor, "*row tok kv_head dim"], Float[Tensor, "*row tok kv_head dim"]],
        mask: Bool[Tensor, "*row q_row key"] | BlockMask,
        slots: int = 0,
    ) -> Float[Tensor, "kept hid"]:
        """The queries share the context and see each other as the mask says, or are equal parts of rows of contexts."""
        query = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), rope)
        key, value = self.keys_values(x, rope)
        if context[0].ndim == 3 or isinstance(mask, BlockMask):
            out = attend(query, torch.cat([context[0], key]), torch.cat([context[1], value]), mask)
        else:
            query, key, value = (part.unflatten(0, (len(context[0]), -1)) for part in (query, key, value))
            keys, values = torch.cat([context[0], key], dim=1), torch.cat([context[1], value], dim=1)
            out = attend_rows(query, keys, values, mask).flatten(0, 1)
        return self.o_proj(drafted(out.flatten(1), slots))


class MLP(nn.Module):
    """SwiGLU. Compiled, the gated product is not kept for the backward pass: making it again costs next to nothing."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "q hid"], *, keep_product: bool = True) -> Float[Tensor, "q hid"]:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(_gated(gate, up) if keep_product else _again(_gated, gate, up))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP over draft slots.

    `recompute` gives up memory or time: the backward pass computes the MLP, or the whole layer, once more instead of
    reading what the forward pass kept. With `slots`, the number in a block, the layer is the last one: nobody reads
    what it makes of slot 0, so once attention has read it, it is left out.
    """

    recompute: Literal["none", "mlp", "layer"] = "none"

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Float[Tensor, "q hid"],
        rope: tuple[Tensor, Tensor],
        context: tuple[Float[Tensor, "*row tok kv_head dim"], Float[Tensor, "*row tok kv_head dim"]],
        mask: Bool[Tensor, "*row q_row key"] | BlockMask,
        slots: int = 0,
    ) -> Float[Tensor, "kept hid"]:
        if self.recompute == "layer":
            return _again(self._attend_and_feed, x, rope, context, mask, slots)
        return self._attend_and_feed(x, rope, context, mask, slots)

    def _attend_and_feed(self, x, rope, context, mask, slots) -> Float[Tensor, "kept hid"]:
        x = drafted(x, slots) + self.self_attn(self.input_layernorm(x), rope, context, mask, slots)
        return x + (_again(self._feed, x) if self.recompute == "mlp" else self._feed(x))

    def _feed(self, x: Float[Tensor, "q hid"]) -> Float[Tensor, "q hid"]:
        keep_product = self.recompute != "none" or not torch.compiler.is_compiling()
        return self.mlp(self.post_attention_layernorm(x), keep_product=keep_product)


def _gated(gate: Float[Tensor, "q ffn"], up: Float[Tensor, "q ffn"]) -> Float[Tensor, "q ffn"]:
    return nn.functional.silu(gate) * up


def _again(function, *inputs):
    """Call a function whose insides the backward pass computes again. Nothing in the drafter is random."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
