"""The command line: one verb, an optional recipe, and flags that win over it.

A recipe is flattened to flags, put before the user's flags, and all of them are parsed once, so a typo or a wrong type
gets the same message from a file and from a flag. Nothing heavy is imported until a verb runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from draftsmith import commands, config
from draftsmith.errors import UserError
from draftsmith.ranges import check_options
from draftsmith.recipe import parse, recipe_words

# verb -> (its options, where it is done, names of leading words; "recipe" is a TOML file or the name of a bundled one)
VERBS: dict[str, tuple[type, str, tuple[str, ...]]] = {
    "demo": (commands.DemoCommand, "draftsmith.demo:demo", ()),
    "recipes": (commands.RecipesCommand, "draftsmith.bundled:recipes", ("action", "name", "to")),
    "regenerate": (commands.RegenerateCommand, "draftsmith.verbs:regenerate", ("recipe",)),
    "prepare": (commands.PrepareCommand, "draftsmith.verbs:prepare", ("recipe",)),
    "preview": (commands.PreviewCommand, "draftsmith.verbs:preview", ("recipe",)),
    "train": (config.Recipe, "draftsmith.verbs:train", ("recipe",)),
    "plan": (commands.PlanCommand, "draftsmith.plan:plan", ("recipe",)),
    "evaluate": (commands.EvaluateCommand, "draftsmith.assess:evaluate", ("run",)),
    "export": (commands.ExportCommand, "draftsmith.verbs:export", ("run",)),
    "verify": (commands.VerifyCommand, "draftsmith.verbs:verify", ("folder",)),
    "generate": (commands.GenerateCommand, "draftsmith.verbs:generate", ("run", "prompt")),
}


def main(argv: list[str] | None = None) -> None:
    """Entry point; ends the process with the exit codes of `errors` (0 ok, 2 bad options, 3 environment, ...)."""
    words = sys.argv[1:] if argv is None else argv
    try:
        if not words or words[0] in ("-h", "--help"):
            print(overview())
        elif words[0] == "--version":
            from draftsmith import __version__

            print(f"draftsmith {__version__}")
        elif words[0] not in VERBS:
            raise UserError(f"unknown verb {words[0]!r}; one of: {', '.join(VERBS)}")
        else:
            run_verb(words[0], words[1:])
    except UserError as error:
        print(f"draftsmith: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of a help text is gone; verbs' own lines are `Console`'s
        from draftsmith.telemetry import silence

        silence(sys.stdout)
    except KeyboardInterrupt:
        print("draftsmith: interrupted", file=sys.stderr)
        sys.exit(130)


def overview() -> str:
    lines = ["usage: draftsmith VERB [RECIPE] [--options]", "", "verbs:"]
    for verb, (options, _, leading) in VERBS.items():
        summary = (options.__doc__ or "").strip().splitlines()[0]
        if verb == "train":
            summary = "Train or continue a drafter."
        lines.append(f"  {' '.join([verb, *map(str.upper, leading)]):<26} {summary}")
    return "\n".join([*lines, "", "draftsmith VERB --help shows a verb's options. Start with: draftsmith demo"])


def run_verb(verb: str, words: list[str]) -> None:
    if verb == "train" and "--plan" in words:
        verb, words = "plan", [word for word in words if word != "--plan"]
    options, place, leading = VERBS[verb]
    values, flags = _leading(verb, leading, words)
    recipe = values.pop("recipe", None)
    if recipe is not None:
        flags = recipe_words(recipe, options) + flags
    named = [word for name, value in values.items() for word in (f"--{name}", value)]
    command = parse(options, [*named, *flags], f"draftsmith {verb}")
    known = Path(command.run) / "recipe.toml" if isinstance(command, commands.EvaluateCommand) and command.run else None
    if known and known.is_file():
        # The run's own recipe says how it is evaluated, unless a flag does.
        words = [*recipe_words(str(known), commands.EvaluateCommand, {"evaluation"}), *named, *flags]
        command = parse(options, words, f"draftsmith {verb}")
    check_options(command)
    _announce_code(command)
    module, function = place.split(":")
    action: Callable = getattr(import_module(module), function)
    action(command)


def _announce_code(command) -> None:
    target = getattr(command, "target", None)
    if target is not None and target.trust_remote_code:
        pin = "" if getattr(target, "revision", None) else ", in whatever version it has today; pin a target.revision"
        print(f"draftsmith: target.trust_remote_code: Python code of the target will be run{pin}", file=sys.stderr)


def _leading(verb: str, names: tuple[str, ...], words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Words before the first flag, by name."""
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    if count > len(names):
        allowed = " ".join(map(str.upper, names)) or "none"
        raise UserError(f"{verb}: unexpected {words[len(names)]!r}; leading words allowed: {allowed}")
    return dict(zip(names, words[:count], strict=False)), words[count:]
