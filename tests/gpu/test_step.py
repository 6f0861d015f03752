"""The whole step: replayed as a CUDA graph, recomputed, with Muon; each against the plain step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import step as bench
from draftsmith.anchors import BlockShape, build_blocks
from draftsmith.config import OptimOptions
from draftsmith.graph import StepGraphs
from draftsmith.optim import MasterAdamW
from draftsmith.types import Pack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

CUDA = torch.device("cuda")
SHAPE = replace(bench.TOY, hidden=128, head_dim=32, chunk=128)


def pack_of(seed: int, used: int) -> Pack:
    """A pack of four documents with the given number of anchors."""
    rng = np.random.default_rng(seed)
    index = np.arange(SHAPE.tokens)
    start = index // SHAPE.document * SHAPE.document
    anchor = np.sort(rng.choice(SHAPE.tokens - SHAPE.block, used, replace=False))
    ends = start[anchor] + SHAPE.document
    shape = BlockShape(block_size=SHAPE.block, mask_token_id=0, gamma=7.0, window=None)
    tokens = rng.integers(1, SHAPE.vocabulary, SHAPE.tokens)
    made = build_blocks(tokens, np.ones(SHAPE.tokens, bool), anchor, start[anchor], ends, SHAPE.anchors, shape)
    whole = torch.from_numpy
    return Pack(
        tokens=whole(tokens), position=whole(index - start), doc_start=whole(start), doc_lengths=(128,) * 4,
        blocks=made, epoch=0, index=seed, samples=(), sample_ids=(), num_supervised=0, num_labelled=0,
    )  # fmt: skip


def state_of(step: bench.Step) -> dict[str, torch.Tensor]:
    return {**step.model.state_dict(), **step.optimizer.tensors()}


@pytest.mark.parametrize("compile_mode", ["off", "on"])
def test_replayed_step_is_the_eager_one_bit_for_bit(compile_mode: str) -> None:
    """20 steps with changing packs, rates, numbers of loss rows and metrics; one of them with a broken gradient."""
    torch.compiler.reset()
    steps = [bench.Step(SHAPE, CUDA, compile_mode) for _ in range(2)]
    packs = [pack_of(seed, 60 if seed % 3 else 25) for seed in range(20)]

    def work(step: bench.Step, pack: Pack, topk: int) -> dict[str, torch.Tensor]:
        rows = -(-pack.blocks.num_rows // SHAPE.chunk) * SHAPE.chunk
        made = replace(pack.blocks, num_rows=min(rows, pack.blocks.rows.shape[0]))
        loss = step.loss(made)
        loss.total.backward()
        norm, skipped = step.optimizer.step(loss.weight, None)
        step.optimizer.zero_grad()
        return {**loss.parts, "norm": norm, "skipped": skipped}

    graphs = StepGraphs(CUDA, lambda pack, topk: work(steps[1], pack, topk))
    skips = 0
    for number, pack in enumerate(packs):
        for step in steps:
            step.optimizer.rate.fill_(1e-3 * (number + 1) / 20)
            step.context.fill_(torch.inf) if number == 11 else step.context.normal_(
                generator=torch.Generator(CUDA).manual_seed(number)
            )
        plain = work(steps[0], pack.to(CUDA), 0)
        rows = min(-(-pack.blocks.num_rows // SHAPE.chunk) * SHAPE.chunk, pack.blocks.rows.shape[0])
        replayed = graphs.run(pack, rows, 0)
        skips += int(plain["skipped"])
        for name, value in plain.items():
            assert torch.equal(value, replayed[name]) or number == 11, (number, name)
    assert skips == 1
    assert len([found for found in graphs.graphs.values() if found]) == 2
    ours, theirs = map(state_of, steps)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("compile_mode", ["off", "layer", "on"])
@pytest.mark.parametrize("recompute", ["mlp", "layer"])
def test_recomputing_changes_memory_only(compile_mode: str, recompute: str) -> None:
    torch.compiler.reset()
    found = []
    for kind in ("none", recompute):
        step = bench.Step(SHAPE, CUDA, compile_mode, recompute=kind)
        kept = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = step.loss()
        loss.total.backward()
        found.append((kept, float(loss.total), [weight.grad.float() for weight in step.model.parameters()]))
    assert found[1][0] < found[0][0]
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-3)
    for plain, again in zip(found[0][2], found[1][2], strict=True):
        assert (plain - again).norm() / plain.norm() < 2e-2


def test_muon_on_bf16_weights_equals_the_reference() -> None:
    options = OptimOptions(kind="muon", weight_decay=0.1, clip=0.5)
    results = []
    for fused in (True, False):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Linear(64, 32)).to(CUDA, torch.bfloat16)
        optimizer = MasterAdamW(model, options, {"0.weight": torch.linspace(0.5, 2, 96, device=CUDA)})
        if not fused:
            optimizer._update_fused = optimizer._update
        for number in range(5):
            for weight in model.parameters():
                weight.grad = torch.randn_like(weight)
            if number == 2:
                next(model.parameters()).grad[0, 0] = torch.nan
            _, skipped = optimizer.step(torch.tensor(3.0, device=CUDA), 1e-2)
            assert float(skipped) == (number == 2)
        results.append(optimizer.tensors())
    assert any(name.startswith("momentum_buffer.") for name in results[0])
    for name, slow in results[1].items():
        torch.testing.assert_close(results[0][name], slow, rtol=1e-4, atol=1e-5)
