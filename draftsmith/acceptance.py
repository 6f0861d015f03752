"""Accept length and accuracy of teacher-forced blocks, as sums and counts.

A block would be accepted up to its first wrong slot, and the target adds one bonus token, so it commits
1 + (number of leading correct slots). The slots are counted jointly: a product of per-slot accuracies would assume
independence. Only blocks whose every slot is scored count towards the accept length, since a block cut short by the
end of supervision can neither hit nor miss there: unscored is not wrong. How many blocks count is reported too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor

Agreement = Literal["equal", "near tie", "differs"]
NEAR = 0.05  # of the standard deviation of a place's logits


def block_metrics(correct: Bool[Tensor, "anc slot"], weight: Float[Tensor, "anc slot"]) -> dict[str, Tensor]:
    """Sums and counts on the device: `accept_sum / accept_count`, `hit_k / scored_k` per slot, `anchors`."""
    correct, scored = correct[:, 1:], weight[:, 1:] > 0  # slot 0 is the anchor itself
    hits = (correct & scored).int()
    whole = scored.all(dim=1)
    committed = 1 + hits.cumprod(dim=1).sum(dim=1)
    return {
        "accept_sum": (committed * whole).sum(),
        "accept_count": whole.sum(),
        "anchors": scored.any(dim=1).sum(),
        "hit_by_slot": hits.sum(dim=0),
        "scored_by_slot": scored.sum(dim=0),
    }


def near_ties(logits: Float[Tensor, "n voc"]) -> list[set[int]]:
    """At each place the tokens that are all but the greedy choice: bf16 kernels of other shapes may choose them."""
    logits = logits.float()
    near = logits >= logits.amax(-1, keepdim=True) - NEAR * logits.std(-1, keepdim=True)
    return [set(row.nonzero()[:, 0].tolist()) for row in near]


def agreement(plain: list[int], output: list[int], ties: Callable[[int], set[int]]) -> Agreement:
    """An output against the target's own. `ties` gives the near ties at a place of it; asked at the first difference
    only, since everything behind it answers another text. In fp32 there are none: there outputs must be equal."""
    first = next((i for i, (a, b) in enumerate(zip(plain, output, strict=False)) if a != b), None)
    if first is None:
        return "equal" if len(plain) == len(output) else "differs"
    return "near tie" if output[first] in ties(first) else "differs"


def told(found: list[Agreement]) -> str:
    """How many outputs are equal to the target's own."""
    return told_counts(found.count("equal"), found.count("near tie"), len(found))


def told_counts(equal: int, near: int, total: int, whose: str = "the target's") -> str:
    but = f", {near} but for a near tie" if near else ""
    return f"{equal} of {total} outputs equal to {whose}{but}"


def verdict(lossless: bool | None, near: int) -> str:
    """Of an evaluation, in a few words."""
    if lossless is None:
        return "sampled"
    if not lossless:
        return "OUTPUT DIFFERS from plain decoding"
    return "output equal to plain decoding" + (f" but for near ties in {near} answers" if near else "")
