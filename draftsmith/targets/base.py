"""What the rest of the project may ask of a frozen target."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from draftsmith.types import Features, Pack


@runtime_checkable
class Target(Protocol):
    """A frozen language model with its tokenizer. Nothing here has a gradient."""

    tokenizer: Any
    layer_ids: tuple[int, ...]
    eos_ids: frozenset[int]
    fingerprint: str
    """Depends on the config and the weights; a run refuses to resume against another target."""

    @property
    def config(self) -> Any:
        """The text model's Hugging Face config."""
        ...

    @property
    def head(self) -> Float[Tensor, "voc hid"]:
        """The output head's weight, tied to the embedding or not."""
        ...

    def embed(self, tokens: Int[Tensor, " *n"]) -> Float[Tensor, "*n hid"]:
        """The target's own input embedding."""
        ...

    def capture(self, pack: Pack, out: Float[Tensor, "tok tap_hid"] | None = None) -> Features:
        """Outputs of the tapped blocks for every token of a pack, documents isolated from each other.

        They are written into `out` if it is given.
        """
        ...

    def compile_layers(self) -> None:
        """Compile what `capture` runs."""
        ...

    def new_cache(self) -> Any:
        """An empty key-value cache for `extend`."""
        ...

    def extend(
        self, tokens: Int[Tensor, " n"], cache: Any
    ) -> tuple[Float[Tensor, "n voc"], Float[Tensor, "n tap_hid"]]:
        """Logits and features of further tokens of one document; the cache grows by n."""
        ...
