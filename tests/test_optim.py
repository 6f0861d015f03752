"""fp32 masters, skipped steps, scaled weights, accumulation, the schedule, and a bit-exact state."""

import math

import pytest
import torch
from torch import nn

from draftsmith.config import OptimOptions
from draftsmith.drafters.dflash import DFlashDrafter
from draftsmith.drafters.layers import RMSNorm
from draftsmith.losses import drafted_rows, frozen_head_loss
from draftsmith.optim import MasterAdamW, learning_rate
from draftsmith.types import Pack
from tests.handmade import document, pack_of, random_embedding, random_features, shape_of, tiny_drafter

ONE = torch.ones(())


class Small(nn.Module):
    """A linear layer behind a norm, small enough to follow by hand."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = RMSNorm(8, 1e-6)
        self.fc = nn.Linear(8, 8, bias=False)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(x))


SCALE = torch.tensor([0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0])
KINDS = [
    (torch.float32, {}),
    (torch.bfloat16, {}),
    (torch.float32, {"fc.weight": SCALE}),
    (torch.bfloat16, {"fc.weight": SCALE}),
]


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, wanted = (torch.randn(16, 8, generator=generator) for _ in range(2))
    (model(x.to(model.fc.weight.dtype)).float() - wanted).square().sum().backward()


def train(model: nn.Module, optimizer: MasterAdamW, seeds, weight: torch.Tensor = 16 * ONE, lr: float = 1e-2) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        backward(model, seed)
        optimizer.step(weight, lr)


def snapshot(model: nn.Module, optimizer: MasterAdamW) -> dict[str, torch.Tensor]:
    """Weights, masters, moments and step counts."""
    return {k: v.detach().clone() for k, v in {**model.state_dict(), **optimizer.tensors()}.items()}


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


# Masters


def share_of_ones(weight: torch.Tensor) -> float:
    return float((weight == 1).float().mean())


def test_masters_move_norms_that_bf16_weights_cannot():
    """200 steps at 3e-4: a step is less than half a unit in the last place of a bf16 1.0, and rounds away."""
    options = OptimOptions(lr=3e-4, clip=1e9)
    model, plain = Small(torch.bfloat16), Small(torch.bfloat16)
    train(model, MasterAdamW(model, options, {}), [0] * 200, lr=3e-4)
    adamw = torch.optim.AdamW(plain.parameters(), lr=3e-4, betas=options.betas, weight_decay=0.0)
    for _ in range(200):
        adamw.zero_grad()
        backward(plain, 0)
        adamw.step()
    assert share_of_ones(plain.norm.weight) == 1.0  # what the masters are for
    assert share_of_ones(model.norm.weight) < 0.05


def test_bf16_weights_are_the_rounded_masters():
    model = Small(torch.bfloat16)
    optimizer = MasterAdamW(model, OptimOptions(), {})
    train(model, optimizer, range(5))
    for name, weight in model.named_parameters():
        assert optimizer.masters[name].dtype == torch.float32
        assert torch.equal(weight, optimizer.masters[name].bfloat16())


def test_fp32_weights_are_their_own_masters():
    model = Small(torch.float32)
    optimizer = MasterAdamW(model, OptimOptions(), {})
    assert all(optimizer.masters[name] is weight for name, weight in model.named_parameters())


def test_weight_decay_is_for_matrices_only():
    model = Small(torch.float32)
    optimizer = MasterAdamW(model, OptimOptions(weight_decay=0.5), {})
    before = snapshot(model, optimizer)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step(ONE, 0.1)
    torch.testing.assert_close(model.fc.weight, before["fc.weight"] * (1 - 0.1 * 0.5))
    assert torch.equal(model.norm.weight, before["norm.weight"])


# Skipped steps


@pytest.mark.parametrize(("dtype", "scales"), KINDS)
@pytest.mark.parametrize("trained", [0, 3])
@pytest.mark.parametrize("bad", ["nan", "inf", "unsupervised"])
def test_a_bad_step_changes_nothing(dtype, scales, trained, bad):
    """Neither weights nor moments nor step counts, before the first good step or after some."""
    model = Small(dtype)
    optimizer = MasterAdamW(model, OptimOptions(weight_decay=0.1), scales)
    train(model, optimizer, range(trained))
    before = snapshot(model, optimizer)
    optimizer.zero_grad()
    backward(model, 9)
    if bad == "unsupervised":
        for weight in model.parameters():
            weight.grad.zero_()
    else:
        model.fc.weight.grad[3, 3] = float(bad)
    _, skipped = optimizer.step(0 * ONE if bad == "unsupervised" else ONE, 1e-2)
    assert skipped == 1
    after = snapshot(model, optimizer)
    assert_same(before, {name: after[name] for name in before})
    assert all(not value.any() for name, value in after.items() if name not in before)  # moments that are new are 0


def test_training_goes_on_after_a_bad_step_as_if_it_had_not_been():
    smooth, rough = Small(torch.bfloat16), Small(torch.bfloat16)
    one, other = MasterAdamW(smooth, OptimOptions(), {}), MasterAdamW(rough, OptimOptions(), {})
    train(smooth, one, [1, 2, 3, 4])
    train(rough, other, [1, 2])
    rough.fc.weight.grad.fill_(float("nan"))
    other.step(ONE, 1e-2)
    train(rough, other, [3, 4])
    assert_same(snapshot(smooth, one), snapshot(rough, other))


# Clipping


def test_norm_is_that_of_the_divided_gradient_before_clipping():
    model = Small(torch.float32)
    optimizer = MasterAdamW(model, OptimOptions(clip=0.5), {})
    backward(model, 0)
    expected = torch.cat([w.grad.flatten() for w in model.parameters()]).norm() / 16
    norm, skipped = optimizer.step(16 * ONE, 1e-2)
    torch.testing.assert_close(norm, expected)
    assert skipped == 0
    clipped = torch.cat([m.grad.flatten() for m in optimizer.masters.values()]).norm()
    torch.testing.assert_close(clipped, torch.tensor(0.5), rtol=1e-4, atol=0)


def test_small_gradients_are_not_clipped():
    model = Small(torch.float32)
    optimizer = MasterAdamW(model, OptimOptions(clip=1e6), {})
    backward(model, 0)
    expected = model.fc.weight.grad / 16
    optimizer.step(16 * ONE, 1e-2)
    torch.testing.assert_close(optimizer.masters["fc.weight"].grad, expected)


# Scaled weights


@pytest.mark.parametrize("clip", [1e9, 0.1])
def test_scaled_weight_trains_as_the_reparameterised_one(clip):
    """By hand: u = w * scale is the parameter, the layer computes with u / scale, plain AdamW updates u."""
    model, hand = Small(torch.float32), Small(torch.float32)
    optimizer = MasterAdamW(model, OptimOptions(clip=clip), {"fc.weight": SCALE})
    inner = nn.Parameter(hand.fc.weight.detach() * SCALE)
    plain = torch.optim.AdamW([inner, hand.norm.weight], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for seed in range(6):
        train(model, optimizer, [seed])
        generator = torch.Generator().manual_seed(seed)
        x, wanted = (torch.randn(16, 8, generator=generator) for _ in range(2))
        plain.zero_grad()
        ((hand.norm(x) @ (inner / SCALE).T - wanted).square().sum() / 16).backward()
        nn.utils.clip_grad_norm_([inner, hand.norm.weight], clip)
        plain.step()
    torch.testing.assert_close(optimizer.masters["fc.weight"], inner, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.fc.weight, (inner / SCALE), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.norm.weight, hand.norm.weight, rtol=1e-4, atol=1e-5)


# Accumulation


def add_gradient(drafter: DFlashDrafter, pack: Pack, first: int) -> torch.Tensor:
    """Backward through the summed loss of a pack whose features are those of a long text from `first` on."""
    table, blocks = random_embedding(drafter), pack.blocks
    features = random_features(200, drafter)
    features = type(features)(context=features.context[first : first + len(pack.tokens)])
    draft = drafter(features, pack.position, table[blocks.tokens], blocks)
    rows = blocks.rows[: blocks.num_rows]
    label, weight = blocks.label.flatten()[rows], blocks.weight.flatten()[rows]
    frozen_head_loss(drafted_rows(draft, rows), table, label, weight, chunk=64).total.backward()
    return weight.sum()


def test_four_packs_accumulated_are_one_big_pack():
    """Losses are sums and are divided once, so gradient and update agree however unequal the packs are."""
    lengths, anchors = [50, 9, 30, 40], [[3, 8, 20, 30], [2], [1, 28], [10, 11, 12, 13, 14, 39 - 1]]
    documents = [document(length, first=40 * i) for i, length in enumerate(lengths)]
    options = OptimOptions(eps=1e-3)  # so that entries with next to no gradient do not move by a whole step
    apart, whole = tiny_drafter(block_size=4), tiny_drafter(block_size=4)
    shape, first, weight = shape_of(apart), 0, torch.zeros(())
    for one, its_anchors in zip(documents, anchors, strict=True):
        weight = weight + add_gradient(apart, pack_of([one], [its_anchors], shape), first)
        first += len(one.tokens)
    big_weight = add_gradient(whole, pack_of(documents, anchors, shape), 0)
    torch.testing.assert_close(weight, big_weight)
    for name, parameter in apart.named_parameters():
        gradient = whole.get_parameter(name).grad
        assert (parameter.grad - gradient).norm() < 1e-4 * gradient.norm(), name
    start = {name: p.detach().clone() for name, p in whole.named_parameters()}
    MasterAdamW(apart, options, {}).step(weight, 1e-3)
    MasterAdamW(whole, options, {}).step(big_weight, 1e-3)
    for name, parameter in apart.named_parameters():
        update = whole.get_parameter(name) - start[name]
        assert (parameter - start[name] - update).norm() < 1e-3 * update.norm(), name


# The schedule

OPTIONS = OptimOptions(lr=2.0, warmup=0.1, min_lr=0.25)


def test_warm_up_is_linear_and_reaches_the_peak():
    assert [learning_rate(step, 100, OPTIONS) for step in range(10)] == pytest.approx([0.2 * i for i in range(1, 11)])


def test_then_a_cosine_falls_to_the_floor():
    assert learning_rate(10, 100, OPTIONS) == pytest.approx(2.0)
    assert learning_rate(55, 100, OPTIONS) == pytest.approx(2.0 * (0.25 + 0.75 / 2))
    assert learning_rate(100, 100, OPTIONS) == pytest.approx(0.5)
    expected = 2.0 * (0.25 + 0.75 * 0.5 * (1 + math.cos(math.pi * 20 / 90)))
    assert learning_rate(30, 100, OPTIONS) == pytest.approx(expected)


def test_rate_falls_after_the_warm_up():
    rates = [learning_rate(step, 100, OPTIONS) for step in range(10, 100)]
    assert all(a > b for a, b in zip(rates, rates[1:], strict=False))


def test_rate_is_a_function_of_the_optimizer_step_alone():
    """Accumulating more packs in a step does not change its rate."""
    many = OptimOptions(lr=2.0, warmup=0.1, min_lr=0.25, packs_per_step=8)
    assert [learning_rate(s, 50, many) for s in range(50)] == [learning_rate(s, 50, OPTIONS) for s in range(50)]


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_very_short_runs_have_a_rate(num_steps):
    rates = [learning_rate(step, num_steps, OptimOptions(lr=1.0)) for step in range(num_steps)]
    assert rates[0] == 1.0
    assert all(rate > 0 for rate in rates)


def test_step_uses_the_rate_it_is_given():
    """AdamW's first step moves every entry by the rate."""
    model = Small(torch.float32)
    optimizer = MasterAdamW(model, OptimOptions(), {})
    before = model.fc.weight.detach().clone()
    train(model, optimizer, [0], lr=0.125)
    torch.testing.assert_close((model.fc.weight - before).abs(), torch.full_like(before, 0.125), rtol=1e-3, atol=0)


# State


@pytest.mark.parametrize(("dtype", "scales"), KINDS)
@pytest.mark.parametrize("trained", [0, 3])
def test_state_round_trip_is_bit_exact(dtype, scales, trained):
    """Weights and state put into a new model and optimizer: the next steps are the same to the last bit."""
    model = Small(dtype)
    optimizer = MasterAdamW(model, OptimOptions(), scales)
    train(model, optimizer, range(trained))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}

    again = Small(dtype)
    with torch.no_grad():
        for weight in again.parameters():
            weight.add_(1)  # whatever it was before
    restored = MasterAdamW(again, OptimOptions(), scales)
    again.load_state_dict(weights)
    restored.load(state)
    assert_same(snapshot(model, optimizer), snapshot(again, restored))
    train(model, optimizer, range(10, 13))
    train(again, restored, range(10, 13))
    assert_same(snapshot(model, optimizer), snapshot(again, restored))


def test_state_has_master_moments_and_step_of_every_weight():
    model = Small(torch.bfloat16)
    optimizer = MasterAdamW(model, OptimOptions(), {"fc.weight": SCALE})
    train(model, optimizer, range(2))
    names = {f"{part}.{name}" for part in ("master", "exp_avg", "exp_avg_sq", "step") for name in model.state_dict()}
    state = optimizer.tensors()
    assert state.keys() == names
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    assert float(state["step.fc.weight"]) == 2


def test_loading_does_not_tie_the_optimizer_to_the_loaded_tensors():
    model = Small(torch.float32)
    optimizer = MasterAdamW(model, OptimOptions(), {})
    train(model, optimizer, range(2))
    state = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    kept = {name: tensor.clone() for name, tensor in state.items()}
    optimizer.load(state)
    train(model, optimizer, range(2))
    assert_same(state, kept)


# Muon

MUON = OptimOptions(kind="muon", weight_decay=0.1, clip=1e9)


@pytest.mark.parametrize(("dtype", "scales"), KINDS)
def test_muon_takes_the_matrices_and_adamw_the_rest(dtype, scales):
    """By hand: torch's Muon on the fp32 matrix, torch's AdamW on the norm."""
    model, hand = Small(dtype), Small(torch.float32)
    optimizer = MasterAdamW(model, MUON, scales)
    with torch.no_grad():
        for name, weight in hand.named_parameters():
            weight.copy_(optimizer.masters[name])
    matrix = torch.optim.Muon([hand.fc.weight], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    norm = torch.optim.AdamW([hand.norm.weight], lr=1e-2, betas=MUON.betas, weight_decay=0.0)
    for seed in range(4):
        optimizer.zero_grad()
        backward(model, seed)
        for name, weight in model.named_parameters():
            wide = weight.grad.float() / 16
            hand.get_parameter(name).grad = wide / scales[name] if name in scales else wide
        optimizer.step(16 * ONE, 1e-2)
        matrix.step()
        norm.step()
    for name, weight in hand.named_parameters():
        torch.testing.assert_close(optimizer.masters[name], weight, rtol=1e-4, atol=1e-6)
    assert not any(key.startswith("exp_avg.fc") for key in optimizer.tensors())
    assert "momentum_buffer.fc.weight" in optimizer.tensors()


@pytest.mark.parametrize(("dtype", "scales"), KINDS)
def test_a_bad_step_changes_nothing_with_muon(dtype, scales):
    model = Small(dtype)
    optimizer = MasterAdamW(model, MUON, scales)
    train(model, optimizer, range(3))
    before = snapshot(model, optimizer)
    model.fc.weight.grad[3, 3] = torch.nan
    _, skipped = optimizer.step(ONE, 1e-2)
    assert skipped == 1
    assert_same(before, snapshot(model, optimizer))


@pytest.mark.parametrize(("dtype", "scales"), KINDS)
@pytest.mark.parametrize("trained", [0, 3])
def test_muon_resumes_bit_for_bit(dtype, scales, trained):
    model, again = Small(dtype), Small(dtype)
    optimizer = MasterAdamW(model, MUON, scales)
    train(model, optimizer, range(trained))
    state = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    restored = MasterAdamW(again, MUON, scales)
    again.load_state_dict(weights)
    restored.load(state)
    train(model, optimizer, range(10, 13))
    train(again, restored, range(10, 13))
    assert_same(snapshot(model, optimizer), snapshot(again, restored))


def test_muon_with_a_momentum_of_its_own():
    ends = []
    for momentum in (None, 0.95, 0.5):
        model = Small(torch.float32)
        options = OptimOptions(kind="muon", momentum=momentum)
        train(model, MasterAdamW(model, options, {}), range(3))
        ends.append(model.fc.weight.detach())
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2])
