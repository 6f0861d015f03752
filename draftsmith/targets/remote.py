"""A target whose blocks run in other processes: here are only its embedding and its head, which every drafter needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from draftsmith.types import Features, Pack


@dataclass(kw_only=True)
class RemoteTarget:
    """See `targets.base.Target`; what needs the blocks is done by the target ranks."""

    config: Any
    tokenizer: Any
    layer_ids: tuple[int, ...]
    eos_ids: frozenset[int]
    fingerprint: str
    table: Float[Tensor, "voc hid"]
    """The input embedding."""
    head: Float[Tensor, "voc hid"]

    def embed(self, tokens: Int[Tensor, " *n"]) -> Float[Tensor, "*n hid"]:
        return functional.embedding(tokens, self.table)

    def capture(self, pack: Pack, out: Float[Tensor, "tok tap_hid"] | None = None) -> Features:
        raise NotImplementedError("features of this target come over the wire")

    def compile_layers(self) -> None:
        """There are no layers here."""

    def new_cache(self) -> Any:
        raise NotImplementedError("a target rank decodes")

    def extend(
        self, tokens: Int[Tensor, " n"], cache: Any
    ) -> tuple[Float[Tensor, "n voc"], Float[Tensor, "n tap_hid"]]:
        raise NotImplementedError("a target rank decodes")
