"""Draft attention alone, forward and backward, under several kernel options and document shapes."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.measure import seconds_of
from benchmarks.step import Shape, blocks
from draftsmith import flex

FORWARD = [
    {},
    {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3},
    {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 128, "fwd_num_warps": 8, "fwd_num_stages": 3},
    {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 8, "fwd_num_stages": 3},
]
TILES = [(64, 128, 8, 2), (64, 128, 8, 3), (64, 128, 4, 2), (32, 128, 8, 3), (64, 64, 4, 3)]
BACKWARD = [
    {
        "bwd_BLOCK_M1": narrow,
        "bwd_BLOCK_N1": wide,
        "bwd_BLOCK_M2": wide,
        "bwd_BLOCK_N2": narrow,
        "bwd_num_warps": warps,
        "bwd_num_stages": stages,
    }
    for narrow, wide, warps, stages in TILES
]


def run(shape: Shape, device: torch.device, options: dict, repeats: int = 10) -> dict:
    """One row: seconds of the forward pass and of the backward pass of one layer."""
    torch.manual_seed(0)
    _, made = blocks(shape, device)
    slots = shape.anchors * shape.block
    spans = made.sliding if shape.window else made.full
    query = torch.randn(1, shape.heads, slots, shape.head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    key, value = (
        torch.randn(1, shape.kv_heads, shape.tokens + slots, shape.head_dim, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    key.requires_grad_()
    value.requires_grad_()
    flex.TILES[shape.head_dim] = options or None
    mask = flex.flex_mask(spans, shape.tokens)
    out = flex.flex(query, key, value, mask)
    upstream = torch.randn_like(out)
    forward = seconds_of(lambda: flex.flex(query, key, value, mask), device, repeats)
    backward = seconds_of(
        lambda: torch.autograd.grad(out, (query, key, value), upstream, retain_graph=True), device, repeats
    )
    seen = min(shape.document / 2, shape.window or shape.document) + shape.block
    flop = 4 * shape.heads * shape.head_dim * seen * slots
    return {
        "tokens": shape.tokens, "anchors": shape.anchors, "block": shape.block, "document": shape.document,
        "window": shape.window or 0, "options": " ".join(f"{k}={v}" for k, v in options.items()) or "default",
        "forward_seconds": min(forward), "backward_seconds": min(backward),
        "forward_tflops": flop / min(forward) / 1e12, "backward_tflops": 2.5 * flop / min(backward) / 1e12,
    }  # fmt: skip


def search(shape: Shape, device: torch.device) -> tuple[list[dict], dict]:
    """Rows for every option set, and the best forward and backward ones together."""
    rows, best = [], {}
    for part, sets in (("forward", FORWARD), ("backward", [{}, *BACKWARD])):
        timed = []
        for options in sets:
            torch.compiler.reset()
            try:
                rows.append(run(shape, device, options))
                timed.append((rows[-1][f"{part}_seconds"], options))
            except (RuntimeError, torch._inductor.exc.InductorError) as error:  # options that do not fit the chip
                print(f"{part} {options}: {str(error).splitlines()[0][:100]}", flush=True)
        best |= min(timed, key=lambda item: item[0])[1]
    return rows, best


def windows(device: torch.device, options: dict) -> list[dict]:
    """One long document under a window against documents of the window's length."""
    long = replace(Shape(), tokens=49_152, anchors=6_144, document=49_152, window=2_048)
    torch.compiler.reset()
    return [run(long, device, options), run(replace(long, document=2_048, window=None), device, options)]
