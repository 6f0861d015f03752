"""An evaluation as files: figures with intervals, counts, hashes and versions, and samples that can be scored again.

results.json     by suite: figures, source, speed; then what was measured with what, by which versions
samples.jsonl    one object per answer: its suite, tags, tokens, and by cycle what was offered, accepted, committed

Every figure but the speed is a function of the samples (`score`), and `rescore` computes it again from the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from draftsmith.acceptance import Agreement
from draftsmith.decode import Decoded
from draftsmith.errors import DataError, EnvironmentFault, UserError
from draftsmith.evaluate import Case

DRAWS = 2000
BUCKET = 2048  # positions of the first bucket of `by_context`; the others double
LATER = ("by_context", "num_near_ties")  # figures that evaluations of earlier releases lack
CYCLES = ("cycles", "offered", "accepted")


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


def sample_of(suite: str, case: Case, answer: Decoded, agreed: Agreement | None) -> dict:
    """An answer as a line of samples.jsonl."""
    return {
        "suite": suite,
        "id": case.prompt.id,
        "tags": list(case.prompt.tags),
        "prompt_tokens": case.tokens.tolist(),
        "tokens": answer.tokens,
        "cycles": answer.cycles,
        "offered": answer.offered,
        "accepted": answer.accepted,
        "equal": None if agreed is None else agreed == "equal",
        "near_tie": agreed == "near tie",
    }


def score(samples: list[dict], block_size: int) -> dict:
    """The figures of one suite's samples, with intervals and counts."""
    pairs = [(s["tags"], sum(s["cycles"]) / len(s["cycles"])) for s in samples if s["cycles"]]
    cycles = [committed for s in samples for committed in s["cycles"]]
    drafts = [pair for s in samples for pair in zip(s["accepted"], s["offered"], strict=True)]
    known = [s["equal"] for s in samples if s["equal"] is not None]
    near = [bool(s.get("near_tie")) for s in samples if s["equal"] is not None]

    def figure(values: list[float]) -> dict:
        return {
            "value": sum(values) / max(1, len(values)),
            "interval": _listed(bootstrap(values)),
            "count": len(values),
        }

    def slot_figure(slot: int) -> dict:
        offered = sum(offered >= slot for _, offered in drafts)
        hits = sum(accepted >= slot for accepted, _ in drafts)
        return {"value": hits / max(1, offered), "interval": _listed(wilson(hits, offered)), "count": offered}

    return {
        "accept_length": figure([length for _, length in pairs]),
        "accept_length_pooled": sum(cycles) / max(1, len(cycles)),
        "by_tag": {
            tag: figure([length for tags, length in pairs if tag in tags])
            for tag in sorted({tag for tags, _ in pairs for tag in tags})
        },
        "by_context": by_context(samples),
        "by_slot": [slot_figure(slot) for slot in range(1, block_size)],
        "lossless": all(one or other for one, other in zip(known, near, strict=True)) if known else None,
        "num_equal": sum(known),
        "num_near_ties": sum(near),
        "answers": len(samples),
        "tokens": sum(len(s["tokens"]) for s in samples),
        "cycles": len(cycles),
    }


def by_context(samples: list[dict]) -> dict[str, dict]:
    """Accept length, pooled, by how long prompt and answer were when a cycle began: 0-2k, 2k-4k, 4k-8k, ..."""
    found: dict[int, list[int]] = {}
    for sample in samples:
        place = len(sample["prompt_tokens"])  # the anchor: prefill's token, which no cycle commits
        for committed in sample["cycles"]:
            found.setdefault((place // BUCKET).bit_length(), []).append(committed)
            place += committed
    thousands = BUCKET // 1024

    def name(bucket: int) -> str:
        low = f"{thousands << (bucket - 1)}k" if bucket else "0"
        return f"{low}-{thousands << bucket}k"

    return {
        name(bucket): {"value": sum(cycles) / len(cycles), "count": len(cycles)}
        for bucket, cycles in sorted(found.items())
    }


def _listed(interval: tuple[float, float] | None) -> list[float] | None:
    """As JSON gives it back."""
    return None if interval is None else [*interval]


def write_evaluation(folder: Path, report: dict, samples: list[dict]) -> None:
    """Write both files. Raises EnvironmentFault when the disk fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / "samples.jsonl", "".join(json.dumps(sample) + "\n" for sample in samples))
        _replace(folder / "results.json", json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise EnvironmentFault(f"the evaluation could not be written to {folder}: {error}") from error


def rescore(folder: Path) -> tuple[dict, dict[str, dict]]:
    """results.json of an evaluation, and the figures by suite as its samples give them now.

    Raises UserError for a folder that is no evaluation, DataError naming the line of a sample that cannot be used.
    """
    try:
        report = json.loads((folder / "results.json").read_text())
        block_size, names = report["block_size"], list(report["suites"])
        lines = (folder / "samples.jsonl").read_text().splitlines()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} holds no evaluation (results.json and samples.jsonl): {error!r}") from error
    samples: dict[str, list[dict]] = {name: [] for name in names}
    for number, line in enumerate(lines, 1):
        try:
            sample = json.loads(line)
            if len({len(sample[key]) for key in CYCLES}) != 1 or len(sample["tokens"]) != 1 + sum(sample["cycles"]):
                raise ValueError("its cycles do not give its tokens")
            samples[sample["suite"]].append(sample)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{folder / 'samples.jsonl'}, line {number}: no sample of this evaluation ({error})"
            ) from error
    return report, {name: score(found, block_size) for name, found in samples.items()}


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
