"""The frozen-head loss against plain cross-entropy and autograd in float64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.losses import drafted_rows, frozen_head_loss
from tests.handmade import document, pack_of, random_embedding, random_features, shape_of, tiny_drafter

ROWS, HIDDEN, VOCAB = 37, 12, 97


def problem(dtype=torch.float32, rows: int = ROWS):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    label = torch.randint(VOCAB, (rows,), generator=generator)
    weight = torch.rand(rows, generator=generator)
    return hidden, head, label, weight


def reference(hidden, head, label, weight):
    """Total and gradient in float64, through all logits at once."""
    wide = hidden.detach().double().requires_grad_()
    nll = torch.nn.functional.cross_entropy(wide @ head.double().T, label, reduction="none")
    total = (nll * weight.double()).sum()
    (gradient,) = torch.autograd.grad(total, wide)
    return total.detach(), gradient, nll.detach()


@pytest.mark.parametrize("chunk", [1, 5, 16, 36, 37, 1000])
def test_total_and_gradient_for_any_chunk(chunk):
    hidden, head, label, weight = problem()
    total, gradient, nll = reference(hidden, head, label, weight)
    out = frozen_head_loss(hidden, head, label, weight, chunk=chunk)
    out.total.backward()
    torch.testing.assert_close(out.total.double(), total, rtol=1e-6, atol=0)
    torch.testing.assert_close(out.nll.double(), nll, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), gradient, rtol=1e-4, atol=1e-6)


def test_gradient_follows_what_is_done_with_the_total():
    hidden, head, label, weight = problem()
    _, gradient, _ = reference(hidden, head, label, weight)
    (3 * frozen_head_loss(hidden, head, label, weight, chunk=8).total).backward()
    torch.testing.assert_close(hidden.grad.double(), 3 * gradient, rtol=1e-4, atol=1e-6)


def test_bfloat16_states_and_head():
    """Logits are rounded to 8 bits, so the total is good to 1 % and the gradient, as a vector, to 2 %."""
    hidden, head, label, weight = problem(torch.bfloat16)
    total, gradient, _ = reference(hidden, head, label, weight)
    out = frozen_head_loss(hidden, head, label, weight, chunk=8)
    out.total.backward()
    assert out.total.dtype == out.nll.dtype == torch.float32
    assert hidden.grad.dtype == torch.bfloat16
    torch.testing.assert_close(out.total.double(), total, rtol=1e-2, atol=0)
    assert (hidden.grad.double() - gradient).norm() < 0.02 * gradient.norm()


def test_large_logits_do_not_overflow():
    hidden, head, label, weight = problem()
    out = frozen_head_loss((hidden * 1e3).detach(), head, label, weight, chunk=8)
    total, _, _ = reference(hidden * 1e3, head, label, weight)
    torch.testing.assert_close(out.total.double(), total, rtol=1e-5, atol=0)


def test_rows_of_weight_zero_change_nothing():
    hidden, head, label, weight = problem()
    weight[::3] = 0
    out = frozen_head_loss(hidden, head, label, weight, chunk=8)
    out.total.backward()
    assert (hidden.grad[::3] == 0).all()
    kept = torch.arange(ROWS) % 3 != 0
    alone = frozen_head_loss(hidden[kept], head, label[kept], weight[kept], chunk=8)
    torch.testing.assert_close(out.total, alone.total)


def test_head_gets_no_gradient():
    hidden, head, label, weight = problem()
    head.requires_grad_()
    frozen_head_loss(hidden, head, label, weight, chunk=8).total.backward()
    assert head.grad is None


@pytest.mark.parametrize("topk", [1, 5, VOCAB])
def test_topk_is_torchs(topk):
    hidden, head, label, weight = problem()
    label[:9] = (hidden @ head.T).topk(9).indices.diagonal()[:9]  # labels of rank 0 to 8
    out = frozen_head_loss(hidden, head, label, weight, chunk=8, topk=topk)
    first = (hidden @ head.T).topk(topk).indices
    assert torch.equal(out.in_topk, (first == label[:, None]).any(dim=1))
    assert out.in_topk.any()


def test_correct_is_the_first_choice():
    hidden, head, label, weight = problem()
    label[::2] = (hidden @ head.T).argmax(dim=1)[::2]
    out = frozen_head_loss(hidden, head, label, weight, chunk=8)
    assert torch.equal(out.correct, (hidden @ head.T).argmax(dim=1) == label)
    assert out.correct[::2].all()


def test_without_topk_nothing_is_counted():
    assert not frozen_head_loss(*problem(), chunk=8, topk=0).in_topk.any()


class LargestLogits(TorchDispatchMode):
    """Remembers the most rows of any tensor that is as wide as the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[1] == VOCAB:
            self.rows = max(self.rows, out.shape[0])
        return out


def test_logits_never_exceed_a_chunk():
    hidden, head, label, weight = problem(rows=200)
    with LargestLogits() as seen:
        frozen_head_loss(hidden, head, label, weight, chunk=15, topk=5).total.backward()
    assert seen.rows == 15  # more than HIDDEN, the rows of the transposed head


def test_no_rows_give_zero_and_a_finite_zero_gradient():
    """A pack without supervision: the sum is 0 and the graph is alive down to the drafter's first weight."""
    drafter = tiny_drafter(block_size=4)
    pack = pack_of([document(20, supervised=[])], [[5, 9]], shape_of(drafter))
    assert pack.blocks.num_rows == 0
    table = random_embedding(drafter)
    draft = drafter(random_features(20, drafter), pack.position, table[pack.blocks.tokens], pack.blocks)
    rows = pack.blocks.rows[: pack.blocks.num_rows]
    out = frozen_head_loss(
        drafted_rows(draft, rows), table, pack.blocks.label.flatten()[rows], torch.zeros(0), chunk=8, topk=5
    )
    assert out.total == 0
    out.total.backward()
    assert all((weight.grad == 0).all() for weight in drafter.parameters())
