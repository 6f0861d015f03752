"""An evaluation as files: figures with intervals, counts, hashes and versions, and samples that can be scored again.

results.json     figures; what was measured on what, by which versions
samples.jsonl    one object per prompt: its tokens, the answer, the tokens committed by each cycle
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from draftsmith.errors import EnvironmentFault
from draftsmith.evaluate import Case, Evaluation
from draftsmith.export.folder import measure

DRAWS = 2000


def bootstrap(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean, by resampling with a fixed seed; None for fewer than two values."""
    if len(values) < 2:
        return None
    rows = np.random.default_rng(0).integers(0, len(values), (DRAWS, len(values)))
    means = np.asarray(values)[rows].mean(axis=1)
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def wilson(hits: int, count: int) -> tuple[float, float] | None:
    """95 % interval of a share (Wilson, 1927); None without observations."""
    if not count:
        return None
    z, share = 1.96, hits / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def intervals(cases: list[Case], result: Evaluation, block_size: int) -> dict:
    """The figures with their intervals and counts."""
    pairs = [(c, a.accept_length) for c, a in zip(cases, result.answers, strict=True) if a.accept_length is not None]
    tags = sorted({tag for case, _ in pairs for tag in case.prompt.tags})
    drafts = [d for a in result.answers for d in zip(a.accepted, a.offered, strict=True)]

    def figure(values: list[float]) -> dict:
        return {"value": sum(values) / max(1, len(values)), "interval": bootstrap(values), "count": len(values)}

    def slot_figure(slot: int) -> dict:
        offered = sum(offered >= slot for _, offered in drafts)
        hits = sum(accepted >= slot for accepted, _ in drafts)
        return {"value": hits / max(1, offered), "interval": wilson(hits, offered), "count": offered}

    return {
        "accept_length": figure([length for _, length in pairs]),
        "accept_length_pooled": result.accept_length_pooled,
        "by_tag": {tag: figure([length for case, length in pairs if tag in case.prompt.tags]) for tag in tags},
        "by_slot": [slot_figure(slot) for slot in range(1, block_size)],
        "lossless": result.lossless,
        "num_equal": result.num_equal,
        "prompts": result.prompts,
        "tokens": result.tokens,
        "cycles": sum(len(answer.cycles) for answer in result.answers),
    }


def write_evaluation(folder: Path, cases: list[Case], result: Evaluation, report: dict, prompts: Path) -> None:
    """Write both files. Raises EnvironmentFault when the disk fails."""
    samples = [
        {
            "id": case.prompt.id,
            "tags": list(case.prompt.tags),
            "prompt_tokens": case.tokens.tolist(),
            "tokens": answer.tokens,
            "cycles": answer.cycles,
            "offered": answer.offered,
            "accepted": answer.accepted,
            "equal": None if case.plain is None else case.plain == answer.tokens,
        }
        for case, answer in zip(cases, result.answers, strict=True)
    ]
    report = report | {"prompts_file": {"name": prompts.name, **measure(prompts)}}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / "samples.jsonl", "".join(json.dumps(sample) + "\n" for sample in samples))
        _replace(folder / "results.json", json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise EnvironmentFault(f"the evaluation could not be written to {folder}: {error}") from error


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
