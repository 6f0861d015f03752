"""Compilation, on purpose: one decoder layer at a time, all layers sharing one code object.

    off     only attention is compiled (uncompiled flex attention would compute every score)
    layer   each decoder layer, forward and backward
    on      the whole drafter; the default on a GPU, 2 % faster than `layer` there (docs/performance.md)

Shapes never change in a run, so after warm-up a new compilation is a fault: `forbid_recompiling` makes it an error.
torch keeps what it compiled on disk. A marker beside it says what was compiled there by us and how long that took, so
that a run can say what to expect.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Literal

import torch
from torch._dynamo.utils import compilation_time_metrics
from torch._inductor.runtime.cache_dir_utils import cache_dir

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


class CompileMarker:
    """What is known of an earlier compilation of the same code for the same shapes, device and versions."""

    def __init__(self, facts: dict[str, object], folder: Path | None = None) -> None:
        key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]
        self.cache = folder or Path(cache_dir())
        self.path = self.cache / "draftsmith" / f"{key}.json"
        self.before = compile_seconds()

    def expectation(self) -> str:
        """For the user, before the first step."""
        try:
            seconds = json.loads(self.path.read_text())["seconds"]
        except (OSError, ValueError, KeyError):
            return f"nothing fitting in the cache {self.cache}, so the first step takes one to two minutes longer"
        return f"the cache {self.cache} is warm; last time this took {seconds:.0f} s"

    def record(self) -> None:
        """After warm-up. A cache that cannot be written to has compiled nothing for later either."""
        text = json.dumps({"seconds": round(compile_seconds() - self.before, 1)})
        temporary = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text)
            os.replace(temporary, self.path)
        except OSError:
            return


def compile_seconds() -> float:
    """Seconds that this process has spent compiling so far, by torch's own count."""
    counted = ("_compile.compile_inner", "backward._backward_impl")
    return float(sum(sum(compilation_time_metrics.get(name, ())) for name in counted))
