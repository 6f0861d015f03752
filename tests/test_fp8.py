"""FP8 products: the reference's arithmetic, and that nothing but the intended layers changes. Kernels: tests/gpu."""

import pytest
import torch
from torch import nn

from draftsmith import fp8
from draftsmith.losses import frozen_head_loss
from tests.handmade import tiny_drafter


def near(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(((one.double() - other.double()).norm() / other.double().norm()).detach())


def test_rows_are_scaled_to_the_largest_number():
    x = torch.randn(5, 32) * torch.logspace(-4, 4, 5)[:, None]
    values, scale = fp8.quantise(x)
    assert values.dtype == torch.float8_e4m3fn
    assert torch.equal(values.float().abs().amax(dim=1), torch.full((5,), fp8.LARGEST))
    torch.testing.assert_close(values.float() * scale, x, rtol=0.0, atol=float("inf"))
    assert ((values.float() * scale - x).abs() <= x.abs() / 16 + scale * 2**-9).all()  # half a unit in the last place


def test_rows_of_zeros_stay_zeros():
    values, scale = fp8.quantise(torch.zeros(2, 16))
    assert not values.float().any() and (scale > 0).all()


def test_product_has_the_known_error():
    torch.manual_seed(0)
    a, b = torch.randn(64, 512), torch.randn(48, 512)
    out = fp8.multiply(fp8.quantise(a), fp8.quantise(b), torch.float32, fast=True)
    assert near(out, a @ b.T) == pytest.approx(0.0375, abs=0.002)


@pytest.mark.parametrize("size", [0.02, 0.2])
def test_head_gradient_is_near_the_real_one(size: float):
    """Rows whose label is sure, unlikely, or weighs nothing."""
    torch.manual_seed(0)
    hidden = torch.randn(96, 128, requires_grad=True)
    head = torch.randn(4_992, 128) * size
    label = torch.randint(4_992, (96,))
    label[::3] = (hidden @ head.T).argmax(dim=1)[::3]
    weight = torch.rand(96)
    weight[7] = 0.0
    found = []
    for fp8_head in (None, fp8.quantised_head(head)):
        hidden.grad = None
        out = frozen_head_loss(hidden, head, label, weight, chunk=40, topk=5, fp8_head=fp8_head)
        out.total.backward()
        found.append((float(out.total.detach()), hidden.grad))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-2)
    assert near(found[1][1], found[0][1]) < 0.05
    assert not found[1][1][7].any()


def test_training_in_fp8_keeps_names_and_weights_and_serves_the_real_layer():
    plain, quantised = tiny_drafter(), tiny_drafter()
    fp8.train_in_fp8(quantised.layers)
    assert {k: tuple(v.shape) for k, v in plain.state_dict().items()} == {
        k: tuple(v.shape) for k, v in quantised.state_dict().items()
    }
    linear = quantised.layers[0].mlp.gate_proj
    assert type(linear) is fp8.TrainedLinear and type(quantised.fc) is nn.Linear
    x = torch.randn(32, 32, requires_grad=True)
    out = linear.train()(x)
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, (x, linear.weight), upstream)
    real = plain.layers[0].mlp.gate_proj
    assert 1e-3 < near(out, real(x)) < 0.06
    for fast, slow in zip(grads, torch.autograd.grad(real(x), (x, real.weight), upstream), strict=True):
        assert 1e-3 < near(fast, slow) < 0.06
    assert torch.equal(linear.eval()(x), real(x))


def test_frozen_copy_shares_all_but_the_linear_layers():
    layer = tiny_drafter().layers[0].requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    twin = fp8.frozen_copy(layer)
    assert isinstance(twin.mlp.up_proj, fp8.FrozenLinear) and type(layer.mlp.up_proj) is nn.Linear
    assert twin.input_layernorm.weight is layer.input_layernorm.weight
    x = torch.randn(2, 16, 32)
    assert 1e-3 < near(twin.mlp.up_proj(x), layer.mlp.up_proj(x)) < 0.06
    assert twin.mlp.up_proj(x).shape == (2, 16, layer.mlp.up_proj.out_features)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def test_a_cpu_is_refused():
    assert "capability 9.0" in (fp8.refusal(torch.device("cpu"), torch.bfloat16, {}) or "")
