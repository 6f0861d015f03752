"""Capture: run the frozen target once over the prepared set and keep the features on disk.

The packs here are consecutive rows of the set, so the file does not depend on a run's seed, epoch or batch shape, and
a resumed run reads the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from draftsmith.data.loader import PackBuilder, PackOrder
from draftsmith.features import disk
from draftsmith.targets import Target
from draftsmith.types import Pack


def capture_features(
    target: Target, builder: PackBuilder, folder: Path, device: torch.device, report: Callable[[int, int], None]
) -> disk.DiskFeatures:
    """Features of every sample of the builder's set, captured now unless the folder already holds exactly these."""
    lengths = np.minimum(builder.dataset.lengths, builder.options.tokens)
    key = {
        "target": target.fingerprint,
        "data": builder.dataset.fingerprint,
        "layer_ids": list(target.layer_ids),
        "dtype": str(target.head.dtype),
        "max_tokens": builder.options.tokens,
    }
    if not disk.is_complete(folder, key):
        width = len(target.layer_ids) * target.config.hidden_size
        disk.write(folder, key, lengths, width, _captured(target, builder, lengths, device), report)
    return disk.DiskFeatures(folder, key)


def _captured(
    target: Target, builder: PackBuilder, lengths, device: torch.device
) -> Iterator[tuple[Pack, Float[Tensor, "tok tap_hid"]]]:
    first, budget = 0, builder.options.tokens
    while first < len(lengths):
        last, used = first, 0
        while last < len(lengths) and used + lengths[last] <= budget:
            used += lengths[last]
            last += 1
        pack = builder.build(PackOrder(epoch=0, index=0, samples=np.arange(first, last)), with_anchors=False)
        yield pack, target.capture(pack.to(device)).context
        first = last
