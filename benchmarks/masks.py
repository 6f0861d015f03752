"""Building an attention mask: the intervals' own tile lists against torch's `create_block_mask`, compiled."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.measure import clean, peak_gib, seconds_of, spread
from benchmarks.step import Shape, blocks
from draftsmith.flex import flex_mask
from draftsmith.visibility import TILE, tile_lists


def run(shape: Shape, device: torch.device, repeats: int) -> dict:
    """One row. Our lists may hold a tile without need, never miss one."""
    clean(device)
    _, made = blocks(shape, device)
    spans = made.sliding if shape.window else made.full
    slots = shape.anchors * shape.block
    make = create_block_mask if device.type == "cpu" else torch.compile(create_block_mask, dynamic=False)

    def peer():
        rule = flex_mask(spans, shape.tokens).mask_mod
        return make(rule, None, None, slots, shape.tokens + slots, device=device, BLOCK_SIZE=TILE)

    ours, theirs = flex_mask(spans, shape.tokens), peer()
    listed, needed = ours.to_dense().bool(), theirs.to_dense().bool()
    assert not (needed & ~listed).any(), "a tile that holds something is not listed"
    peak = peak_gib(device)
    listing = tile_lists if device.type == "cpu" else torch.compile(tile_lists, dynamic=False)
    own = seconds_of(lambda: listing(spans, shape.tokens), device, repeats)
    other = spread(seconds_of(peer, device, repeats))
    return {
        "tokens": shape.tokens,
        "anchors": shape.anchors,
        "block": shape.block,
        "document": shape.document,
        "window": shape.window or 0,
        **spread(own),
        "tiles_listed_to_needed": float(listed.sum() / needed.sum()),
        "peer_seconds_median": other["seconds_median"],
        "ratio_to": {"create_block_mask": other["seconds_median"] / spread(own)["seconds_median"]},
        "peak_memory_gib": peak,
    }
