"""Options that trade memory, launches or digits for speed: compilation, FP8, recomputation, CUDA graphs.

Checked here against the device and each other, applied to the parts of a run, and looked at again after warm-up, when
nothing may compile any more and the memory in use is compared with what `memory` had expected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from draftsmith import fp8, memory
from draftsmith.compile import CompileMarker, compile_layers, forbid_recompiling
from draftsmith.config import Recipe
from draftsmith.drafters import DRAFTERS, DFlashDrafter
from draftsmith.drafters.layers import DecoderLayer
from draftsmith.errors import EnvironmentFault, UserError
from draftsmith.ranks import Ranks
from draftsmith.targets import HFTarget, Target
from draftsmith.targets.hf import read_config, tap_ids


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What was applied, for the loop."""

    fp8_head: fp8.Head | None
    marker: CompileMarker | None
    """None: nothing is compiled."""
    expected: dict[str, int] | None
    """Bytes by part; None where memory is the host's."""
    device: torch.device
    say: Callable[[str], None]

    def warmed_up(self) -> None:
        """All shapes have been seen."""
        if self.marker:
            self.marker.record()
            forbid_recompiling()
        if self.expected:
            measured = torch.cuda.max_memory_allocated(self.device)
            self.say(
                f"GPU memory: {measured / memory.GIB:.1f} GiB at the peak of the first steps, "
                f"{sum(self.expected.values()) / memory.GIB:.1f} GiB expected"
            )


def check_speed(recipe: Recipe, device: torch.device, processes: int = 1) -> None:
    """Options that cannot work here or together, before anything is loaded. Raises UserError."""
    if recipe.optim.momentum is not None and recipe.optim.kind != "muon":
        raise UserError("optim.momentum is Muon's and has no effect with optim.kind 'adamw'; leave it out")
    asked = [name for name, on in _fp8(recipe).items() if on]
    if asked and device.type != "cuda":
        raise UserError(f"{', '.join(asked)}: {fp8.refusal(device, torch.bfloat16, {})}; turn it off")
    if recipe.target.fp8 and recipe.pipeline.target_ranks > 1:
        raise UserError("target.fp8 cannot be used with pipeline.target_ranks > 1, which splits the matrices; drop one")
    if not recipe.cuda_graph:
        return
    optim = recipe.optim
    obstacles = {
        f"device {device.type!r} has no CUDA graphs": device.type != "cuda",
        f"optim.packs_per_step is {optim.packs_per_step}, and one graph is one pack": optim.packs_per_step > 1,
        f"optim.noise is {optim.noise!r}, drawn anew for each pack": optim.noise != "none",
        f"the run has {processes} processes, whose gradients are summed between graphs": processes > 1,
        f"layout is {recipe.layout!r}, and a graph holds target and drafter together": recipe.layout != "colocated",
        "optim.kind is 'muon', whose steps read the learning rate on the host": optim.kind == "muon",
    }
    found = [reason for reason, holds in obstacles.items() if holds]
    if found:
        raise UserError(f"cuda_graph cannot be used: {'; '.join(found)}. Change that or turn cuda_graph off")


def prepare_target(recipe: Recipe, device: torch.device, target: HFTarget) -> None:
    """FP8 for the features, where the target runs. Raises UserError if a size is unfit."""
    if recipe.target.fp8:
        sizes = {"the target's hidden size": target.config.hidden_size}
        sizes["the target's FFN width"] = target.config.intermediate_size
        _refuse("target.fp8", device, target.head.dtype, sizes)
        target.capture_in_fp8()


def apply_speed(
    recipe: Recipe,
    device: torch.device,
    target: Target,
    drafter: DFlashDrafter,
    say: Callable[[str], None],
    *,
    drafters: int = 1,
) -> Speed:
    """Set up what the recipe asks for. Raises UserError if the device or a size is unfit for FP8."""
    hidden, dtype = target.config.hidden_size, target.head.dtype
    if recipe.loss.fp8:
        _refuse("loss.fp8", device, dtype, {"the hidden size": hidden, "the vocabulary": target.config.vocab_size})
    if recipe.drafter.fp8:
        config = drafter.config
        sizes = {"pack.tokens": recipe.pack.tokens, "the hidden size": hidden}
        sizes["drafter.intermediate_size"] = config.intermediate_size
        sizes["the width of the drafter's key heads"] = config.num_key_value_heads * config.head_dim
        _refuse("drafter.fp8", device, dtype, sizes)
        fp8.train_in_fp8(drafter.layers)
    for layer in drafter.layers:
        assert isinstance(layer, DecoderLayer)
        layer.recompute = recipe.recompute
    expected = None
    if device.type == "cuda":
        width = target.head.element_size()
        sizes = memory.sizes_of(recipe, drafter.config, target.config, width=width, drafters=drafters)
        memory.refuse_too_large(sizes, torch.cuda.get_device_properties(device).total_memory)
        expected = memory.breakdown(sizes)
        say(f"GPU memory: about {memory.describe(expected)} of {_total(device)}")
    return Speed(
        fp8_head=fp8.quantised_head(target.head) if recipe.loss.fp8 else None,
        marker=_compile(recipe, device, target, drafter, say),
        expected=expected,
        device=device,
        say=say,
    )


@contextmanager
def memory_faults(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    """A GPU that is full as EnvironmentFault: what was expected, and what would make it less."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError):
            raise
        reason = str(error).strip().splitlines()[0][:200]
        advice = "share the target's weights (pipeline.target_ranks), or halve pack.tokens and pack.anchors"
        if ranks.drafter is not None:
            config = read_config(recipe.target)
            taps = tap_ids(recipe.target, config, recipe.drafter.num_layers)
            drafter = DRAFTERS[recipe.drafter.kind][1](replace(recipe.drafter, mask_token_id=0), config, taps)
            width = 4 if recipe.target.dtype == "float32" or ranks.device.type == "cpu" else 2
            sizes = memory.sizes_of(recipe, drafter, config, width=width, drafters=ranks.roles.drafters)
            advice = (
                f"about {memory.describe(memory.breakdown(sizes))} were expected. What lowers that: "
                f"{memory.levers(sizes)}. recompute may change when the run goes on, the others need a new run folder"
            )
        raise EnvironmentFault(f"{ranks.name} is out of memory ({reason}); {advice}") from error


def _fp8(recipe: Recipe) -> dict[str, bool]:
    return {"target.fp8": recipe.target.fp8, "loss.fp8": recipe.loss.fp8, "drafter.fp8": recipe.drafter.fp8}


def _refuse(name: str, device: torch.device, dtype: torch.dtype, sizes: dict[str, int]) -> None:
    if reason := fp8.refusal(device, dtype, sizes):
        raise UserError(f"{name}: {reason}; turn it off")


def _compile(
    recipe: Recipe, device: torch.device, target: Target, drafter: DFlashDrafter, say: Callable[[str], None]
) -> CompileMarker | None:
    mode = recipe.compile if recipe.compile != "auto" else ("on" if device.type == "cuda" else "off")
    if mode == "off":
        return None
    facts = {
        "mode": mode,
        "pack": (recipe.pack.tokens, recipe.pack.anchors),
        "options": (recipe.recompute, *_fp8(recipe).values()),
        "drafter": drafter.config.to_json_string(),
        "target": target.config.to_json_string(),
        "versions": (torch.__version__, torch.version.cuda),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }
    marker = CompileMarker(facts)
    say(f"compiling ({mode}): {marker.expectation()}")
    compile_layers(drafter, mode)
    if device.type == "cuda":
        target.compile_layers()
    return marker


def _total(device: torch.device) -> str:
    return f"{torch.cuda.get_device_properties(device).total_memory / memory.GIB:.0f} GiB"
