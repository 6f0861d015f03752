"""A drafter of any origin, ready to be measured on a target. Where its folder is silent on a convention, both readings
are measured on a few prompts, the better one is taken, and which it was is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.checkpoint import MANIFEST, load
from draftsmith.config import EvaluationOptions, TargetOptions
from draftsmith.data.chat import prompt_tokens
from draftsmith.data.prompts import Prompt
from draftsmith.drafters import DFlashDrafter
from draftsmith.errors import UserError
from draftsmith.export.folder import read_record
from draftsmith.export.read import DrafterFolder, read_folder
from draftsmith.readings import Decoder, better_readings, compare_readings
from draftsmith.reference import Reference
from draftsmith.targets import HFTarget, load_target
from draftsmith.targets.hf import read_config

LABELS, RULE = "labels one position on", "in-block rule (is_causal) flipped"
PROMPTS = 4  # on which readings are compared


def adopt(
    path: Path,
    options: TargetOptions,
    device: torch.device,
    prompts: list[Prompt],
    evaluation: EvaluationOptions,
    arguments: dict[str, Any],
    say: Callable[[str], None],
) -> tuple[HFTarget, DFlashDrafter]:
    """Target and drafter. `arguments` are the chat template's. Raises UserError for a folder that is not understood or
    does not fit the target."""
    found = read_folder(path)
    for remark in found.remarks:
        say(f"warning: {remark}")
    wanted = read_config(options)
    sizes = {"hidden_size": "hidden_size", "vocab_size": "vocab_size"}
    if found.layout == "zlab":  # the other layout does not say
        sizes["num_target_layers"] = "num_hidden_layers"
    for mine, theirs in sizes.items():
        if found.config[mine] != getattr(wanted, theirs):
            raise UserError(
                f"the drafter in {path} has {mine} {found.config[mine]}, the target {getattr(wanted, theirs)}; "
                "it belongs to another target"
            )
    taps = tuple(found.config["dflash_config"]["target_layer_ids"])
    target = load_target(replace(options, layer_ids=taps), device)
    if found.silent:
        found = settle(found, target, prompts[:PROMPTS], evaluation.max_new_tokens, arguments, say)
    drafter = found.drafter().to(device=target.device, dtype=target.head.dtype)
    return target, drafter.eval()


def refuse_other_target(path: Path, target: HFTarget) -> None:
    """Raise UserError for a checkpoint or an export of ours that was trained for another target of the same sizes.

    A target in another data type has another fingerprint, and is not compared.
    """
    dtype = str(target.head.dtype).removeprefix("torch.")
    if record := read_record(path):
        known, same_type = record["fingerprints"], record["measured"]["dtype"] == dtype
    elif (path / MANIFEST).is_file():
        checkpoint = load(path)  # its weights have the type that the target had
        known = checkpoint.facts.get("fingerprints", {})
        same_type = all(tensor.dtype == target.head.dtype for tensor in checkpoint.tensors("model").values())
    else:
        return
    if same_type and known.get("target", target.fingerprint) != target.fingerprint:
        raise UserError(
            f"the drafter in {path} was trained for another target than {target.config._name_or_path!r} (its "
            "fingerprint differs); give that one as target.path, or another drafter"
        )


def settle(
    found: DrafterFolder,
    target: HFTarget,
    prompts: list[Prompt],
    max_new_tokens: int,
    arguments: dict[str, Any],
    say: Callable[[str], None],
) -> DrafterFolder:
    """The folder as its weights work best, among the readings that it leaves open."""
    decoder, reference = Decoder(target), Reference.from_config(found.path, found.config, target.device)
    texts = []
    for prompt in prompts:
        tokens = torch.from_numpy(prompt_tokens(target.tokenizer, prompt, arguments)).to(target.device)
        texts.append((tokens, decoder.greedy(tokens, max(max_new_tokens, 2 * reference.reading.block_size))))
    scores = compare_readings(decoder, reference, texts)
    better, told = better_readings(scores), ", ".join(f"{name} {score:.2f}" for name, score in scores.items())
    if LABELS in better:
        raise UserError(
            f"the drafter in {found.path} predicts the token after each slot's own position (accepted drafts per "
            f"block: {told}); that is not DFlash's convention and is not supported"
        )
    if "is_causal" in found.silent and scores.get(RULE, 0.0) > scores.get("as read", 0.0):
        rules = set(reference.reading.causal)
        if len(rules) == 1:
            found = replace(found, config={**found.config, "is_causal": not rules.pop()})
        else:
            found = replace(found, config={**found.config, "is_causal": False})
        taken = f"is_causal {found.config['is_causal']}"
    else:
        taken = "the servers' rule" if "is_causal" in found.silent else "same-position labels"
    say(f"the folder is silent on {', '.join(found.silent)}; accepted drafts per block: {told}; taken: {taken}")
    if others := [name for name in better if name not in (LABELS, RULE)]:
        say(f"warning: {', '.join(others)} would work better: target_layer_ids may be off by one")
    return found
