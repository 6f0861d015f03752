"""With thinking and without: of which of its two modes a prepared set shows what the target writes.

A drafter that was trained on one mode accepts little in the other. Whether a target has two is told by the variables
that its chat template looks up; what a row shows, by whether an answer in it has a thought. The value of the switch
alone does not tell, since templates render an answer without a thought alike whatever it is.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2 import meta

SWITCHES = ("enable_thinking", "thinking")
"""Names under which templates are told to let the target think or not."""
GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Tags that jinja does not know by itself."""


def find_switch(template: str) -> str:
    """The variable by which the template turns thinking on and off; empty if it has none."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        looked_up = meta.find_undeclared_variables(environment.parse(GENERATION.sub("", template)))
    except jinja2.TemplateError:
        return ""  # a construct of transformers' own; rendering tells whether the template works
    return next((name for name in SWITCHES if name in looked_up), "")


def mode(switch: str, arguments: Mapping[str, Any], *, thought: bool) -> str:
    """What a row shows, in words."""
    asked = f"{switch}={json.dumps(arguments[switch])}" if switch in arguments else f"{switch} not given"
    return f"{asked}, {'with' if thought else 'without'} a thought"


def missing_mode(modes: Mapping[str, int]) -> str:
    """One line for the user if all rows of a target with two modes are of one; empty otherwise."""
    kinds = Counter()
    for name, count in modes.items():
        kinds[name.endswith("with a thought")] += count
    if len(kinds) != 1:
        return ""
    (thinks,) = kinds
    seen, other = ("thinking", "without") if thinks else ("not thinking", "with")
    shown = "; ".join(f"{count:,} rows {name}" for name, count in sorted(modes.items()))
    return (
        f"all answers are those of the target {seen} ({shown}), and its chat template knows both: served {other} "
        f"thinking, the drafter will accept less. Add rows {other} thinking, or leave it if it is never served so"
    )
