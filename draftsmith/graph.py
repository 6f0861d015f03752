"""A whole step as one CUDA graph: forward, loss, backward, clipping and optimizer, replayed with a single launch.

For packs so small that the GPU waits for the host; the numbers are those of the eager step, bit for bit. Everything a
step reads lies where it lay when the graph was captured: the pack is copied into one fixed buffer, weights, moments and
learning rate never move, and gradients live in the graph's own memory. Steps that run other kernels (another number of
loss rows, top-k hits counted or not) are other graphs, captured when first met; a kind of step runs once as it is
before that, so that nothing compiles during a capture.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.types import Pack, staging_size


class StepGraphs:
    """Runs `work` on pack after pack and returns its tensors: each kind of step once as it is, then by replay."""

    def __init__(self, device: torch.device, work: Callable[[Pack, int], dict[str, Tensor]]) -> None:
        """`work` takes a pack on the device and the width of the top-k metric, and must not wait for the device."""
        self.device = device
        self.work = work
        self.stream = torch.cuda.Stream(device)
        self.graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, dict[str, Tensor]] | None] = {}
        self.buffer: Tensor | None = None

    def run(self, pack: Pack, rows: int, topk: int) -> dict[str, Tensor]:
        """One step on a pack that is still on the host; `rows` is how many slots `work` gives to the head."""
        if self.buffer is None:
            self.buffer = torch.empty(staging_size(pack), dtype=torch.uint8, device=self.device)
        here = pack.to(self.device, into=self.buffer)
        kind = (rows, topk)
        if kind not in self.graphs:
            self.graphs[kind] = None
            return self._as_it_is(here, topk)
        found = self.graphs[kind]
        if found is None:
            found = self.graphs[kind] = self._capture(here, topk)
        graph, outputs = found
        graph.replay()
        return {name: value.clone() for name, value in outputs.items()}

    def _as_it_is(self, pack: Pack, topk: int) -> dict[str, Tensor]:
        """On the stream of the captures, where autograd's nodes and the libraries' workspaces then already are."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            outputs = self.work(pack, topk)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return {name: value.clone() for name, value in outputs.items()}

    def _capture(self, pack: Pack, topk: int) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]:
        graph = torch.cuda.CUDAGraph()
        others = [found for found in self.graphs.values() if found]
        pool = others[0][0].pool() if others else None
        with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
            outputs = {name: value.detach() for name, value in self.work(pack, topk).items()}
        return graph, outputs
