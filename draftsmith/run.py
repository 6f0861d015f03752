"""A run's folder: what it holds, who may write to it, and how a run continues.

    RUN/recipe.toml      the resolved recipe; runs as it is
    RUN/metrics.jsonl    the truth about training: one object a line
    RUN/ledger.jsonl     the samples of every step
    RUN/checkpoints/     see `checkpoint`
    RUN/results.json     written at the end

The same command in the same folder continues the run. Another recipe is refused, with the difference; so are other
data, another target or another tokenizer. Where those lie does not matter: fingerprints say whether they are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from draftsmith import __version__, checkpoint
from draftsmith.checkpoint import Checkpoint
from draftsmith.config import Recipe, flatten, to_toml
from draftsmith.errors import EnvironmentFault, UserError
from draftsmith.ledger import Ledger
from draftsmith.telemetry import MetricsFile

# What may differ when a run is continued: nothing here decides a weight.
FREE = (
    "at_end",
    "layout",
    "run",
    "device",
    "compile",
    "recompute",
    "cuda_graph",
    "evaluation.",
    "checkpoint.",
    "log.",
    "regenerate.",
    *(
        f"pipeline.{name}"
        for name in ("processes", "targets", "drafters", "target_ranks", "queue_depth", "max_restarts", "hang", "trace")
    ),
    "data.workers",
    "data.conversations",
)
GUARDED = ("target.path", "target.revision", "target.trust_remote_code", "data.")
"""May differ too: the fingerprints of target, data and tokenizer tell whether what lies there is the same."""
NOT_GUARDED = ("data.mix", "data.caps", "data.overlong", "data.split_context")
"""What `train` itself does with the data. Of data.mix the weights; its folders have fingerprints."""
DECISIVE_VERSIONS = ("draftsmith", "torch", "transformers")
MAX_FAILED_SAVES = 3


class RunFolder:
    """The open folder of one run. Opening it fences every earlier process that wrote to it."""

    def __init__(self, recipe: Recipe, fingerprints: dict[str, str], warn: Callable[[str], None]) -> None:
        """Raises UserError if the folder belongs to another recipe, data set, target or tokenizer."""
        self.path = Path(recipe.run)
        self.recipe = recipe
        self.fingerprints = fingerprints
        self.checkpoints = self.path / "checkpoints"
        self._warn = warn
        self._failed_saves = 0
        self._verified: set[str] = set()
        """Checkpoints that this process has written or read, every byte of them."""
        refuse_other_recipe(recipe)
        self.generation = checkpoint.claim(self.path)
        _replace_text(self.path / "recipe.toml", to_toml(recipe))
        self.last = checkpoint.newest_valid(self.checkpoints, report=warn)
        if self.last is None and any(self.checkpoints.glob("step-*")):
            raise UserError(
                f"none of the checkpoints in {self.checkpoints} is intact (see the warnings); restore one, or move the "
                "folder away to begin anew"
            )
        if self.last:
            self._verified.add(self.last.path.name)
            self._refuse_other_checkpoint(self.last)
            self._refuse_other_inputs(self.last.facts["fingerprints"])
            self._compare_versions(self.last.facts.get("versions", {}))
        self.step = self.last.step if self.last else 0
        ledger = self.path / "ledger.jsonl"
        self.ledger = (
            Ledger.resume(ledger, self.step, self.last.facts["ledger"], warn=warn)
            if self.last
            else Ledger(ledger, warn=warn)
        )
        self.metrics = MetricsFile(self.path / "metrics.jsonl", step=self.step if self.last else -1, warn=warn)

    @property
    def run_id(self) -> str:
        """As the checkpoints have it; at first it follows from what decides the weights."""
        if self.last:
            return self.last.run_id
        return hashlib.sha256(json.dumps(decisive(flat(self.recipe)), sort_keys=True).encode()).hexdigest()[:16]

    def record_step(self, step: int, lane: Sequence[tuple[int, int]], sample_ids: Sequence[str]) -> None:
        """Add a step to the ledger. Raises Superseded when another process owns the run by now."""
        checkpoint.check_generation(self.path, self.generation)  # before each line: two writers would spoil the ledger
        self.ledger.append(step, lane[0][0], [index for _, index in lane], sample_ids)

    def save(
        self, step: int, model: dict[str, Tensor], optimizer: dict[str, Tensor], config: str, facts: dict, *, last: bool
    ) -> str | None:
        """Write a checkpoint and prune old ones; returns its name.

        A full or broken disk is a warning (None is returned, the previous checkpoint is intact) until it happens
        three times in a row or at the end of the run; then it raises EnvironmentFault.
        """
        checkpoint.check_generation(self.path, self.generation)
        try:
            self.ledger.sync()
            path = checkpoint.save(
                self.checkpoints,
                step=step,
                run_id=self.run_id,
                generation=self.generation,
                tensors={"model": model, "optimizer": optimizer},
                documents={"config.json": config, "recipe.toml": to_toml(self.recipe)},
                facts={**facts, "ledger": self.ledger.hash, "fingerprints": self.fingerprints, "versions": versions()},
            )
        except EnvironmentFault as error:
            self._failed_saves += 1
            if last or self._failed_saves >= MAX_FAILED_SAVES:
                raise
            self._warn(f"{str(error).rstrip('.')}. Training goes on.")
            return None
        self._failed_saves = 0
        self._verified.add(path.name)
        best, keep = facts.get("best"), self.recipe.checkpoint.keep
        kept = best["checkpoint"] if best else None
        checkpoint.prune(self.checkpoints, keep, kept, run_id=self.run_id, verified=self._verified)
        return path.name

    def write_results(self, results: dict) -> None:
        _replace_text(self.path / "results.json", json.dumps(results, indent=2) + "\n")

    def close(self) -> None:
        self.ledger.close()
        self.metrics.close()

    def _refuse_other_checkpoint(self, last: Checkpoint) -> None:
        """The folder's recipe may have been edited since, or the checkpoint be of another run."""
        before = tomllib.loads(last.document("recipe.toml"))
        if lines := differences(flatten(before), flat(self.recipe)):
            raise UserError(
                f"checkpoint {last.path} was trained with another recipe ({lines}); continue with its values or choose "
                "another run folder"
            )

    def _refuse_other_inputs(self, before: dict[str, str]) -> None:
        changed = [name for name, value in self.fingerprints.items() if before.get(name, value) != value]
        if changed:
            raise UserError(
                f"run folder {self.path} was trained with another {' and '.join(changed)} than this recipe finds now; "
                "restore the former or choose another run folder"
            )

    def _compare_versions(self, before: dict[str, str]) -> None:
        now = versions()
        names = [name for name in DECISIVE_VERSIONS if before.get(name, now[name]) != now[name]]
        if names:
            lines = ", ".join(f"{name} {before[name]}, now {now[name]}" for name in names)
            self._warn(f"the last checkpoint was made with {lines}: the same steps may round differently from here on")


def refuse_other_recipe(recipe: Recipe) -> None:
    """Raise UserError, with the difference, if the run folder belongs to another recipe or is not a run's."""
    if not recipe.run:
        raise UserError("run is not given; set it to the folder that shall hold the run, for example runs/first")
    folder = Path(recipe.run)
    known = folder / "recipe.toml"
    if not known.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise UserError(f"run folder {folder} is not empty and holds no recipe.toml; choose another folder")
        return
    try:
        before = flatten(tomllib.loads(known.read_text()))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{known} is damaged ({error}); restore it or choose another run folder") from error
    if lines := differences(before, flat(recipe)):
        raise UserError(
            f"run folder {folder} belongs to another recipe ({lines}); choose another run folder, or continue that "
            f"run with: draftsmith train {known}"
        )


def flat(recipe: Recipe) -> dict[str, Any]:
    """All options of a recipe, as its TOML has them."""
    return flatten(tomllib.loads(to_toml(recipe)))


def agreed(options: dict[str, Any]) -> dict[str, Any]:
    """The options in which all processes of a run agree: those that decide a weight, and where the inputs lie."""
    return {name: value for name, value in options.items() if not name.startswith(FREE)}


def decisive(options: dict[str, Any]) -> dict[str, Any]:
    """The options that decide the weights. One that an earlier release did not have has its default."""
    options = agreed(flat(Recipe()) | options)
    options["data.mix"] = [_weight(text) for text in options["data.mix"]]
    return {name: value for name, value in options.items() if name in NOT_GUARDED or not name.startswith(GUARDED)}


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What decides weights and differs between the options of two recipes; empty if nothing does."""
    before, now = decisive(before), decisive(now)
    differing = sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
    return "; ".join(f"{name}: {before.get(name, 'unset')} there, {now.get(name, 'unset')} here" for name in differing)


def _weight(text: str) -> float:
    """Of FOLDER or FOLDER=WEIGHT."""
    try:
        return float(text.rpartition("=")[2])
    except ValueError:
        return 1.0


def find_checkpoint(run: Path, name: str, warn: Callable[[str], None]) -> Checkpoint:
    """The checkpoint that `best`, `last` or a folder name means. Raises UserError if there is none."""
    folder = run / "checkpoints"
    if name in ("best", "last"):
        last = checkpoint.newest_valid(folder, report=warn)
        if last is None:
            raise UserError(f"{run} holds no valid checkpoint; train first: draftsmith train RECIPE --run {run}")
        best = last.facts.get("best")
        return checkpoint.load(folder / best["checkpoint"]) if name == "best" and best else last
    known = sorted(path.name for path in folder.glob("step-*"))
    if name not in known:
        raise UserError(
            f"checkpoint {name!r} is not in {run}; there are: best, last, {', '.join(known) or 'no others'}"
        )
    return checkpoint.load(folder / name)


def versions() -> dict[str, str]:
    return {
        "draftsmith": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "platform": sys.platform,
    }


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
