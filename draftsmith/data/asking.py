"""Options that hold wherever the target answers, on this machine or on a server."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from draftsmith.config import RegenerateOptions
from draftsmith.data.template import check_arguments
from draftsmith.errors import UserError


def check_common(options: RegenerateOptions) -> dict[str, Any]:
    """The chat template's arguments. UserError for options that make no sense."""
    if not options.prompts or not options.output:
        raise UserError("regenerate needs both 'prompts' and 'output', the paths of two JSONL files.")
    if Path(options.prompts).resolve() == Path(options.output).resolve():
        raise UserError(f"'prompts' and 'output' are the same file, {options.output}. Choose another output.")
    check_writable(Path(options.output))
    if options.limit is not None and options.limit < 1:
        raise UserError(f"regenerate.limit is {options.limit}; give the number of prompts, at least 1, or leave it out")
    check_sampling(options)
    return template_arguments(options)


def check_writable(output: Path) -> None:
    """UserError before minutes of loading, where it can be seen that nothing can be written there."""
    folder = next(folder for folder in (*output.parents, Path()) if folder.exists())
    if output.is_dir() or not folder.is_dir() or not os.access(output if output.exists() else folder, os.W_OK):
        reason = "it is a folder" if output.is_dir() else f"{output if output.exists() else folder} is not writable"
        raise UserError(f"regenerate.output {output} cannot be written ({reason}); name another file")


def check_sampling(options: RegenerateOptions, whose: str = "") -> None:
    if options.max_new_tokens < 1:
        raise UserError(f"{whose}max_new_tokens {options.max_new_tokens}: must be at least 1.")
    if not 0 <= options.temperature < math.inf or options.top_k < 0 or not 0 < options.top_p <= 1:
        raise UserError(
            f"{whose}temperature {options.temperature}, top_k {options.top_k}, top_p {options.top_p}: temperature and "
            "top_k must be numbers that are not negative, and top_p must lie in (0, 1]."
        )


def template_arguments(options: RegenerateOptions) -> dict[str, Any]:
    try:
        arguments = json.loads(options.template_kwargs or "{}")
    except json.JSONDecodeError as error:
        raise UserError(f"regenerate.template_kwargs is not JSON ({error.msg})") from error
    if not isinstance(arguments, dict):
        raise UserError('regenerate.template_kwargs must be a JSON object, as in {"enable_thinking": false}')
    check_arguments(arguments)
    return arguments
