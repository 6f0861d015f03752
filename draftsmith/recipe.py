"""Recipes: TOML files, checked as strictly as flags because they become flags.

A recipe is flattened to flags and parsed by tyro together with the user's, so a typo or a wrong type gets the same
message from a file and from a flag, and the last word wins.
"""

from __future__ import annotations

import sys
import tomllib
from importlib.resources import files
from pathlib import Path

from draftsmith import config
from draftsmith.errors import UserError


def parse(options: type, words: list[str], program: str):
    """Words to an options object; tyro prints what is wrong and exits with 2."""
    import tyro

    return tyro.cli(options, args=words, prog=program, use_underscores=True, config=(tyro.conf.FlagConversionOff,))


def read_recipe(name: str) -> config.Recipe:
    """The recipe of a file, checked."""
    return parse(config.Recipe, recipe_words(name, config.Recipe), f"recipe {name}")


def recipe_words(name: str, options: type, tables: set[str] | None = None) -> list[str]:
    """A recipe as flags, those the verb has no use for left out. Raises UserError for a file that cannot be read.

    Keys and types are checked against the whole recipe first, so a misspelt table is an error for every verb.
    `tables`: only these, instead of all that `options` has.
    """
    path = find_recipe(name)
    try:
        flat = config.flatten(tomllib.loads(path.read_text()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {name} is not valid TOML: {error}") from error
    if flat.get("target.trust_remote_code"):
        raise UserError(
            f"recipe {name} sets target.trust_remote_code; a file that is passed on may not let code run. Take it out "
            "and, if you have read that code, give --target.trust_remote_code True and a --target.revision yourself"
        )
    words = {key: [f"--{key}", *_words(value)] for key, value in flat.items()}
    try:
        parse(config.Recipe, [word for flag in words.values() for word in flag], f"recipe {name}")
    except SystemExit:
        print(f"draftsmith: this is about a key of the recipe {name}", file=sys.stderr)
        raise
    known = tables or set(options.__dataclass_fields__)
    return [word for key, flag in words.items() if key.split(".")[0] in known for word in flag]


def find_recipe(name: str) -> Path:
    """A recipe file, or a bundled recipe by its name."""
    bundled = bundled_recipes()
    if name in bundled:
        return bundled[name]
    if not Path(name).is_file():
        raise UserError(f"recipe {name!r}: no such file, and no bundled recipe; bundled: {', '.join(sorted(bundled))}")
    return Path(name)


def bundled_recipes() -> dict[str, Path]:
    folder = Path(str(files("draftsmith") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def _words(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]
