"""Capture: the frozen target's features of the prepared set, once for each sample, kept on disk.

The packs here are consecutive rows of the set, so the file does not depend on a run's seed, epoch or batch shape, and
a resumed run reads the same bits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftsmith.data.loader import PackBuilder, PackOrder
from draftsmith.features.disk import DiskFeatures
from draftsmith.targets import Target


def captured_features(target: Target, builder: PackBuilder, folder: Path, device: torch.device) -> DiskFeatures:
    """Features of the builder's set: what `folder` holds already, the rest captured when a pack first asks for it."""
    key = {
        "target": target.fingerprint,
        "data": builder.dataset.fingerprint,
        "layer_ids": list(target.layer_ids),
        "dtype": str(target.head.dtype),
        "max_tokens": builder.options.tokens,
    }

    def capture(samples: Int[np.ndarray, " doc"]) -> Float[Tensor, "tok tap_hid"]:
        pack = builder.build(PackOrder(epoch=0, index=0, samples=samples), with_anchors=False)
        return target.capture(pack.to(device)).context

    return DiskFeatures(
        folder,
        key,
        np.minimum(builder.dataset.lengths, builder.options.tokens),
        len(target.layer_ids) * target.config.hidden_size,
        builder.options.tokens,
        capture,
    )
