"""FP8 products and kernels equal their references, and stay near the numbers they stand in for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from draftsmith import fp8
from draftsmith.losses import _fp8_slope, frozen_head_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs a CUDA device with FP8 matrix units",
    ),
    pytest.mark.filterwarnings("ignore"),
]

CUDA = torch.device("cuda")


def near(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("shape", [(1, 16, 16), (7, 96, 160), (256, 4096, 512)])
@pytest.mark.parametrize("fast", [True, False])
def test_product_equals_reference(shape, fast: bool) -> None:
    rows, inner, columns = shape
    torch.manual_seed(0)
    a, b = fp8.quantise(torch.randn(rows, inner, device=CUDA)), fp8.quantise(torch.randn(columns, inner, device=CUDA))
    on_cpu = [fp8.Quantised(q.values.cpu(), q.scale.cpu()) for q in (a, b)]
    wanted = fp8.multiply(*on_cpu, torch.float32, fast=fast).to(CUDA)
    assert near(fp8.multiply(a, b, torch.bfloat16, fast=fast), wanted) < 5e-3


@pytest.mark.parametrize("inner", [16, 576, 5_008])
def test_row_quantiser_equals_reference(inner: int) -> None:
    from draftsmith.fp8_kernel import quantise_rows

    torch.manual_seed(inner)
    x = (torch.randn(9, inner, device=CUDA) * torch.logspace(-6, 6, 9, device=CUDA)[:, None]).bfloat16()
    x[4] = 0
    values, scale = quantise_rows(x, fp8.SMALLEST_SCALE)
    wanted = fp8.quantise(x)
    torch.testing.assert_close(scale, wanted.scale)
    assert near(values.float() * scale, wanted.values.float() * wanted.scale) < 1e-3


@pytest.mark.parametrize(("rows", "vocabulary"), [(64, 151_936), (7, 4_096), (33, 5_008)])
def test_loss_kernel_equals_reference(rows: int, vocabulary: int) -> None:
    from draftsmith.fp8_kernel import rows_

    torch.manual_seed(rows)
    logits = (torch.randn(rows, vocabulary, device=CUDA) * 4).bfloat16()
    label = torch.randint(vocabulary, (rows,), device=CUDA)
    label[::3] = logits.argmax(dim=1)[::3]
    weight = torch.rand(rows, device=CUDA)
    weight[1] = 0.0
    found = []
    for action in (_fp8_slope, rows_):
        nll = torch.full((rows,), torch.nan, device=CUDA)
        correct, topk = (torch.zeros(rows, dtype=torch.bool, device=CUDA) for _ in range(2))
        slope, scale, at_label = action(logits.clone(), label, weight, nll, correct, topk, 5)
        found.append((nll, correct, topk, slope.float() * scale, at_label))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-5)
    assert torch.equal(found[1][1], found[0][1]) and found[0][1].any()
    assert torch.equal(found[1][2], found[0][2])
    assert near(found[1][3], found[0][3]) < 5e-3  # an entry between two e4m3 numbers may round to either
    torch.testing.assert_close(found[1][4], found[0][4], rtol=1e-4, atol=1e-6)


def test_not_finite_stays_not_finite() -> None:
    x = torch.randn(32, 64, device=CUDA)
    x[3, 5] = torch.inf
    weight = fp8.quantise(torch.randn(48, 64, device=CUDA))
    out = fp8.multiply(fp8.quantise(x), weight, torch.bfloat16, fast=True)
    assert not out[3].isfinite().any() and out[:3].isfinite().all()


def test_head_gradient_is_near_the_real_one() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(512, 1024, device=CUDA).bfloat16().requires_grad_()
    head = (torch.randn(5_008, 1024, device=CUDA) * 0.1).bfloat16()
    label, weight = torch.randint(5_008, (512,), device=CUDA), torch.rand(512, device=CUDA)
    gradients = []
    for fp8_head in (None, fp8.quantised_head(head)):
        hidden.grad = None
        out = frozen_head_loss(hidden, head, label, weight, chunk=128, topk=5, fp8_head=fp8_head)
        out.total.backward()
        gradients.append((float(out.total), hidden.grad))
    assert abs(gradients[1][0] / gradients[0][0] - 1) < 1e-2
    assert near(gradients[1][1], gradients[0][1]) < 0.1


def test_trained_linear_is_near_the_real_one_and_is_it_in_evaluation() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(256, 512, bias=False)).to(CUDA, torch.bfloat16)
    quantised = torch.nn.Sequential(torch.nn.Linear(256, 512, bias=False)).to(CUDA, torch.bfloat16)
    quantised.load_state_dict(plain.state_dict())
    fp8.train_in_fp8(quantised)
    assert list(quantised.state_dict()) == list(plain.state_dict())
    quantised.compile(fullgraph=True, dynamic=False)
    x = torch.randn(384, 256, device=CUDA, dtype=torch.bfloat16)
    upstream = torch.randn(384, 512, device=CUDA, dtype=torch.bfloat16)
    results = []
    for model in (plain, quantised):
        inputs = x.clone().requires_grad_()
        out = model(inputs)
        out.backward(upstream)
        results.append((out, inputs.grad, model[0].weight.grad))
    for slow, fast in zip(*results, strict=True):
        assert 1e-3 < near(fast, slow) < 0.06  # quantised, and not more than that
    with torch.no_grad():
        assert torch.equal(quantised.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_features_are_near_the_real_ones(kind: str) -> None:
    from draftsmith.targets import HFTarget
    from draftsmith.targets.packed_attention import NAME
    from tests.tiny import tiny_target

    model = tiny_target(kind, hidden=64).to(CUDA, torch.bfloat16)
    model.set_attn_implementation(NAME)
    target = HFTarget(model, SimpleNamespace(eos_token_id=2), (0, 2))
    tokens = torch.randint(3, 250, (256,), device=CUDA)
    start = torch.zeros(256, dtype=torch.long, device=CUDA)
    pack = SimpleNamespace(tokens=tokens, position=torch.arange(256, device=CUDA), doc_start=start)
    before = target.capture(pack).context
    target.capture_in_fp8()
    assert 1e-3 < near(target.capture(pack).context, before) < 0.3  # 64 wide and random, so the error is large
    logits, _ = target.extend(tokens, target.new_cache())
    assert torch.equal(logits, model(tokens[None]).logits[0])  # decoding is the model's own
