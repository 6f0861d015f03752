"""Features captured once and read back: a flat file with one row per token of the prepared set, and a manifest.

For repeated epochs over a small set. 8-bit or 16-bit words only: rows are bf16, the type a GPU target computes in; on
a CPU the rounding is 2^-9 of each value, far below the noise of training.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftsmith.errors import EnvironmentFault
from draftsmith.types import Features, Pack

ROWS, MANIFEST = "features.bin", "manifest.json"


class DiskFeatures:
    """Reads packs' features from a folder that `write` filled. `key` must be what it was filled for."""

    def __init__(self, folder: Path, key: dict) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        assert manifest["key"] == key, "the caller checks `is_complete` first"
        self.offsets = np.asarray(manifest["offsets"], np.int64)
        self.rows = _map_rows(folder / ROWS, int(self.offsets[-1]), manifest["width"], "r")

    def __call__(self, pack: Pack) -> Features:
        context = torch.zeros(pack.tokens.shape[0], self.rows.shape[1], dtype=torch.bfloat16)
        at = 0
        for sample, length in zip(pack.samples, pack.doc_lengths, strict=True):
            start = self.offsets[sample]
            context[at : at + length] = _as_bf16(self.rows[start : start + length])
            at += length
        return Features(context=context.to(pack.tokens.device))


def is_complete(folder: Path, key: dict) -> bool:
    """Whether the folder holds all features of exactly this target, data and layer choice."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        size = (folder / ROWS).stat().st_size
    except (FileNotFoundError, ValueError):  # never finished, or torn by a power loss: capture again
        return False
    return manifest["key"] == key and size == manifest["offsets"][-1] * manifest["width"] * 2


def write(
    folder: Path,
    key: dict,
    lengths: Int[np.ndarray, " sample"],
    width: int,
    captured: Iterator[tuple[Pack, Float[Tensor, "tok tap_hid"]]],
    report: Callable[[int, int], None],
) -> None:
    """Fill the folder from captured packs; the manifest comes last, so a killed capture does not look like a whole one.

    Raises EnvironmentFault, before anything is computed, if the disk cannot hold the rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    need, free = int(offsets[-1]) * width * 2, shutil.disk_usage(folder).free
    if need > free:
        raise EnvironmentFault(
            f"the features of {offsets[-1]:,} tokens need {need / 2**30:.1f} GiB and {folder} has {free / 2**30:.1f} "
            'GiB free; free some space, or use layout = "colocated", which stores nothing'
        )
    rows = _map_rows(folder / ROWS, int(offsets[-1]), width, "w+")
    for pack, context in captured:
        at = 0
        for sample, length in zip(pack.samples, pack.doc_lengths, strict=True):
            words = context[at : at + length].to("cpu", torch.bfloat16).contiguous().view(torch.uint16)
            rows[offsets[sample] : offsets[sample] + length] = words.numpy()
            at += length
        report(pack.samples[-1] + 1, len(lengths))
    rows.flush()
    del rows
    temporary = folder / f"{MANIFEST}.tmp"
    temporary.write_text(json.dumps({"key": key, "width": width, "offsets": offsets.tolist()}))
    os.replace(temporary, folder / MANIFEST)


def _map_rows(path: Path, num_rows: int, width: int, mode) -> np.memmap:
    return np.memmap(path, np.uint16, mode, shape=(num_rows, width))


def _as_bf16(words: np.ndarray) -> Float[Tensor, "n tap_hid"]:
    return torch.from_numpy(np.array(words)).view(torch.bfloat16)
