"""Capturing features: the frozen target over packed documents, up to the last tapped block."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.measure import clean, peak_gib, seconds_of, spread, sustained_rate
from benchmarks.step import Shape
from draftsmith.targets import HFTarget
from draftsmith.targets.packed_attention import NAME


def build(shape: Shape, device: torch.device, num_layers: int, layer_ids: tuple[int, ...]) -> HFTarget:
    """A random Qwen3 of the drafter's width."""
    config = Qwen3Config(
        **shape.sizes,
        num_hidden_layers=num_layers,
        attn_implementation=NAME,
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(dtype=dtype)
    return HFTarget(model, SimpleNamespace(eos_token_id=None), layer_ids)


def useful_flop(shape: Shape, num_layers: int) -> float:
    kv = shape.kv_heads * shape.head_dim
    per_layer = 2 * shape.hidden * (shape.heads * shape.head_dim + kv) + 3 * shape.hidden * shape.intermediate
    attention = 4 * shape.heads * shape.head_dim * shape.document / 2
    return (2 * per_layer + attention) * num_layers * shape.tokens


def run(
    target: HFTarget,
    shape: Shape,
    device: torch.device,
    compiled: bool,
    repeats: int,
    rate: float | None = None,
    *,
    fp8=False,
) -> dict:
    """One row of results."""
    clean(device)
    if fp8:
        target.capture_in_fp8()
    if compiled:
        target.compile_layers()
    index = torch.arange(shape.tokens, device=device)
    start = index // shape.document * shape.document
    tokens = torch.randint(shape.vocabulary, (shape.tokens,), device=device)
    pack = SimpleNamespace(tokens=tokens, position=index - start, doc_start=start)
    times = seconds_of(lambda: target.capture(pack), device, repeats, warmup=3)
    rate = rate or sustained_rate(device, 5.0 if device.type == "cuda" else 0.5, 8192 if device.type == "cuda" else 512)
    figures = spread(times)
    return {
        "tokens": shape.tokens,
        "document": shape.document,
        "layers_run": max(target.layer_ids) + 1,
        "compiled": compiled,
        "fp8": fp8,
        **figures,
        "tokens_per_s": shape.tokens / figures["seconds_median"],
        "share_of_sustained": useful_flop(shape, max(target.layer_ids) + 1) / figures["seconds_median"] / rate,
        "sustained_tflops": rate / 1e12,
        "peak_memory_gib": peak_gib(device),
    }
