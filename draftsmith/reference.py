"""The drafter once more, from config.json and safetensors alone: what `verify` compares everything with.

Written from the format's description, in plain torch, one block at a time, without a cache and without any code of
`drafters/`: slow, and short enough to be checked by eye. Facts used: arXiv 2602.06036, section 4, for the model;
arXiv 2104.09864 for rotary positions; arXiv 2309.00071 for yarn; the servers' rule that a sliding layer is causal
inside the block unless `is_causal` says otherwise.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a folder is to be understood; one field per convention that an engine could get wrong."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope: dict
    max_positions: int
    window: tuple[int | None, ...]
    """Per layer; None for a full one."""
    causal: tuple[bool, ...]
    """Per layer: a slot sees only itself and earlier slots of its block."""
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    """0-based blocks of the target whose output is a feature."""
    next_position: bool = False
    """Slot k predicts the token after its own position (not DFlash's convention)."""


def read_config(config: dict) -> Reading:
    """The reading of a z-lab or a Speculators config. A key that is missing is a KeyError."""
    if "speculators_model_type" in config:
        body, taps = config["transformer_layer_config"], [i - 1 for i in config["aux_hidden_state_layer_ids"]]
        mask, rule = config["mask_token_id"], None if config["sliding_window_non_causal"] else "sliding"
        everywhere = False if rule is None else None
    else:
        body, nested = config, config["dflash_config"]
        taps, mask, everywhere = nested["target_layer_ids"], nested["mask_token_id"], config.get("is_causal")
    kinds = body["layer_types"]
    sliding = [kind == "sliding_attention" for kind in kinds]
    return Reading(
        num_layers=body["num_hidden_layers"],
        num_heads=body["num_attention_heads"],
        num_kv_heads=body["num_key_value_heads"],
        head_dim=body["head_dim"],
        eps=body["rms_norm_eps"],
        rope={"rope_type": "default", **body["rope_parameters"]},
        max_positions=body["max_position_embeddings"],
        window=tuple(body["sliding_window"] if is_sliding else None for is_sliding in sliding),
        causal=tuple(is_sliding if everywhere is None else everywhere for is_sliding in sliding),
        block_size=config["block_size"],
        mask_token_id=mask,
        taps=tuple(taps),
    )


class Reference:
    """The drafter of a folder in fp32 (or on another device and type)."""

    def __init__(self, reading: Reading, weights: dict[str, Tensor]) -> None:
        self.reading, self.weights = reading, weights

    @classmethod
    def from_folder(cls, folder: Path, device: torch.device | None = None) -> Reference:
        return cls.from_config(folder, json.loads((folder / "config.json").read_text()), device)

    @classmethod
    def from_config(cls, folder: Path, config: dict, device: torch.device | None = None) -> Reference:
        """The weights of a folder, understood by a config that need not be its own."""
        reading = read_config(config)
        index = folder / "model.safetensors.index.json"
        names = ["model.safetensors"]
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        weights: dict[str, Tensor] = {}
        for name in names:
            weights |= load_file(folder / name)
        return cls(reading, {name: tensor.float().to(device or "cpu") for name, tensor in weights.items()})

    def read_as(self, **changes) -> Reference:
        """The same weights, understood differently."""
        return Reference(replace(self.reading, **changes), self.weights)

    def hidden(
        self, features: Float[Tensor, "context tap_hid"], embedded: Float[Tensor, "slot hid"]
    ) -> Float[Tensor, "slot hid"]:
        """The normed state of every slot of the block that follows `features`, which are of positions 0, 1, ..."""
        number, slots = features.shape[0], embedded.shape[0]
        positions = torch.arange(number + slots, device=features.device)
        feature = self._norm(features @ self.weights["fc.weight"].T, "hidden_norm")
        x = embedded
        for layer in range(self.reading.num_layers):
            x = x + self._attention(layer, feature, x, positions)
            y = self._norm(x, f"layers.{layer}.post_attention_layernorm")
            gate = torch.nn.functional.silu(self._project(y, layer, "mlp.gate_proj"))
            x = x + self._project(gate * self._project(y, layer, "mlp.up_proj"), layer, "mlp.down_proj")
        return self._norm(x, "norm")

    def _attention(self, layer: int, feature: Tensor, x: Tensor, positions: Int[Tensor, " all"]) -> Tensor:
        reading, number = self.reading, feature.shape[0]
        inner = self._norm(x, f"layers.{layer}.input_layernorm")
        source = torch.cat([feature, inner])  # the context is normed by hidden_norm only
        query = self._heads(inner, layer, "q", positions[number:])
        key = self._heads(source, layer, "k", positions)
        value = self._project(source, layer, "self_attn.v_proj").view(len(source), -1, reading.head_dim)
        out = torch.zeros_like(query)
        sees = visible(number, len(x), reading.window[layer], reading.causal[layer]).to(x.device)
        share = reading.num_heads // reading.num_kv_heads
        for head in range(reading.num_heads):
            score = query[:, head] @ key[:, head // share].T / math.sqrt(reading.head_dim)
            weight = score.masked_fill(~sees, -math.inf).softmax(dim=-1)
            out[:, head] = weight @ value[:, head // share]
        return self._project(out.flatten(1), layer, "self_attn.o_proj")

    def _heads(self, x: Tensor, layer: int, name: str, positions: Tensor) -> Tensor:
        """Projected, normed per head and rotated."""
        y = self._project(x, layer, f"self_attn.{name}_proj").view(len(x), -1, self.reading.head_dim)
        return rotate(self._norm(y, f"layers.{layer}.self_attn.{name}_norm"), positions, self.reading)

    def _project(self, x: Tensor, layer: int, name: str) -> Tensor:
        bias = self.weights.get(f"layers.{layer}.{name}.bias")
        y = x @ self.weights[f"layers.{layer}.{name}.weight"].T
        return y if bias is None else y + bias

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.reading.eps).sqrt() * self.weights[f"{name}.weight"]


def visible(number: int, slots: int, window: int | None, causal: bool) -> Tensor:
    """Which of `number` context tokens and `slots` slots each slot sees: one row per slot, its own position last."""
    own = torch.arange(number, number + slots)[:, None]
    key = torch.arange(number + slots)[None, :]
    sees = torch.ones(slots, number + slots, dtype=torch.bool)
    if window is not None:
        sees &= own - key < window
    return sees & (key <= own) if causal else sees


def rotate(x: Float[Tensor, "n head dim"], positions: Int[Tensor, " n"], reading: Reading) -> Tensor:
    """Rotary positions on halves: dimension i pairs with i + dim / 2."""
    frequencies, scale = rope_frequencies(reading.rope, reading.head_dim, reading.max_positions)
    angle = positions.double()[:, None] * frequencies.to(positions.device)
    cos, sin = (angle.cos() * scale)[:, None].float(), (angle.sin() * scale)[:, None].float()
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def rope_frequencies(rope: dict, dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Angle per position of each pair, in double precision, and the factor of cosine and sine."""
    base, kind = float(rope["rope_theta"]), rope["rope_type"]
    plain = base ** (-torch.arange(0, dim, 2).double() / dim)
    if kind == "default":
        return plain, 1.0
    factor = float(rope["factor"])
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "llama3":
        return _llama3(rope, plain, factor), 1.0
    if kind == "yarn":
        return _yarn(rope, plain, factor, base, dim, max_positions)
    raise ValueError(f"rope_type {kind!r} is not known to the reference; it knows default, linear, llama3, yarn")


def _llama3(rope: dict, plain: Tensor, factor: float) -> Tensor:
    """Long waves are stretched, short ones kept, those between blended (Llama 3.1)."""
    length = float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    out = plain.clone()
    for i, frequency in enumerate(plain.tolist()):
        turns = length * frequency / (2 * math.pi)  # whole waves within the original length
        if turns < low:
            out[i] = frequency / factor
        elif turns <= high:
            blend = (turns - low) / (high - low)
            out[i] = (1 - blend) * frequency / factor + blend * frequency
    return out


def _yarn(rope: dict, plain: Tensor, factor: float, base: float, dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Interpolated below `beta_slow` turns, kept above `beta_fast`, a ramp between (arXiv 2309.00071)."""
    length = float(rope.get("original_max_position_embeddings") or max_positions)
    fast, slow = float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1)

    def pair_at(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_at(fast), pair_at(slow)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last = last if last != first else last + 0.001
    ramp = ((torch.arange(dim // 2).double() - first) / (last - first)).clamp(0, 1)

    def size(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    scale = rope.get("attention_factor")
    if scale is None:
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        scale = size(float(rope["mscale"])) / size(float(rope["mscale_all_dim"])) if both else size(1.0)
    return plain / factor * ramp + plain * (1 - ramp), float(scale)
