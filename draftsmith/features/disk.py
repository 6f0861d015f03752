"""Features kept on disk: a flat file with one row per token of the prepared set, filled as training asks for them.

For repeated epochs over a small set. Samples are captured in groups of consecutive rows of the set, so the bits of a
sample do not depend on which pack asked first, nor on where a run was killed. Rows are bf16, the type a GPU target
computes in; on a CPU the rounding is 2^-9 of each value, far below the noise of training.

    manifest.json   what the rows are of, and where each sample's begin
    features.bin    the rows
    done.bin        a byte per group: 1 once its rows are on disk
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftsmith.errors import EnvironmentFault
from draftsmith.types import Features, Pack

ROWS, DONE, MANIFEST = "features.bin", "done.bin", "manifest.json"


class DiskFeatures:
    """A pack's features, from disk or captured now and kept."""

    def __init__(
        self,
        folder: Path,
        key: dict,
        lengths: Int[np.ndarray, " sample"],
        width: int,
        group_tokens: int,
        capture: Callable[[Int[np.ndarray, " doc"]], Float[Tensor, "tok tap_hid"]],
    ) -> None:
        """`capture` gives the features of some consecutive samples, at most `group_tokens` tokens of them.

        What the folder holds is used if it is of exactly this `key`; otherwise it starts empty. Raises EnvironmentFault
        if the disk cannot hold all rows.
        """
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        self.group = group_numbers(lengths, group_tokens)
        self._capture = capture
        shape = (int(self.offsets[-1]), width)
        fresh = not _holds(folder, key, shape, int(self.group[-1]) + 1)
        if fresh:
            _make_room(folder, shape)
        mode = "w+" if fresh else "r+"
        self.rows = np.memmap(folder / ROWS, np.uint16, mode, shape=shape)
        self.done = np.memmap(folder / DONE, np.uint8, mode, shape=(int(self.group[-1]) + 1,))
        if fresh:
            temporary = folder / f"{MANIFEST}.tmp"
            temporary.write_text(json.dumps({"key": key, "width": width, "offsets": self.offsets.tolist()}))
            os.replace(temporary, folder / MANIFEST)

    def __call__(self, pack: Pack) -> Features:
        context = torch.zeros(pack.tokens.shape[0], self.rows.shape[1], dtype=torch.bfloat16)
        at = 0
        for sample, length in zip(pack.samples, pack.doc_lengths, strict=True):
            if not self.done[self.group[sample]]:
                self._fill(int(self.group[sample]))
            start = self.offsets[sample]
            words = np.array(self.rows[start : start + length])
            context[at : at + length] = torch.from_numpy(words).view(torch.bfloat16)
            at += length
        return Features(context=context.to(pack.tokens.device))

    def _fill(self, number: int) -> None:
        """Capture a group and write its rows; its byte comes after them, so a killed write is done again."""
        begin, end = np.searchsorted(self.group, [number, number + 1])  # groups are consecutive
        first, last = self.offsets[begin], self.offsets[end]
        context = self._capture(np.arange(begin, end))[: last - first]
        self.rows[first:last] = context.to("cpu", torch.bfloat16).contiguous().view(torch.uint16).numpy()
        self.rows.flush()
        self.done[number] = 1
        self.done.flush()


def group_numbers(lengths: Int[np.ndarray, " sample"], group_tokens: int) -> Int[np.ndarray, " sample"]:
    """The group of each sample: consecutive ones, as many as fit."""
    groups, used = np.zeros(len(lengths), np.int64), 0
    for sample, length in enumerate(lengths.tolist()):
        new = sample > 0 and used + length > group_tokens
        groups[sample] = groups[sample - 1] + new if sample else 0
        used = length if new else used + length
    return groups


def _holds(folder: Path, key: dict, shape: tuple[int, int], num_groups: int) -> bool:
    """Whether the folder's files are of exactly this target, data and layer choice, and whole."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        sizes = (folder / ROWS).stat().st_size, (folder / DONE).stat().st_size
    except (FileNotFoundError, ValueError):  # never begun, or torn by a power loss: capture again
        return False
    return manifest["key"] == key and sizes == (shape[0] * shape[1] * 2, num_groups)


def _make_room(folder: Path, shape: tuple[int, int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    need, free = shape[0] * shape[1] * 2, shutil.disk_usage(folder).free
    if need > free:
        raise EnvironmentFault(
            f"the features of {shape[0]:,} tokens need {need / 2**30:.1f} GiB and {folder} has {free / 2**30:.1f} "
            'GiB free; free some space, or use layout = "colocated", which stores nothing'
        )
