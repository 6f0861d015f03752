"""A tiny drafter trained until it knows its target's answers by heart, and exported: the subject of `verify`'s tests.

On such a subject every mistake between training and serving shows as lost acceptance, within seconds.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import torch

from draftsmith.commands import ExportCommand
from draftsmith.config import (
    CheckpointOptions,
    DataOptions,
    DFlashOptions,
    EvaluationOptions,
    LogOptions,
    OptimOptions,
    PackOptions,
    Recipe,
    RegenerateOptions,
    TargetOptions,
)
from draftsmith.data.prepare import prepare, tokenizer_fingerprint
from draftsmith.data.regenerate import regenerate
from draftsmith.telemetry import Console
from draftsmith.train import train
from draftsmith.verbs import export
from tests.tiny import tiny_target, tiny_tokenizer

ROPE = {"rope_type": "default", "rope_theta": 1e6}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512}
STEPS = 80


def make_target(folder: Path, *, kind: str = "qwen3", rope: dict = ROPE, **options) -> Path:
    """A target of six layers on disk that writes printable text; its table is longer than its vocabulary."""
    tokenizer, model = tiny_tokenizer(), tiny_target(kind, layers=6, **options)
    with torch.no_grad():
        for token, number in tokenizer.get_vocab().items():
            if not (token.isascii() and token.isprintable()):
                for table in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
                    table[number] *= 0.01
    model.config.rope_parameters = dict(rope)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_recipe(folder: Path, target: Path, *, steps: int = STEPS, lr: float = 3e-3, **drafter) -> Recipe:
    """Prompts, the target's answers, the prepared set, and a recipe that learns them by heart."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(4)))
    from transformers import AutoModelForCausalLM

    model, tokenizer = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval(), tiny_tokenizer()
    answers = RegenerateOptions(prompts=str(prompts), output=str(folder / "answers.jsonl"), max_new_tokens=48)
    regenerate(model, tokenizer, answers, device=torch.device("cpu"), report=lambda line: None)
    data = DataOptions(conversations=answers.output, prepared=str(folder / "prepared"), workers=0)
    prepare(tokenizer, tokenizer_fingerprint(tokenizer), data, lambda line: None)
    return Recipe(
        run=str(folder / "run"),
        device="cpu",
        at_end="nothing",
        target=TargetOptions(path=str(target), layer_ids=(1, 3)),
        data=data,
        pack=PackOptions(tokens=320, anchors=96, anchors_per_document=24, anchor_density=1.0),
        drafter=replace(DFlashOptions(num_layers=2, block_size=8), **drafter),
        optim=OptimOptions(lr=lr, steps=steps),
        checkpoint=CheckpointOptions(every=steps),
        evaluation=EvaluationOptions(prompts=str(prompts), every=steps, limit=4, max_new_tokens=40),
        log=LogOptions(every=max(1, steps // 4)),
    )


def make_export(folder: Path, target: Path, to: str = "zlab", **options) -> Path:
    """Train and export; returns the export's folder."""
    recipe = make_recipe(folder, target, **options)
    train(recipe, Console(io.StringIO()))
    export(ExportCommand(run=recipe.run, to=to, output=str(folder / "export"), device="cpu"))
    return folder / "export"
