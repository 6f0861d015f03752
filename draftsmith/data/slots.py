"""A target, and a drafter, that continue many texts at once, each in a slot of a static cache.

Token t of a text lies at place t of its slot, whatever the other slots hold. So a slot whose text has ended takes the
next one at once, texts may advance by different numbers of tokens (drafts accepted here and rejected there), and what
was written beyond a text's end (a prompt's padding, rejected drafts, an idle slot) is overwritten before the mask lets
anybody see it. transformers' StaticCache writes all rows at one place and can do neither.

A step has few shapes: all slots, and a `view` of the cache, whose widths are those of `ladder`. On a GPU each is
captured as a CUDA graph when it is first met, and replayed after that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from draftsmith.drafters import DFlashDrafter
from draftsmith.errors import UserError

NAME = "draftsmith_slots"


def ladder(length: int, least: int = 16) -> int:
    """The next width at or above `length`: multiples of an eighth of the power of two below, and of `least`."""
    step = max(least, (1 << (length - 1).bit_length()) // 16)
    return -(-length // step) * step


class SlotCache:
    """Keys and values of some layers, each [slot, place, kv_head, dim]."""

    def __init__(
        self, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def empty() -> Tensor:
            return torch.zeros(slots, 0, kv_heads, head_dim, dtype=dtype, device=device)

        self.layers = [(empty(), empty()) for _ in range(layers)]

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[1]

    def write(
        self,
        layer: int,
        slot: Int[Tensor, "row 1"],
        place: Int[Tensor, "row step"],
        key: Float[Tensor, "row step kv_head dim"],
        value: Float[Tensor, "row step kv_head dim"],
    ) -> None:
        keys, values = self.layers[layer]
        keys[slot, place] = key
        values[slot, place] = value

    def read(
        self, layer: int, view: int
    ) -> tuple[Float[Tensor, "slot view kv_head dim"], Float[Tensor, "slot view kv_head dim"]]:
        keys, values = self.layers[layer]
        return keys[:, :view], values[:, :view]

    def lengthen(self, length: int) -> None:
        more = length - self.length
        self._replace(lambda kept: torch.nn.functional.pad(kept, (0, 0, 0, 0, 0, more)))

    def keep(self, slots: list[int]) -> None:
        """From now on there are only these, renumbered."""
        self._replace(lambda kept: kept[slots])

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        """One by one, so that no more than one layer is there twice."""
        for number, (keys, values) in enumerate(self.layers):
            self.layers[number] = (change(keys), change(values))


class Replayed:
    """A function of tensors of few shapes (and a number), each captured as a CUDA graph when first met.

    The result is overwritten by the next call.
    """

    def __init__(self, function: Callable, on: bool) -> None:
        self.function, self.on = function, on
        self._graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]]] = {}

    def __call__(self, view: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        if not self.on:
            return self.function(view, *inputs)
        kind = (view, *(one.shape for one in inputs))
        if kind not in self._graphs:
            self._graphs[kind] = self._capture(view, [one.clone() for one in inputs])
        graph, fixed, outputs = self._graphs[kind]
        for place, given in zip(fixed, inputs, strict=True):
            place.copy_(given)
        graph.replay()
        return outputs

    def forget(self) -> None:
        """The tensors that the function reads or writes lie elsewhere now."""
        self._graphs.clear()

    def _capture(self, view: int, fixed: list[Tensor]) -> tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # once as it is: libraries choose their kernels and workspaces
            self.function(view, *fixed)
        torch.cuda.current_stream().wait_stream(stream)
        pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            outputs = self.function(view, *fixed)
        return graph, fixed, outputs


class SlotTarget:
    """The target over a `SlotCache`. Passes for a cache where transformers expects one (`update`)."""

    def __init__(self, model: PreTrainedModel, slots: int, taps: list[int], graphs: bool) -> None:
        """`taps`: blocks whose outputs are a drafter's features. UserError for a target that is not full attention."""
        config: Any = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise UserError(
                f"the target has layers of the kind {', '.join(sorted(kinds - {'full_attention'}))}, and answers here "
                "need full attention in all; serve it, and give the address as regenerate.servers"
            )
        self.head: Any = model.get_output_embeddings()
        weight = self.head.weight
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads: int = config.num_key_value_heads
        self.model, self.taps, self.slots, self.device = model, taps, slots, weight.device
        self.group = config.num_attention_heads // kv_heads
        self.cache = SlotCache(config.num_hidden_layers, slots, kv_heads, head_dim, weight.dtype, weight.device)
        self._cache_name = "cache" if "cache" in inspect.signature(type(model.model).forward).parameters else None
        moving = (getattr(config, "rope_parameters", None) or {}).get("rope_type") in ("dynamic", "longrope")
        self.replayed = Replayed(self._step, graphs and not moving)  # these read positions back to choose frequencies
        self._slot = self._place = torch.empty(0)
        self._view: int | None = None

    def step(
        self, view: int, tokens: Int[Tensor, "slot step"], place: Int[Tensor, "slot step"]
    ) -> tuple[Float[Tensor, "slot step voc"], Float[Tensor, "slot step tap_hid"]]:
        """Logits and features of the next tokens of all slots; no place may reach `view`."""
        logits, features = self.replayed(view, tokens, place)
        return logits, features

    def _step(self, view: int, tokens: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        sees = torch.arange(view, device=place.device) <= place[..., None]
        self._slot, self._place, self._view = torch.arange(len(place), device=place.device)[:, None], place, view
        hidden, features = self._forward(tokens, place, sees.repeat(1, self.group, 1)[:, None])
        return self.head(hidden), features

    def prefill(
        self, slot: Int[Tensor, " row"], tokens: Int[Tensor, "row width"], length: Int[Tensor, " row"]
    ) -> tuple[Float[Tensor, "row voc"], Float[Tensor, "row width tap_hid"]]:
        """Begin texts in some slots, padded behind `length`: logits of their last tokens, features of all."""
        place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        self._slot, self._place, self._view = slot[:, None], place, None
        hidden, features = self._forward(tokens, place, None)
        return self.head(hidden[torch.arange(len(length), device=length.device), length - 1]), features

    def _forward(self, tokens: Tensor, place: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        decoder, tapped = self.model.model, {}
        hooks = [
            decoder.layers[number].register_forward_hook(lambda *given, at=number: tapped.update({at: given[-1]}))
            for number in self.taps
        ]
        try:
            out = decoder(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=place,
                use_cache=True,
                **{self._cache_name or "past_key_values": self},
            )
        finally:
            for hook in hooks:
                hook.remove()
        hidden = out.last_hidden_state
        features = [tapped[number] for number in self.taps] or [hidden[..., :0]]
        return hidden, torch.cat(features, dim=-1)

    def update(self, key: Tensor, value: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Called by every attention layer: keep these, and give what the mask is about."""
        self.cache.write(layer, self._slot, self._place, key.transpose(1, 2), value.transpose(1, 2))
        if self._view is None:
            return key, value
        keys, values = self.cache.read(layer, self._view)
        return keys.transpose(1, 2), values.transpose(1, 2)


class SlotDrafter:
    """A drafter over a `SlotCache` of context keys and values; a block's own are never kept."""

    def __init__(self, drafter: DFlashDrafter, model: PreTrainedModel, slots: int, graphs: bool) -> None:
        config: Any = drafter.config
        self.drafter, self.block_size = drafter, config.block_size
        self.table: Any = model.get_input_embeddings()
        self.head: Any = model.get_output_embeddings()
        self.cache = SlotCache(
            config.num_hidden_layers, slots, config.num_key_value_heads, config.head_dim, drafter.dtype, drafter.device
        )
        self.kinds = sorted(set(config.kinds))
        self.replayed = Replayed(self._propose, graphs)

    def add(
        self,
        slot: Int[Tensor, " row"],
        place: Int[Tensor, "row step"],
        features: Float[Tensor, "row step tap_hid"],
    ) -> None:
        """Context of more tokens; what is beyond the accepted ones is overwritten by the next call."""
        added = self.drafter.project(features.flatten(0, 1).to(self.drafter.dtype), place.flatten())
        for layer, (key, value) in enumerate(added):
            key, value = (part.unflatten(0, tuple(place.shape)) for part in (key, value))
            self.cache.write(layer, slot[:, None], place, key, value)

    def propose(
        self,
        view: int,
        anchor: Int[Tensor, "slot 1"],
        start: Int[np.ndarray, " slot"],
        place: Int[Tensor, "slot block"],
    ) -> Float[Tensor, "slot drafted voc"]:
        """Logits for the places behind the anchors, which stand at `start`."""
        masks = self.drafter.row_masks(start, view)
        (logits,) = self.replayed(view, anchor, place, *(masks[kind] for kind in self.kinds))
        return logits

    def _propose(self, view: int, anchor: Tensor, place: Tensor, *masks: Tensor) -> tuple[Tensor]:
        tokens = torch.full_like(place, self.drafter.config.mask_token_id)
        tokens[:, :1] = anchor
        context = [self.cache.read(layer, view) for layer in range(len(self.cache.layers))]
        embedded = self.table(tokens).to(self.drafter.dtype)
        named = dict(zip(self.kinds, masks, strict=True))
        hidden = self.drafter.propose_rows(context, embedded, place, named)
        return (self.head(hidden.to(self.head.weight.dtype)),)


def slot_attention(module, query, key, value, attention_mask, scaling=None, **_):
    """transformers' interface. Without a mask a prefill, causal; otherwise the query heads that share a key head are
    further queries, as the mask expects, so that keys and values are never repeated."""
    if attention_mask is None:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    else:
        folded = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
        out = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
        out = out.reshape(*query.shape[:-1], -1)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, slot_attention)


@contextmanager
def attending_by_slots(model: PreTrainedModel) -> Iterator[None]:
    """The model's attention is `slot_attention` meanwhile."""
    usual = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        with torch.inference_mode():
            yield
    finally:
        model.config._attn_implementation = usual
