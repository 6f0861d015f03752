"""What a run trains on: the rows, how often an epoch sees them, and in which packs. The same in every process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftsmith.config import DataOptions, OptimOptions, PackOptions
from draftsmith.data.loader import make_schedule
from draftsmith.data.mixture import TrainingSet, describe, make_mix, open_training_set
from draftsmith.data.modes import missing_mode
from draftsmith.data.overlap import LENGTH, describe_overlap, find_overlap
from draftsmith.data.prompts import Prompt
from draftsmith.data.template import template_arguments
from draftsmith.errors import UserError
from draftsmith.packing import Schedule

FULL = 0.8
"""Anchor slots filled to less than this, or tokens to less than 0.9, and a better density is named."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    dataset: TrainingSet
    schedule: Schedule
    fingerprint: str
    """SHA-256 over the rows, less those left out."""
    remarks: tuple[str, ...]
    """What the user should know."""
    warnings: tuple[str, ...]


def make_plan(
    data: DataOptions,
    pack: PackOptions,
    optim: OptimOptions,
    seed: int,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    report: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Open the sets, compare them with the evaluation's prompts, and lay out the run's packs.

    Raises UserError or DataError, with what to do, for data or options that cannot work.
    """
    if data.overlap == "drop" and not prompts:
        raise UserError("data.overlap is 'drop', but evaluation.prompts names no prompts to compare with")
    dataset = open_training_set(data, pack.tokens, report)
    remarks, warnings = [], []
    left_out, fingerprint = None, dataset.fingerprint
    if prompts and data.overlap != "ignore":
        found = find_overlap(dataset, prompts, tokenizer)
        if line := describe_overlap(dataset, found, len(prompts), dropped=data.overlap == "drop"):
            warnings.append(line)
        if found.short:
            remarks.append(
                f"{found.short} of {len(prompts)} evaluation prompts have less than {LENGTH} tokens and "
                "were not looked for in the training rows"
            )
        if data.overlap == "drop" and found.rows.any():
            left_out = found.rows
            fingerprint = hashlib.sha256(fingerprint.encode() + np.packbits(left_out).tobytes()).hexdigest()
    warnings += filter(None, [_other_arguments(dataset, data), missing_mode(dataset.counts["modes"])])
    schedule, num_cut = make_schedule(
        dataset,
        pack,
        cut=data.overlong == "cut",
        packs_per_step=optim.packs_per_step,
        epochs=optim.epochs,
        steps=optim.steps,
        seed=seed,
        mix=make_mix(dataset, data, left_out),
    )
    remarks += [*describe(dataset, schedule), *_fill_remark(schedule, pack)]
    split, pieces = dataset.num_split
    if split:
        remarks.append(f"{split} samples are longer than pack.tokens = {pack.tokens} and make {pieces} pieces")
    if num_cut:
        warnings.append(f"{num_cut} samples are cut to pack.tokens = {pack.tokens}")
    return Plan(
        dataset=dataset,
        schedule=schedule,
        fingerprint=fingerprint,
        remarks=tuple(remarks),
        warnings=tuple(warnings),
    )


def _other_arguments(dataset: TrainingSet, data: DataOptions) -> str:
    """What to know if prompts will be rendered with template arguments that no set was rendered with."""
    asked = template_arguments(data.enable_thinking, data.template_kwargs, "data")
    rendered = {
        part.name: part.dataset.manifest["inputs"].get("template arguments", {})
        for part in dataset.parts
        if part.dataset.manifest.get("form", "").split(" ")[0] not in ("text", "tokens")  # these are not rendered
    }
    if not rendered or asked in rendered.values():
        return ""
    name, given = next(iter(rendered.items()))
    return (
        f"{name} was rendered with the template arguments {json.dumps(given)}, but data.enable_thinking and "
        f"data.template_kwargs of this recipe say {json.dumps(asked)}, and held-out prompts, `generate` and exports "
        "follow the recipe: give it the set's"
    )


def _fill_remark(schedule: Schedule, pack: PackOptions) -> list[str]:
    """Which density would fill both budgets, if one stays rather empty while the other is full."""
    tokens, anchors = schedule.fill()
    if anchors >= FULL and tokens >= 0.9 or len(schedule.packs(0)) < 8:
        return []
    better = f"pack.anchor_density {pack.anchor_density * 0.97 * tokens / anchors:.3f}"
    if pack.anchor_density * tokens / anchors > 1:
        better = f"pack.anchors {int(pack.anchors * anchors / tokens)}"
    return [f"anchor slots are filled to {anchors:.0%}, tokens to {tokens:.0%}: {better} would fill both better"]
