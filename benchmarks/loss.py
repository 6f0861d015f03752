"""The frozen head's loss with its gradient: chunks of two products, FP8 too, against cross-entropy over all logits."""

from __future__ import annotations

import torch

from benchmarks.measure import clean, peak_gib, seconds_of, spread, sustained_rate
from benchmarks.step import Shape
from draftsmith.fp8 import quantised_head
from draftsmith.losses import frozen_head_loss


def run(shape: Shape, device: torch.device, rows: int, repeats: int, rate: float | None = None) -> list[dict]:
    """Rows for chunks of several sizes, for FP8, and for the plain loss, which is what the others are compared to."""
    torch.manual_seed(0)
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(rows, shape.hidden, device=device, dtype=kind, requires_grad=True)
    head = torch.randn(shape.vocabulary, shape.hidden, device=device, dtype=kind) * 0.02
    label = torch.randint(shape.vocabulary, (rows,), device=device)
    weight = torch.rand(rows, device=device)
    size = 8192 if device.type == "cuda" else 512
    rate = rate or sustained_rate(device, 3.0 if device.type == "cuda" else 0.5, size)
    fp8_head = quantised_head(head) if device.type == "cuda" else None

    def plain() -> None:
        losses = torch.nn.functional.cross_entropy((hidden @ head.T).float(), label, reduction="none")
        (losses * weight).sum().backward()

    def chunked(chunk: int, quantised=None) -> None:
        out = frozen_head_loss(hidden, head, label, weight, chunk=chunk, topk=5, fp8_head=quantised)
        out.total.backward()

    cases = {f"chunks of {chunk}": (lambda chunk=chunk: chunked(chunk)) for chunk in (rows // 8, rows // 4, rows // 2)}
    if fp8_head:
        cases["FP8"] = lambda: chunked(rows // 4, fp8_head)
    cases["all logits"] = plain
    found, gradients = [], {}
    for name, action in cases.items():
        clean(device)
        hidden.grad = None
        action()
        gradients[name] = hidden.grad.double()
        times = spread(seconds_of(action, device, repeats))
        flop = 4 * shape.hidden * shape.vocabulary * rows
        found.append(
            {
                "loss": name,
                "rows": rows,
                "vocabulary": shape.vocabulary,
                **times,
                "share_of_sustained": flop / times["seconds_median"] / rate,
                "peak_memory_gib": peak_gib(device),
            }
        )
    exact = gradients["all logits"]
    for row in found:
        row["ratio_to"] = {"all logits": found[-1]["seconds_median"] / row["seconds_median"]}
        row["gradient_error"] = float((gradients[row["loss"]] - exact).norm() / exact.norm())
    return found
