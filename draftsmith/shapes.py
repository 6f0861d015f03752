"""What a target and its drafter cost, from `config.json` and options alone: weights, bytes, floating-point operations.

No weights are read and nothing heavy is imported. A multiply-add counts as two operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftsmith.config import DFlashOptions
from draftsmith.errors import UserError

DOCUMENT = 2_048
"""Tokens of a document; attention depends on it."""
TILE = 128
"""Rows and columns of a tile of scores, as attention kernels skip them. Context and draft slots are whole tiles."""


def anchor_unit(block_size: int) -> int:
    """So many blocks are whole tiles."""
    return TILE // math.gcd(TILE, block_size)


def default_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """DFlash's choice: one tap per draft layer, evenly spaced from block 1 to block L - 3, rounded half to even.

    One draft layer (or a target too shallow to spread over) taps block L // 2.
    """
    if num_draft_layers == 1 or num_target_layers < 5:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return tuple(sorted({round(1 + i * step) for i in range(num_draft_layers)}))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A target's config, the drafter's options, and the two budgets of a pack."""

    config: Mapping[str, Any]
    drafter: DFlashOptions
    tokens: int
    anchors: int
    layer_ids: tuple[int, ...] | None = None
    width: int = 2
    """Bytes of a compute number."""

    def size(self, name: str) -> int:
        """A number of the target's config, or of the text part of it."""
        value = self.config.get("text_config", self.config).get(name)
        if name == "head_dim" and value is None:
            return self.size("hidden_size") // self.size("num_attention_heads")
        if name == "num_key_value_heads" and value is None:
            return self.size("num_attention_heads")
        if not isinstance(value, int):
            raise UserError(
                f"the target's config.json has no {name}; plan knows dense targets and hybrids like Qwen3.5"
            )
        return value

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(self.layer_ids or default_layer_ids(self.size("num_hidden_layers"), self.drafter.num_layers))

    @property
    def feature_bytes(self) -> int:
        """Of one pack."""
        return self.tokens * len(self.taps) * self.size("hidden_size") * self.width

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Of each of the target's blocks: its weights in matrices, and a token's operations besides those."""
        text, size = self.config.get("text_config", self.config), self.size
        if any("experts" in name for name in text):
            raise UserError("a target with experts cannot be scaled by FLOP; give figures measured on it (--figures)")
        hidden, dim = size("hidden_size"), size("head_dim")
        query, kv = size("num_attention_heads") * dim, size("num_key_value_heads") * dim
        gate = query if text.get("attn_output_gate") else 0
        mlp = 3 * hidden * size("intermediate_size")
        kinds = text.get("layer_types") or ["full_attention"] * size("num_hidden_layers")
        full = mlp + hidden * (2 * query + gate + 2 * kv), 4 * query * DOCUMENT // 2
        if "linear_attention" not in kinds:
            return [full] * len(kinds)
        heads, key = size("linear_num_value_heads"), size("linear_num_key_heads") * size("linear_key_head_dim")
        value = heads * size("linear_value_head_dim")
        delta = mlp + hidden * (2 * key + 3 * value + 2 * heads), 6 * value * size("linear_key_head_dim")
        return [delta if kind == "linear_attention" else full for kind in kinds]

    @property
    def tables(self) -> int:
        """Weights of embedding and head."""
        tied = self.config.get("text_config", self.config).get("tie_word_embeddings")
        return self.size("vocab_size") * self.size("hidden_size") * (1 if tied else 2)

    @property
    def target_block_weights(self) -> int:
        return sum(weights for weights, _ in self.blocks)

    @property
    def target_flop(self) -> float:
        """Capturing a pack: up to the last tapped block."""
        return self.tokens * float(sum(2 * weights + rest for weights, rest in self.blocks[: max(self.taps) + 1]))

    @property
    def drafter_sizes(self) -> tuple[int, int, int, int]:
        """Sizes of the drafter: query and kv widths, a head's, the FFN's."""
        own, dim = self.drafter, self.drafter.head_dim or self.size("head_dim")
        query = (own.num_heads or self.size("num_attention_heads")) * dim
        kv = (own.num_kv_heads or self.size("num_key_value_heads")) * dim
        return query, kv, dim, own.intermediate_size or self.size("intermediate_size")

    @property
    def drafter_weights(self) -> int:
        hidden, layers, (query, kv, dim, ffn) = self.size("hidden_size"), self.drafter.num_layers, self.drafter_sizes
        layer = 2 * hidden * (query + kv) + 3 * hidden * ffn + 2 * hidden + 2 * dim
        return layers * layer + len(self.taps) * hidden * hidden + 2 * hidden

    @property
    def drafter_flop(self) -> float:
        """Forward and backward of a pack, the head's two products included."""
        own, hidden, (query, kv, _, ffn) = self.drafter, self.size("hidden_size"), self.drafter_sizes
        slots, types = self.anchors * own.block_size, own.layer_types or ("full_attention",) * own.num_layers
        window = own.sliding_window or DOCUMENT
        seen = sum(
            min(DOCUMENT / 2, window if kind == "sliding_attention" else DOCUMENT) + own.block_size for kind in types
        )
        per_slot = (2 * hidden * (query + kv) + 3 * hidden * ffn) * own.num_layers
        unread = hidden * query + 3 * hidden * ffn  # what the last layer would make of slot 0
        return float(
            6 * (per_slot * slots - unread * self.anchors)
            + 4 * len(self.taps) * hidden * hidden * self.tokens
            + 12 * hidden * kv * own.num_layers * self.tokens
            + 14 * query * seen * slots
            + 4 * hidden * self.size("vocab_size") * self.anchors * (own.block_size - 1)
        )

    def work(self, stage: str) -> float:
        """What a stage's seconds are proportional to."""
        if stage == "optimizer":
            return float(self.drafter_weights)
        return self.target_flop if stage == "target" else self.drafter_flop
