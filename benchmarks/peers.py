"""The drafter's step of two public trainers beside ours: same GPU, same process, same work, their own classes.

They are installed without their dependencies, each in a folder of its own below the one given with `--peers`:

    pip install --no-deps --target PEERS/specforge specforge
    pip install --no-deps --target PEERS/speculators speculators

Work: 16,384 tokens in documents of 2,048, 2,048 anchors, block 16, full attention, cross-entropy, AdamW, features ready
on the GPU. SpecForge takes the documents as rows of a batch, speculators as one packed row.
"""

from __future__ import annotations

import importlib.metadata
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import Qwen3Config

from benchmarks import step
from benchmarks.measure import clean, peak_gib, seconds_of, spread, sustained_rate
from benchmarks.step import Shape

LIMIT = 150  # seconds after which a peer is given up, compilation included


def _config(shape: Shape, attention: str) -> Qwen3Config:
    config = Qwen3Config(
        **shape.sizes,
        num_hidden_layers=shape.layers,
        max_position_embeddings=shape.document,
        layer_types=["full_attention"] * shape.layers,
    )
    config._attn_implementation = attention
    return config


def specforge(shape: Shape, device: torch.device, attention: str = "flex_attention") -> Callable[[], object]:
    """Its DFlash wrapper with its chunked loss, and its AdamW over fp32 masters."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel  # pyright: ignore
    from specforge.modeling.draft.dflash import DFlashDraftModel  # pyright: ignore
    from specforge.optimizer import BF16Optimizer  # pyright: ignore

    config = _config(shape, attention)
    config.block_size, config.num_target_layers = shape.block, 36
    config.dflash_config = {"mask_token_id": 0, "target_layer_ids": list(range(shape.taps))}
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        draft = DFlashDraftModel(config).to(kind)
        head = nn.Linear(shape.hidden, shape.vocabulary, bias=False).to(kind).requires_grad_(False)
        embedding = nn.Embedding(shape.vocabulary, shape.hidden).to(kind).requires_grad_(False)
    rows = shape.tokens // shape.document
    model = OnlineDFlashModel(
        draft, head, embedding, mask_token_id=0, block_size=shape.block, attention_backend=attention,
        num_anchors=shape.anchors // rows, loss_decay_gamma=7.0,
    ).train()  # fmt: skip
    optimizer = BF16Optimizer(draft, lr=1e-4)
    tokens = torch.randint(1, shape.vocabulary, (rows, shape.document), device=device)
    features = torch.randn(rows, shape.document, shape.taps * shape.hidden, device=device, dtype=kind)
    supervised = torch.ones(rows, shape.document, device=device)

    def action() -> None:
        loss, *_ = model(tokens, features, supervised)
        loss.backward()
        optimizer.step()

    return action


def speculators(shape: Shape, device: torch.device, attention: str = "simple_flex_attention") -> Callable[[], object]:
    """Its draft model, compiled as it does itself, with its fused cross-entropy; torch's fused AdamW."""
    from speculators.config import SpeculatorsConfig, VerifierConfig  # pyright: ignore
    from speculators.losses import resolve_loss_config  # pyright: ignore
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig  # pyright: ignore
    from speculators.proposals.greedy import GreedyTokenProposalConfig  # pyright: ignore

    greedy = GreedyTokenProposalConfig(speculative_tokens=shape.block - 1)
    config = DFlashSpeculatorConfig(
        transformer_layer_config=_config(shape, attention),
        draft_vocab_size=shape.vocabulary,
        block_size=shape.block,
        aux_hidden_state_layer_ids=list(range(shape.taps)),
        mask_token_id=0,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[greedy],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = DFlashDraftModel(config).to(kind).train()
    with torch.no_grad():
        for frozen in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
            frozen.weight.normal_(0, 0.02)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    documents = torch.arange(shape.tokens, device=device) // shape.document
    inputs = {
        "hidden_states": torch.randn(1, shape.tokens, shape.taps * shape.hidden, device=device, dtype=kind),
        "input_ids": torch.randint(1, shape.vocabulary, (1, shape.tokens), device=device),
        "loss_mask": torch.ones(1, shape.tokens, device=device),
        "verifier_last_hidden_states": torch.randn(1, shape.tokens, shape.hidden, device=device, dtype=kind),
        "document_ids": documents[None],
        "position_ids": (torch.arange(shape.tokens, device=device) % shape.document)[None],
    }
    loss_config = resolve_loss_config("ce", "fused" if device.type == "cuda" else "eager")

    def action() -> None:
        _, loss, _ = model(**inputs, loss_config=loss_config, gamma=7.0, max_anchors=shape.anchors)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return action


PEERS = {"specforge": specforge, "speculators": speculators}


def run(shape: Shape, device: torch.device, folder: Path, repeats: int) -> list[dict]:
    """Our row, with the ratio to each peer that ran, and a row for each peer."""
    rate = sustained_rate(device, 5.0)
    own = step.run(shape, device, "on", repeats, rate)
    rows = [{"who": "draftsmith", **own, "ratio_to": {}}]
    for name, build in PEERS.items():
        clean(device)
        sys.path.insert(0, str(folder / name))
        version = importlib.metadata.version(name)
        try:
            times = spread(_limited(lambda build=build: seconds_of(build(shape, device), device, repeats, warmup=3)))
        except Exception as error:  # whatever a peer does not survive here is its row
            rows.append({"who": f"{name} {version}", "failed": f"{type(error).__name__}: {error}"[:600]})
        else:
            seconds = times["seconds_median"]
            share = step.useful_flop(shape, shape.anchors * (shape.block - 1)) / seconds / rate
            rows.append(
                {
                    "who": f"{name} {version}",
                    "tokens": shape.tokens,
                    "anchors": shape.anchors,
                    "block": shape.block,
                    "document": shape.document,
                    **times,
                    "tokens_per_s": shape.tokens / seconds,
                    "share_of_sustained": share,
                    "peak_memory_gib": peak_gib(device),
                }
            )
            rows[0]["ratio_to"][f"{name} {version}"] = seconds / own["seconds_median"]
        sys.path.remove(str(folder / name))
    return rows


def _limited(action: Callable[[], list[float]]) -> list[float]:
    def give_up(*_) -> None:
        raise TimeoutError(f"not ready after {LIMIT} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT)
    try:
        return action()
    finally:
        signal.alarm(0)
