"""Accept length and accuracy of teacher-forced blocks, as sums and counts.

A block would be accepted up to its first wrong slot, and the target adds one bonus token, so it commits
1 + (number of leading correct slots). The slots are counted jointly: a product of per-slot accuracies would assume
independence. Only blocks whose every slot is scored count towards the accept length, since a block cut short by the
end of supervision can neither hit nor miss there: unscored is not wrong. How many blocks count is reported too.
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor


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
