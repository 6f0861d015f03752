"""One class per verb: the tables of the recipe it reads, and its own options. A field's docstring is its help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from draftsmith.config import (
    DataOptions,
    DFlashOptions,
    EvaluationOptions,
    LossOptions,
    PackOptions,
    Recipe,
    RegenerateOptions,
    TargetOptions,
)


@dataclass(frozen=True, kw_only=True)
class DemoCommand:
    """Train a real drafter for a small bundled chat model on this machine, and measure it."""

    size: Literal["default", "smallest"] = "default"
    """smallest: about two minutes, a check that everything works; its figures mean little."""
    run: str = "runs/demo"
    """Folder of the run."""
    cache: str = "runs/cache"
    """Folder of the converted target, shared by later demos."""


@dataclass(frozen=True, kw_only=True)
class RegenerateCommand:
    """Let the target answer prompts, so that the drafter learns what the target writes."""

    target: TargetOptions = field(default_factory=TargetOptions)
    regenerate: RegenerateOptions = field(default_factory=RegenerateOptions)
    device: Literal["auto", "cpu", "cuda"] = "auto"


@dataclass(frozen=True, kw_only=True)
class PrepareCommand:
    """Render conversations with the target's chat template, tokenise, mark what is supervised, store."""

    check_target: int = 0
    """Then compare the supervised tokens of so many rows with the target's own first choice (reads its weights)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where check_target runs the target."""
    target: TargetOptions = field(default_factory=TargetOptions)
    data: DataOptions = field(default_factory=DataOptions)


@dataclass(frozen=True, kw_only=True)
class PreviewCommand:
    """Show prepared rows, supervised tokens coloured, and one block as the drafter sees it."""

    rows: int = 3
    """Rows shown."""
    html: str = ""
    """Also write a page (one file, no script) with these rows, statistics and the block."""
    seed: int = 0
    target: TargetOptions = field(default_factory=TargetOptions)
    data: DataOptions = field(default_factory=DataOptions)
    pack: PackOptions = field(default_factory=PackOptions)
    drafter: DFlashOptions = field(default_factory=DFlashOptions)
    loss: LossOptions = field(default_factory=LossOptions)


@dataclass(frozen=True, kw_only=True)
class PlanCommand(Recipe):  # a recipe with all its options, so that any `train` command can be planned
    """Say what a run on so many GPUs would be, and which layout would be the fastest; start nothing."""

    gpus: int | None = None
    """GPUs, of all hosts together. None: as many as `train` would use here."""
    gpus_per_host: int = 8
    figures: str = ""
    """JSON with seconds measured on one GPU (docs/planning.md). Empty: an H200 with Qwen3-8B, scaled to the target."""
    memory_gib: float | None = None
    """Memory of one GPU. None: that of the figures' GPU."""


@dataclass(frozen=True, kw_only=True)
class Place:
    path: str = ""
    """Where the run's target lies now, if it has moved. Empty: where the run's recipe says."""
    trust_remote_code: bool = False
    """Run Python code that comes with the target; a run does not remember that."""


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Decode held-out prompts with and without the drafter; report the acceptance length."""

    run: str = ""
    """Folder of a finished or interrupted run."""
    checkpoint: str = "best"
    """best, last, or the name of a checkpoint folder of the run."""
    drafter: str = ""
    """Instead of a run: any drafter's folder or Hub name (ORG/NAME or ORG/NAME@REVISION), in z-lab's or
    Speculators' layout (with --target.path)."""
    target: TargetOptions = field(default_factory=TargetOptions)
    """Of --drafter. A run knows its target; there target.path says where it lies now, if it has moved."""
    suite: tuple[str, ...] = ()
    """Instead of evaluation.prompts: humaneval, mt-bench, champ, ifbench, or a JSONL file; several are allowed. Of
    each, evaluation.limit prompts, drawn by a hash of their ids."""
    rescore: str = ""
    """Alone: folder of an earlier evaluation, whose figures are computed again from its samples.jsonl."""
    output: str = ""
    """Folder for results.json and samples.jsonl. Empty: RUN/evaluation; nothing is written for --drafter."""
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    device: Literal["auto", "cpu", "cuda"] = "auto"


@dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """Write a trained drafter as the folder that vLLM, SGLang or PyPI dflash reads."""

    run: str
    """Folder of a run."""
    to: Literal["zlab", "speculators", "all"] = "zlab"
    """zlab: vLLM, SGLang, PyPI dflash, llama.cpp. speculators: `vllm serve FOLDER` alone, embeddings included."""
    checkpoint: str = "best"
    """best, last, or the name of a checkpoint folder of the run."""
    output: str = ""
    """Folder of the export (with --to all: of both). Empty: RUN/export/zlab and RUN/export/speculators."""
    license: str = ""
    """SPDX id for the model card; left out if not given."""
    recorded_prompts: int = 4
    """Held-out prompts whose tokens and answers go into draftsmith.json, for `verify`. 0: random text instead."""
    target: Place = field(default_factory=Place)
    device: Literal["auto", "cpu", "cuda"] = "auto"


@dataclass(frozen=True, kw_only=True)
class VerifyCommand:
    """Prove that an exported drafter, loaded afresh, drafts as it did in training."""

    folder: str
    """An exported drafter: z-lab or speculators layout, ours or another's."""
    target: TargetOptions = field(default_factory=TargetOptions)
    engine: tuple[Literal["reference", "dflash", "vllm"], ...] = ("reference",)
    """Who decodes besides the independent reference; engines get a Python environment of their own."""
    engines: str = "~/.cache/draftsmith/engines"
    """Folder of the engines' environments, made on demand."""
    prompts: str = ""
    """JSONL of prompts. Empty: those recorded with the export."""
    limit: int = 4
    """Prompts used."""
    max_new_tokens: int = 64
    url: str = ""
    """A running vLLM server that serves target and drafter (with --engine vllm); its metrics are read."""
    output: str = ""
    """Also write the table as JSON to this file."""
    device: Literal["auto", "cpu", "cuda"] = "auto"


@dataclass(frozen=True, kw_only=True)
class GenerateCommand:
    """Chat once with the drafter's help; accepted tokens are coloured."""

    run: str
    """Folder of a run."""
    prompt: str
    """What to say to the target."""
    checkpoint: str = "best"
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    target: Place = field(default_factory=Place)
    device: Literal["auto", "cpu", "cuda"] = "auto"


@dataclass(frozen=True, kw_only=True)
class RecipesCommand:
    """List, print or copy the recipes that come with the package."""

    action: Literal["ls", "show", "cp"] = "ls"
    name: str = ""
    """Recipe to show or copy."""
    to: str = ""
    """Where cp writes; never over an existing file."""
