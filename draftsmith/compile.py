"""Compilation, on purpose: one decoder layer at a time, all layers sharing one code object.

    off     only attention is compiled (uncompiled flex attention would compute every score)
    layer   each decoder layer, forward and backward
    on      the whole drafter; the default on a GPU, 2 % faster than `layer` there (docs/performance.md)

Shapes never change in a run, so after warm-up a new compilation is a fault: `forbid_recompiling` makes it an error.
"""

from __future__ import annotations

from typing import Literal

import torch

from draftsmith.drafters import DFlashDrafter


def compile_layers(drafter: DFlashDrafter, mode: Literal["off", "layer", "on"] | str) -> None:
    """Compile the drafter in place; parameter names stay as they are."""
    if mode == "layer":
        for layer in drafter.layers:
            layer.compile(dynamic=False, fullgraph=True)
    elif mode == "on":
        drafter.compile(dynamic=False, fullgraph=True)


def forbid_recompiling() -> None:
    """From now on a shape or a constant that was not seen before is an error, not a slow step."""
    torch.compiler.set_stance("fail_on_recompile")


def allow_compiling() -> None:
    torch.compiler.set_stance("default")
