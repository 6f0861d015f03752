"""A tiny world for tests: a random target on disk, conversations it wrote itself, a prepared set, a recipe."""

from __future__ import annotations

# ruff: noqa: E402
import jaxtyping
import torch

# Before anything imports draftsmith, so that every call in the tests has its shapes and types checked. Not on a GPU
# machine: there functions are compiled (by Triton and by torch), and neither sees through the checks.
if not torch.cuda.is_available():
    jaxtyping.install_import_hook("draftsmith", "beartype.beartype")

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

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
from tests.tiny import tiny_target, tiny_tokenizer

torch.set_num_threads(1)  # spinning threads make parallel tests several times slower
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

NUM_PROMPTS = 24


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target/`, `prompts.jsonl`, `conversations.jsonl` and `prepared/`."""
    folder = tmp_path_factory.mktemp("world")
    tokenizer, model = tiny_tokenizer(), tiny_target("llama")
    with torch.no_grad():  # it writes printable ASCII only, so that its answers survive as text
        for token, number in tokenizer.get_vocab().items():
            if not (token.isascii() and token.isprintable()):
                model.get_input_embeddings().weight[number] *= 0.01
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    prompts = [{"prompt": f"q{i} {'x' * (i % 7)}", "tags": ["odd" if i % 2 else "even"]} for i in range(NUM_PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    options = RegenerateOptions(
        prompts=str(folder / "prompts.jsonl"), output=str(folder / "conversations.jsonl"), max_new_tokens=24
    )
    regenerate(model, tokenizer, options, device=torch.device("cpu"), report=lambda line: None)
    data = DataOptions(conversations=options.output, prepared=str(folder / "prepared"))
    prepare(tokenizer, tokenizer_fingerprint(tokenizer), data, lambda line: None)
    return folder


@pytest.fixture(scope="session")
def alone(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The outcome of the short run of `ranks` in one process, as a plain user runs it."""
    from tests.ranks import outcome, run_ranks, short

    recipe = short(world, tmp_path_factory.mktemp("alone"))
    ended = run_ranks(recipe, 1)
    assert [e.code for e in ended] == [0], ended[0].output
    return outcome(recipe)


@pytest.fixture
def recipe(world: Path, tmp_path: Path) -> Recipe:
    return make_recipe(world, tmp_path)


def make_recipe(world: Path, folder: Path) -> Recipe:
    """A run of a few dozen small steps on the tiny world."""
    return Recipe(
        run=str(folder / "run"),
        device="cpu",
        at_end="nothing",
        target=TargetOptions(path=str(world / "target"), layer_ids=(0, 2)),
        data=DataOptions(prepared=str(world / "prepared"), workers=0),
        pack=PackOptions(tokens=160, anchors=24, anchors_per_document=8, anchor_density=0.5),
        drafter=DFlashOptions(num_layers=2, block_size=4, mask_token_id=None),
        optim=OptimOptions(lr=3e-3, steps=12),
        checkpoint=CheckpointOptions(every=5),
        evaluation=EvaluationOptions(prompts=str(world / "prompts.jsonl"), every=6, limit=2, max_new_tokens=12),
        log=LogOptions(every=3),
    )


def with_options(recipe: Recipe, table: str, **changes: object) -> Recipe:
    """The recipe with some options of one table changed."""
    return replace(recipe, **{table: replace(getattr(recipe, table), **changes)})
