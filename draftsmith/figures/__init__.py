"""Seconds and bytes per second measured on one machine, as `plan` uses them: the package's own, or the user's file.

A file has the form of the benchmarks' results. A row names its `stage`: target, drafter (seconds a pack), optimizer
(seconds a step), "send within a host", "sum within a host", "send between hosts" (bytes_per_s, latency). Seconds with
a `target` are scaled by floating-point operations to other shapes; without one they are the recipe's own. Both are
without the options that change a stage's speed, whose factors on the same machine are the package's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from draftsmith.config import DFlashOptions
from draftsmith.errors import UserError
from draftsmith.shapes import Shape
from draftsmith.simulate import Network

STAGES = ("target", "drafter", "optimizer")
LINKS = ("send within a host", "sum within a host", "send between hosts")


@dataclass(frozen=True, kw_only=True)
class Figures:
    device: str
    memory_gib: float
    rows: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Mapping[str, Any]]
    """What an option does to the seconds of a stage, by name: a factor."""
    targets: Mapping[str, Mapping[str, Any]]
    """The config of known targets, by name."""

    def seconds(self, stage: str, shape: Shape, used: Sequence[str] = ()) -> tuple[float, str]:
        """What a stage takes with the options in use, and how that is known."""
        seconds, how = self._plain_seconds(stage, shape)
        for name in used:
            if name in self.options and self.options[name]["stage"] == stage:
                factor = self.options[name]["factor"]
                seconds, how = seconds * factor, f"{how}, x {factor} for {name}"
        return seconds, how

    def _plain_seconds(self, stage: str, shape: Shape) -> tuple[float, str]:
        row = self.rows[stage]
        how, name = row.get("how", "measured"), row.get("target")
        if name is None:
            return row["seconds"], how
        measured = replace(
            shape,
            config=self.targets[name],
            drafter=DFlashOptions(),
            tokens=row["tokens"],
            anchors=row["anchors"],
            layer_ids=None,
        )
        factor = shape.work(stage) / measured.work(stage)
        if abs(factor - 1) < 1e-9:
            return row["seconds"], how
        return row[
            "seconds"
        ] * factor, f"{how} with {name}, scaled x {factor:.3f} by {'weights' if stage == 'optimizer' else 'FLOP'}"

    def network(self, gpus_per_host: int) -> Network:
        within, sums, between = (self.rows[link] for link in LINKS)
        return Network(
            within=within["bytes_per_s"],
            sums=sums["bytes_per_s"],
            between=between["bytes_per_s"],
            latency_within=within.get("latency", 0.0),
            latency_between=between.get("latency", 0.0),
            gpus_per_host=gpus_per_host,
        )

    def config(self, path: str, revision: str | None = None) -> Mapping[str, Any]:
        """A target's config.json: of a folder, of a known target, or from the hub."""
        file = Path(path) / "config.json"
        if path and file.is_file():
            try:
                return json.loads(file.read_text())
            except ValueError as error:
                raise UserError(f"{file} is not valid JSON: {error}") from error
        return self.targets[path] if path in self.targets else _hub_config(path, revision)


def _hub_config(path: str, revision: str | None) -> Mapping[str, Any]:
    """The config.json of a hub model, and nothing else of it."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        if path.count("/") != 1 or not all(path.split("/")):
            raise ValueError("no folder with a config.json, and no hub name ORG/NAME")
        return json.loads(Path(hf_hub_download(path, "config.json", revision=revision)).read_text())
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"target.path is {path!r}: {reason}; give the target's folder or its hub name") from error


def read_figures(path: str) -> Figures:
    """The package's figures; rows of the user's file win over them. Raises UserError for what cannot be used."""
    own = json.loads((files("draftsmith") / "figures" / "NVIDIA_H200.json").read_text())
    device, memory, rows = own["device"], own["memory_gib"], {row["stage"]: row for row in own["rows"]}
    if path:
        try:
            given = json.loads(Path(path).read_text())
            device, memory = str(given["device"]), float(given.get("memory_gib", memory))
            rows |= {row["stage"]: row for row in given["rows"]}
        except OSError as error:
            raise UserError(f"figures {path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"figures {path}: no result file with device and rows, each with its stage: {error}"
            ) from error
    for stage, row in rows.items():
        if stage not in STAGES + LINKS:
            raise UserError(f"figures {path}: unknown stage {stage!r}; one of: {', '.join(STAGES + LINKS)}")
        for name in (
            ("bytes_per_s",) if stage in LINKS else ("seconds", *(("tokens", "anchors") if "target" in row else ()))
        ):
            value = row.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise UserError(f"figures {path}: {name} of stage {stage!r} is {value}; give a positive number")
        if row.get("target", "Qwen/Qwen3-8B") not in own["targets"]:
            raise UserError(
                f"figures {path}: target {row['target']!r} is not one of {', '.join(own['targets'])}; leave it out"
            )
    return Figures(device=device, memory_gib=float(memory), rows=rows, options=own["options"], targets=own["targets"])
