"""From a checkpoint to folders that engines read: bf16 weights, what the trainer measures on them, the card."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path

import torch
from torch import Tensor

import draftsmith
from draftsmith.checkpoint import Checkpoint
from draftsmith.config import Recipe, flatten, to_toml
from draftsmith.data.store import read_manifest
from draftsmith.data.template import chat_arguments
from draftsmith.drafters import DFlashDrafter
from draftsmith.errors import DataError
from draftsmith.export import EXPORTS
from draftsmith.export.card import is_hub_id, write_card
from draftsmith.export.folder import check_free, write_folder
from draftsmith.export.record import measure_record
from draftsmith.targets import HFTarget

UNPUBLISHED = ("regenerate.servers", "regenerate.api_key_env")
PRIVATE = ("run", "init", "data.conversations", "data.prepared", "data.mix", "data.cache")
PRIVATE += ("evaluation.prompts", "regenerate.prompts", "regenerate.drafter")


def publish(
    layouts: dict[str, Path],
    recipe: Recipe,
    found: Checkpoint,
    target: HFTarget,
    drafter: DFlashDrafter,
    prompts: list[Tensor],
    license: str = "",
) -> None:
    """Write each layout to its folder. All are checked before the first is written."""
    path = Path(recipe.target.path)
    name = str(path.resolve()) if path.is_dir() else recipe.target.path  # `vllm serve FOLDER` works from any folder
    for folder in layouts.values():
        check_free(folder)
    round_weights(drafter)
    written = {layout: EXPORTS[layout](drafter, target, name) for layout in layouts}
    record = describe(recipe, found, drafter, license)
    record["measured"] = measure_record(target, drafter, prompts, min(64, recipe.evaluation.max_new_tokens))
    for layout, (config, tensors) in written.items():
        whole = {"layout": layout, **record}
        write_folder(layouts[layout], config, tensors, write_card(config, whole), whole)


def round_weights(drafter: DFlashDrafter) -> None:
    """Round to bf16 in place: what is measured is what is served."""
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(weight.to(torch.bfloat16))


def describe(recipe: Recipe, found: Checkpoint, drafter: DFlashDrafter, license: str) -> dict:
    """Provenance as JSON; folders of this machine are reduced to their last part."""
    path = Path(recipe.target.path)
    local = path.is_dir()
    options = {
        key: _last_part(value) if key.startswith((*PRIVATE, "regenerate.output")) else value
        for key, value in flatten(tomllib.loads(to_toml(recipe))).items()
        if not key.startswith(UNPUBLISHED)
    }
    if local:
        options["target.path"] = path.name
    progress = found.facts.get("progress") or {}
    latest = progress.get("latest")
    return {
        "target": {
            "name": path.resolve().name if local else recipe.target.path,
            "hub": not local and is_hub_id(recipe.target.path),
            "revision": recipe.target.revision,
        },
        "license": license,
        "datasets": _hub_sets(recipe),
        "checkpoint": found.path.name,
        "step": found.step,
        "run_id": found.run_id,
        "trained": {"block_size": drafter.config.block_size, "accept": _training_accept(Path(recipe.run), found.step)},
        "evaluation": latest if latest and progress.get("step") == found.step else None,
        "chat_template": chat_arguments(recipe.evaluation, recipe.data),
        "fingerprints": found.facts.get("fingerprints", {}),
        "versions": found.facts.get("versions", {}),
        "commit": _commit(),
        "recipe": options,
    }


def _last_part(value: object) -> object:
    """Of a path, or of each of several."""
    if isinstance(value, list):
        return [_last_part(one) for one in value]
    return Path(value).name if isinstance(value, str) else value


def _hub_sets(recipe: Recipe) -> list[str]:
    """Names of the Hugging Face sets that the training sets were prepared from; files of the user's are not named."""
    found: list[str] = []
    mix = recipe.data.mix
    for folder in (recipe.data.prepared, *mix, *(text.rpartition("=")[0] for text in mix)):  # FOLDER or FOLDER=WEIGHT
        try:
            found += ((read_manifest(Path(folder)) if folder else None) or {}).get("hub_sets", [])
        except DataError:  # the set was moved or replaced since
            continue
    return sorted(set(found))


def _training_accept(run: Path, step: int) -> float | None:
    """The accept length that training itself reported on its own text, by the last line of metrics up to `step`."""
    accept = None
    path = run / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.is_file() else []:
        row = json.loads(line)
        if row.get("step", 0) <= step and row.get("accept") is not None:
            accept = row["accept"]
    return accept


def _commit() -> str | None:
    """The commit of draftsmith's own source, if it runs from a checkout."""
    root = Path(draftsmith.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
