"""What a number or a place may be, whichever verb it is given to. No torch here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

from draftsmith.errors import UserError

RULES: dict[str, tuple[Callable[[float], bool], str]] = {
    "greater than 0": (
        lambda value: value > 0,
        "pack.tokens pack.anchors pack.anchors_per_document pack.anchor_density pack.window drafter.num_layers "
        "loss.gamma loss.chunk optim.lr optim.eps optim.clip optim.epochs optim.steps optim.packs_per_step "
        "optim.max_skipped log.every checkpoint.every evaluation.every evaluation.limit evaluation.max_new_tokens "
        "max_new_tokens limit memory_gib pipeline.processes pipeline.queue_depth pipeline.hang_seconds",
    ),
    "0 or more": (
        lambda value: 0 <= value < math.inf,
        "data.workers loss.topk optim.weight_decay optim.noise_scale pipeline.max_restarts pipeline.trace "
        "evaluation.temperature evaluation.top_k temperature top_k rows recorded_prompts check_target",
    ),
    "from 0 to 1": (lambda value: 0 <= value <= 1, "optim.warmup optim.min_lr"),
    "at least 0 and less than 1": (lambda value: 0 <= value < 1, "optim.betas optim.momentum"),
    "greater than 0 and at most 1": (lambda value: 0 < value <= 1, "evaluation.top_p top_p"),
}
"""What is allowed, as it is said and as it is tested, and the options it holds for. A nan passes no test."""

PLACES = "run init output html to folder drafter cache engines figures rescore data.cache".split()
PLACES += ["regenerate.output", "regenerate.drafter"]
"""Options that name a file or folder of this machine."""
URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def check_options(options: object) -> None:
    """Raise UserError if a number of a recipe or command is out of its range, or a place is a URL."""
    given = dict(_named(options))
    for said, (holds, names) in RULES.items():
        for name in names.split():
            values = given.get(name)
            for value in values if isinstance(values, tuple) else (values,):
                if value is not None and not holds(value):
                    raise UserError(f"{name} is {value}; it must be {said}")
    for name in PLACES:
        if URL.match(str(given.get(name, ""))):
            raise UserError(
                f"{name} is {given[name]!r}, a URL; it must be a place on this machine (copy or sync it yourself: only "
                "data.conversations, data.prepared, data.mix and prompts are read from URLs)"
            )


def _named(options: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in vars(options).items():
        if is_dataclass(value):
            yield from _named(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
