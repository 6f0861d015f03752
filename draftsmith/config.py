"""Every option of a recipe. No torch here, so `--help` is instant.

A recipe (TOML) holds the tables of `Recipe`; a verb reads the tables it needs. The docstring under a field is its help.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, is_dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    path: str = ""
    """Folder (or hub name) of the frozen target: config, safetensors weights, tokenizer with chat template."""
    revision: str | None = None
    """Commit of a hub target; recorded with every checkpoint."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type. auto: bfloat16 on a GPU, float32 on a CPU (bf16 is about five times slower there)."""
    layer_ids: tuple[int, ...] | None = None
    """0-based blocks whose output becomes the context feature. None: evenly spaced, as DFlash chooses them."""
    trust_remote_code: bool = False
    """Run Python code that comes with the target. On the command line only: recipes may not set it."""
    fp8: bool = False
    """Capture features with FP8 products (a Hopper GPU or newer). Decoding keeps the real weights."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    conversations: str = ""
    """What `prepare` reads: a file (JSONL, JSON, Parquet, Arrow; gzip or zstd), a folder, a glob, a URL (s3://, gs://,
    https://) or the name of a Hugging Face data set."""
    subset: str = ""
    """Configuration of a Hugging Face data set."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    revision: str | None = None
    """Commit of a Hugging Face data set."""
    form: Literal["auto", "messages", "sharegpt", "prompt_response", "prompts", "text", "tokens"] = "auto"
    """Form of the rows. auto: as the first row shows, and said."""
    columns: tuple[str, ...] = ()
    """PART=COLUMN where columns have other names; parts: messages, conversations, prompt, response, text, tokens,
    mask."""
    max_bad_rows: int = 0
    """Rows that may be unusable before `prepare` stops; they are listed in bad_rows.jsonl of the prepared folder."""
    enable_thinking: bool | None = None
    """Given to the chat template, as a server would. None: the template's own default."""
    template_kwargs: str = ""
    """More arguments of the chat template, as a JSON object: {"reasoning_effort": "low"}."""
    reasoning: Literal["keep", "drop"] = "keep"
    """What the rows say the target thought (reasoning_content): rendered, or left out."""
    train_on: Literal["all", "last"] = "all"
    """Answers of a conversation that are supervised."""
    min_supervised: float = 0.01
    """Refuse a set of whose tokens a smaller share is supervised."""
    overlap: Literal["warn", "drop", "ignore"] = "warn"
    """Training rows that share 13 tokens in a row with what a user says in evaluation.prompts: warn, leave them out of
    training, or do not look."""
    held_out: float = 0.0
    """Share of the conversations that `prepare` keeps out of the set and writes to held_out.jsonl of the prepared
    folder, for evaluation.prompts."""
    processes: int = 1
    """Processes of `prepare`. The result is the same for any number."""
    prepared: str = ""
    """Folder or URL (s3://, gs://) of the tokenised set: the output of `prepare`, the input of `train`."""
    cache: str = "~/.cache/draftsmith/prepared"
    """Folder where sets at URLs are kept on this machine."""
    cache_gb: float = 100.0
    """GB (10^9 bytes) it may hold; sets that were not used for the longest time give way."""
    mix: tuple[str, ...] = ()
    """What `train` reads instead of `prepared`: FOLDER or FOLDER=WEIGHT, several. An epoch sees each row of a folder
    WEIGHT times: 2 is twice, 0.25 once in four epochs."""
    caps: tuple[str, ...] = ()
    """TAG=ROWS or TAG=TOKENStokens: an epoch sees no more of the rows that carry the tag, and each epoch others."""
    max_length: int = 4096
    """Longest conversation in tokens."""
    overlong: Literal["refuse", "cut", "split"] = "refuse"
    """A conversation longer than max_length (or than a pack): refuse the run, cut it and count it, or split it."""
    split_context: int | None = None
    """Tokens of each later piece that are context, not supervised there. None: a quarter of the piece."""
    workers: int = 1
    """Loader processes. The packs are the same for any number, 0 included."""


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    tokens: int = 49_152
    """T: token budget of one pack."""
    anchors: int = 6_144
    """N: anchor slots (blocks) of one pack."""
    anchors_per_document: int = 512
    """At most this many anchors are drawn in one document and epoch."""
    anchor_density: float = 0.125
    """Anchors drawn per legal anchor position, rounded up."""
    window: int = 65_536
    """The shuffled epoch is packed in windows of this many samples."""


@dataclass(frozen=True, kw_only=True)
class DFlashOptions:
    kind: Literal["dflash"] = "dflash"
    """Drafter variant."""
    num_layers: int = 5
    block_size: int = 16
    """B: slot 0 holds the anchor, so a block proposes B - 1 tokens."""
    mask_token_id: int | None = None
    """An id with an embedding row that never occurs in text. None: the first unused row of the target's table."""
    num_heads: int | None = None
    """Query heads. None: the target's."""
    num_kv_heads: int | None = None
    """Key and value heads. None: the target's."""
    head_dim: int | None = None
    """None: the target's."""
    intermediate_size: int | None = None
    """FFN width. None: the target's."""
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    """One per layer. None: all full."""
    sliding_window: int | None = None
    """Window of the sliding layers, the current token included."""
    is_causal: bool | None = None
    """In-block rule of all layers. None, as servers do: full layers see the whole block, sliding ones up to a slot."""
    fp8: bool = False
    """Train the layers' linear layers with FP8 products; the weights stay what they are (a Hopper GPU or newer)."""


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    gamma: float | None = None
    """Slot k weighs exp(-(k-1)/gamma). None: 7, 5, 4 for block sizes 16, 10, 8, and 0.45 B otherwise."""
    chunk: int = 4_096
    """Rows of logits that exist at one time."""
    topk: int = 5
    """Width of the top-k accuracy metric."""
    fp8: bool = False
    """Both products of the frozen head in FP8 (a Hopper GPU or newer)."""


@dataclass(frozen=True, kw_only=True)
class OptimOptions:
    kind: Literal["adamw", "muon"] = "adamw"
    """muon: matrices by Muon, its steps scaled to the size of AdamW's; the rest by AdamW."""
    lr: float = 6e-4
    """Peak learning rate."""
    momentum: float | None = None
    """Muon's. None: 0.95."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """On matrices only."""
    warmup: float = 0.04
    """Share of the steps spent warming up; then a cosine falls to min_lr."""
    min_lr: float = 0.0
    """Final learning rate as a share of the peak."""
    clip: float = 1.0
    """Largest global gradient norm."""
    epochs: int = 6
    """Passes over the data; the number of steps follows from it."""
    steps: int | None = None
    """Stop after this many steps instead; the schedule ends there too."""
    packs_per_step: int = 1
    """Packs whose gradients are summed before one optimizer step."""
    noise: Literal["none", "uniform", "gaussian"] = "none"
    """Augmentation of the context features."""
    noise_scale: float = 0.0
    """Half width (uniform) or standard deviation (gaussian) as a share of each feature channel's size."""
    feature_scale: bool = False
    """Train fc on channels scaled to unit size; folded into its weights, so the served format is unchanged. Off: it
    lost in the ablation of docs/log.md."""
    max_skipped: int = 3
    """Stop (exit code 5) after this many steps skipped for a non-finite gradient."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    every: int = 500
    """Steps between checkpoints; the last step always saves."""
    keep: int = 2
    """Newest checkpoints kept, at least 2; the best by decoded acceptance length is kept besides."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    prompts: str = ""
    """JSONL of held-out prompts ({"messages": [...]} or {"prompt": "..."} a line). Empty: no decoding in training."""
    every: int = 500
    """Steps between evaluations by real speculative decoding; the last step always evaluates."""
    at_start: bool = False
    """Also evaluate before the first step."""
    limit: int = 16
    """Prompts used."""
    max_new_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0: no limit."""
    top_p: float = 1.0
    enable_thinking: bool | None = None
    """Given to the chat template. None: as data.enable_thinking of the run, or the template's own default."""
    template_kwargs: str = ""
    """More arguments of the chat template, as a JSON object. Empty: as data.template_kwargs of the run."""


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    every: int = 10
    """Steps between lines of metrics; they are read from the device only then."""
    tensorboard: bool = False
    """Also write TensorBoard events (needs the tensorboard package)."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    processes: int | None = None
    """Processes of this host, one for each GPU. None: all visible GPUs, 1 on a CPU. Not inside torchrun, which has
    started them already."""
    targets: int | None = None
    """Layout split: target processes. None: what the drafters leave."""
    drafters: int | None = None
    """Layout split: drafter processes. None: what the targets leave."""
    target_ranks: int = 1
    """Layout split: target processes that share one copy of the target's weights, where it does not fit one GPU."""
    queue_depth: int = 2
    """Layout split: packs that may be on their way from a target to a drafter."""
    canonical: bool = False
    """Sum gradients in a fixed tree over packs, so that 1, 2, 4, ... drafter processes give the same bits."""
    max_restarts: int = 0
    """Times that a run whose process died is started again from its last checkpoint."""
    hang_seconds: float = 30.0
    """A process that stays longer in one part of a step (and ten times longer than before) is taken for hung."""
    trace: int = 0
    """Write the spans of so many steps of all processes to RUN/trace.json (Chrome trace format)."""


@dataclass(frozen=True, kw_only=True)
class RegenerateOptions:
    prompts: str = ""
    """JSONL of prompts ({"messages": [...]} or {"prompt": "..."} a line)."""
    output: str = ""
    """JSONL of conversations with the target's answers; appended to, so a killed run resumes."""
    max_new_tokens: int = 256
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0: no limit."""
    top_p: float = 1.0
    batch: int = 32
    """Prompts answered side by side on this machine; where an answer ends, the next prompt takes its place."""
    limit: int | None = None
    """Answer only the first so many prompts."""
    unfinished: Literal["keep", "drop"] = "keep"
    """Answers cut by max_new_tokens: kept without an end token, or dropped; counted either way."""
    seed: int = 0
    template_kwargs: str = ""
    """Arguments of the chat template, as a JSON object: {"enable_thinking": false}. Kept with the rows."""
    servers: tuple[str, ...] = ()
    """Addresses (http://localhost:8000/v1) of OpenAI-compatible servers of the target that answer instead."""
    model: str = ""
    """Its name there. Empty: the only one served."""
    api_key_env: str = ""
    """Name of the environment variable that holds the key, if they ask for one."""
    concurrency: int = 64
    """Requests in flight, over all servers."""
    timeout: float = 600.0
    """Seconds until a request is given up and tried again."""
    retries: int = 5
    """Further tries of a request, after growing pauses."""
    turns: Literal["last", "all"] = "last"
    """last: answer the last question. all: answer every question in turn, given answers (not tool calls) replaced."""
    token_ids: bool = False
    """Keep the answers' token ids with the rows, so that prepare uses the very tokens. Servers: vLLM gives them."""
    drafter: str = ""
    """Without servers: a trained drafter of this target (a run, a checkpoint or an export), for the same answers in
    fewer steps of the target."""
    cuda_graph: bool = False
    """Without servers, on a GPU: replay each step as a CUDA graph, where the GPU would wait for the host."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run."""

    run: str = ""
    """Folder of the run: recipe, metrics, checkpoints, results."""
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    layout: Literal["colocated", "split", "offline"] = "colocated"
    """colocated: every process runs the target before its step. split: target processes send features to drafter
    processes (see pipeline). offline: the target runs once for each sample; its features stay on disk."""
    compile: Literal["auto", "off", "layer", "on"] = "auto"
    """What torch.compile sees: off (attention only), each layer of the drafter, or all of it. auto: all, on a GPU."""
    recompute: Literal["none", "mlp", "layer"] = "none"
    """What of a draft layer the backward pass computes again, to save memory: nothing, the MLP, or the whole layer."""
    cuda_graph: bool = False
    """Replay the whole step as one CUDA graph: for packs so small that the GPU waits for the host."""
    init: str = ""
    """Trained drafter to start from (warm start): a run's checkpoint, or a folder or Hub name (ORG/NAME[@REVISION]) in
    z-lab's or Speculators' layout."""
    at_end: Literal["verify", "export", "nothing"] = "verify"
    """After the last step: export the best checkpoint to RUN/export and check it afresh, export only, or neither."""
    target: TargetOptions = field(default_factory=TargetOptions)
    data: DataOptions = field(default_factory=DataOptions)
    pack: PackOptions = field(default_factory=PackOptions)
    drafter: DFlashOptions = field(default_factory=DFlashOptions)
    loss: LossOptions = field(default_factory=LossOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    log: LogOptions = field(default_factory=LogOptions)
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    regenerate: RegenerateOptions = field(default_factory=RegenerateOptions)


def flatten(table: dict, prefix: str = "") -> dict[str, object]:
    """Nested tables as one level, keys joined by dots."""
    flat: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def to_toml(recipe: Recipe) -> str:
    """The resolved recipe as TOML; what is None is left out, and absence means the default. Left out too: the leave to
    run a target's code, which no file can give."""
    top: list[str] = []
    tables: list[str] = []
    for name, value in vars(recipe).items():
        if is_dataclass(value):
            lines = [
                f"{k} = {json.dumps(v)}" for k, v in vars(value).items() if v is not None and k != "trust_remote_code"
            ]
            tables.append(f"\n[{name}]\n" + "\n".join(lines) + "\n")
        elif value is not None:
            top.append(f"{name} = {json.dumps(value)}\n")
    return "".join(top + tables)
