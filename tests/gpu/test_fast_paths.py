"""Every fast path of a GPU equals its slow reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftsmith.anchors import BlockShape, build_blocks
from draftsmith.drafters.attention import attend
from draftsmith.flex import flex_mask
from draftsmith.losses import _chunk, frozen_head_loss
from draftsmith.visibility import dense_mask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's own advice about precision and compilation is not about this code
    pytest.mark.filterwarnings("ignore"),
]

CUDA = torch.device("cuda")


def random_blocks(seed: int, *, tokens: int, anchors: int, size: int, window: int | None):
    """Documents of 1 to 400 tokens, a padded tail, anchors in them (fewer than there are slots), some very close."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(np.concatenate([[1], rng.integers(1, 400, 64)]))
    ends = ends[ends <= tokens - 37]
    starts = np.concatenate([[0], ends[:-1]])
    used = int(rng.integers(1, anchors))
    anchor = np.sort(rng.choice(ends[-1], min(used, ends[-1]), replace=False))
    which = np.searchsorted(ends, anchor, side="right")
    shape = BlockShape(block_size=size, mask_token_id=0, gamma=4.0, window=window)
    supervised = np.arange(tokens) < ends[-1]
    values = rng.integers(1, 99, tokens)
    return build_blocks(values, supervised, anchor, starts[which], ends[which], anchors, shape)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("size", "window"), [(16, None), (8, 200), (4, 3), (16, 9)])
def test_flex_attention_equals_dense(seed: int, size: int, window: int | None) -> None:
    tokens, anchors, dim = 1024, 1024 // size, 64
    blocks = random_blocks(seed, tokens=tokens, anchors=anchors, size=size, window=window).to(CUDA)
    spans = blocks.full if window is None else blocks.sliding
    torch.manual_seed(seed)
    query = torch.randn(anchors * size, 4, dim, device=CUDA, requires_grad=True)
    key, value = (torch.randn(tokens + anchors * size, 2, dim, device=CUDA, requires_grad=True) for _ in range(2))
    upstream = torch.randn_like(query)
    results = []
    for mask in (dense_mask(spans, tokens), flex_mask(spans, tokens)):
        out = attend(query, key, value, mask)
        results.append([out, *torch.autograd.grad(out, (query, key, value), upstream)])
    for slow, fast in zip(*results, strict=True):
        assert torch.isfinite(fast).all()
        assert (slow - fast).norm() / slow.norm() < 2e-3  # flex multiplies in tf32


@pytest.mark.parametrize(("rows", "vocabulary"), [(64, 151_936), (7, 4_096), (33, 5_001)])
def test_row_kernel_equals_reference(rows: int, vocabulary: int) -> None:
    from draftsmith.row_kernel import loss_and_slope_

    torch.manual_seed(rows)
    logits = (torch.randn(rows, vocabulary, device=CUDA) * 4).bfloat16()
    label = torch.randint(vocabulary, (rows,), device=CUDA)
    label[::3] = logits.argmax(dim=1)[::3]
    weight = torch.rand(rows, device=CUDA)
    weight[1] = 0.0
    found = []
    for action in (_chunk, None):
        nll = torch.full((rows,), torch.nan, device=CUDA)
        correct, topk = (torch.zeros(rows, dtype=torch.bool, device=CUDA) for _ in range(2))
        copy = logits.clone()
        if action:
            copy = action(copy, label, weight, nll, correct, topk, 5)
        else:
            loss_and_slope_(copy, label, weight, nll, correct, topk, 5)
        found.append((nll, copy.float(), correct, topk))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-2, atol=1e-6)
    assert torch.equal(found[1][2], found[0][2]) and found[0][2].any()
    assert torch.equal(found[1][3], found[0][3])


def test_bf16_loss_gradient_against_float64() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(300, 256, device=CUDA).bfloat16().requires_grad_()
    head = (torch.randn(5_000, 256, device=CUDA) * 0.1).bfloat16()
    label, weight = torch.randint(5_000, (300,), device=CUDA), torch.rand(300, device=CUDA)
    out = frozen_head_loss(hidden, head, label, weight, chunk=128)
    out.total.backward()
    exact = hidden.detach().double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(exact @ head.double().T, label, reduction="none")
    (losses * weight.double()).sum().backward()
    assert abs(float(out.total) / float((losses * weight).sum()) - 1) < 2e-3
    assert (hidden.grad.double() - exact.grad).norm() / exact.grad.norm() < 1e-2


def test_fused_adamw_equals_torch() -> None:
    """The kernel on bf16 weights against torch's AdamW on the masters, scaled and not, skipped steps included."""
    from draftsmith.config import OptimOptions
    from draftsmith.optim import MasterAdamW

    torch.manual_seed(0)
    options = OptimOptions(weight_decay=0.1, clip=0.5)
    scales = {"0.weight": torch.rand(96, device=CUDA) + 0.5}
    results = []
    for fused in (True, False):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(96, 65), torch.nn.Linear(65, 33)).to(CUDA, torch.bfloat16)
        optimizer = MasterAdamW(model, options, scales)
        if not fused:
            optimizer._update_fused = optimizer._update
        for step in range(6):
            for weight in model.parameters():
                weight.grad = torch.randn_like(weight)
            if step == 3:
                next(model.parameters()).grad[0, 0] = torch.inf
            _, skipped = optimizer.step(torch.tensor(3.0, device=CUDA), 1e-2)
            assert float(skipped) == (step == 3)
        results.append((optimizer.tensors(), [w.detach().clone() for w in model.parameters()]))
    for name, slow in results[1][0].items():
        torch.testing.assert_close(results[0][0][name], slow, rtol=1e-5, atol=1e-6)
    for fast, slow in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_packed_target_equals_documents_alone(kind: str) -> None:
    from types import SimpleNamespace

    from draftsmith.targets import HFTarget
    from draftsmith.targets.packed_attention import NAME
    from tests.tiny import tiny_target

    model = tiny_target(kind, hidden=64).to(CUDA)
    model.set_attn_implementation(NAME)
    target = HFTarget(model, SimpleNamespace(eos_token_id=2), (0, 2))
    lengths = [1, 100, 7, 148]
    tokens = torch.randint(3, 250, (256,), device=CUDA)
    start = torch.repeat_interleave(torch.tensor([0, 1, 101, 108]), torch.tensor(lengths)).to(CUDA)
    index = torch.arange(256, device=CUDA)
    packed = target.capture(SimpleNamespace(tokens=tokens, position=index - start, doc_start=start)).context
    at = 0
    for length in lengths:
        _, alone = target.extend(tokens[at : at + length], target.new_cache())
        assert (packed[at : at + length] - alone).norm() / alone.norm() < 5e-3
        at += length
