"""README.md of an export: the commands that work first, then figures with their counts, then where it comes from.

Metadata by the Hub's rules: no `pipeline_tag` (the Hub would offer a pipeline that cannot work for a model without
embedding and head), `library_name: speculators` only where plain `vllm serve` is right, `base_model` for Hub targets,
`datasets` for Hub sets.
Whatever comes from outside is quoted: JSON strings in the YAML head, code fences that the text cannot close.
"""

from __future__ import annotations

import json
import re
import unicodedata

from draftsmith.export.serve import serve_commands, vllm_remarks

HERE = "PATH_OF_THIS_FOLDER"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def write_card(config: dict, record: dict) -> str:
    """The card as Markdown."""
    layout, target = record["layout"], record["target"]
    sections = [
        _head(layout, record),
        f"# DFlash drafter for {plain(target['name'])}",
        "A draft model for speculative decoding: it proposes "
        f"{config['block_size'] - 1} tokens at once, the target checks them in one pass. "
        "It serves no text by itself; it needs exactly this target.",
        "## Serve",
        *[
            f"{plain(engine)}:\n\n{fenced(command, 'bash')}"
            for engine, command in serve_commands(config, HERE, target["name"], target["revision"]).items()
        ],
        *vllm_remarks(config),
        "The drafter is bf16 and unquantised; keep it so (fp16 overflows in `fc`), also beside a quantised target.",
        "## Measured",
        _results(record),
        "## Where it comes from",
        _provenance(record),
    ]
    return "\n\n".join(sections) + "\n"


def plain(text: str) -> str:
    """One line of text that Markdown and HTML leave alone."""
    text = "".join(c for c in text if unicodedata.category(c)[0] != "C")
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", text)


def fenced(text: str, language: str = "") -> str:
    """A code block that the text cannot close."""
    text = "".join(c for c in text if c == "\n" or unicodedata.category(c)[0] != "C")
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def _head(layout: str, record: dict) -> str:
    target = record["target"]
    lines = [f"library_name: {'speculators' if layout == 'speculators' else 'draftsmith'}"]
    lines += ["tags:", *[f"- {tag}" for tag in ("dflash", "speculative-decoding", "draft-model")]]
    if target["hub"]:
        lines.append(f"base_model: {json.dumps(target['name'])}")
    if record.get("datasets"):
        lines += ["datasets:", *[f"- {json.dumps(name)}" for name in record["datasets"]]]
    if record.get("license"):
        lines.append(f"license: {json.dumps(record['license'])}")
    measured = record.get("evaluation")
    if measured:
        lines += [
            "model-index:",
            "- name: drafter",
            "  results:",
            "  - task: {type: text-generation}",
            '    dataset: {name: "held-out prompts", type: custom}',
            "    metrics:",
            f"    - {{type: accept_length, value: {measured['accept_length']:.4f}, "
            f'name: "accept length ({measured["prompts"]} prompts)"}}',
        ]
    return "\n".join(["---", *lines, "---"])


def _results(record: dict) -> str:
    lines = ["| figure | value | prompts |", "|---|---|---|"]
    if measured := record.get("evaluation"):
        lines.append(
            f"| accept length, mean over responses | {measured['accept_length']:.3f} | {measured['prompts']} |"
        )
        lines.append(
            f"| accept length, pooled over cycles | {measured['accept_length_pooled']:.3f} | {measured['prompts']} |"
        )
    recorded = record["measured"]
    lines.append(
        f"| accept length of these bf16 weights, pooled | {recorded['accept_length_pooled']:.3f} "
        f"| {len(recorded['answers'])} |"
    )
    return "\n".join(lines) + (
        "\n\nTokens committed per target pass, the bonus token included, by greedy decoding; 1.00 would be no help. "
        "It is no speed."
    )


def _provenance(record: dict) -> str:
    target, fingerprints = record["target"], record["fingerprints"]
    rows = {
        "target": target["name"] + (f", revision {target['revision']}" if target["revision"] else ""),
        "target fingerprint": fingerprints.get("target", ""),
        "data sets": ", ".join(record.get("datasets", [])),
        "data fingerprint": fingerprints.get("data", ""),
        "chat template arguments": json.dumps(record["chat_template"]) if record.get("chat_template") else "",
        "checkpoint": record["checkpoint"],
        "steps": str(record["step"]),
        "made with": ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
    }
    lines = ["| | |", "|---|---|", *[f"| {name} | {plain(str(value))} |" for name, value in rows.items() if value]]
    return "\n".join(lines) + "\n\nThe recipe and the SHA-256 of every file are in `draftsmith.json`."


def is_hub_id(name: str) -> bool:
    """Whether a target's name can be one of the Hub."""
    return _HUB_ID.fullmatch(name) is not None
