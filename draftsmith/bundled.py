"""The verb `recipes`: a file of its own because it needs nothing heavy."""

from __future__ import annotations

import shutil
from pathlib import Path

from draftsmith import commands
from draftsmith.errors import UserError
from draftsmith.recipe import bundled_recipes, find_recipe
from draftsmith.telemetry import Console


def recipes(command: commands.RecipesCommand) -> None:
    """ls, show NAME, cp NAME TO."""
    console = Console()
    if command.action == "ls":
        for name, path in bundled_recipes().items():
            console.say(f"{name:<20} {path.read_text().splitlines()[0].lstrip('# ')}")
        console.say("next: draftsmith recipes cp NAME my.toml")
        return
    if not command.name:
        raise UserError(f"recipes {command.action} needs a name; one of: {', '.join(bundled_recipes())}")
    path = find_recipe(command.name)
    if command.action == "show":
        console.say(path.read_text().rstrip())
        return
    to = Path(command.to or f"{path.stem}.toml")
    if to.exists():
        raise UserError(
            f"{to} exists and is not overwritten; give another name: draftsmith recipes cp {path.stem} NAME"
        )
    shutil.copyfile(path, to)
    console.say(f"wrote {to}\nnext: edit it, then draftsmith prepare {to}")
