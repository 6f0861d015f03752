"""Token waste and anchor fill of the packs of one epoch, over lengths as conversations have them."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.measure import seconds_of, spread
from draftsmith.packing import Schedule, count_anchors


def conversations(num: int, mean: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths (log-normal, sigma 1), and legal anchors: a share of the length that varies from row to row."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(mean) - 0.5, 1.0, num), 16, num_tokens).astype(np.int64)
    return lengths, np.maximum(0, (lengths * rng.beta(4, 2, num)).astype(np.int64) - 1)


def density_for(lengths: np.ndarray, legal: np.ndarray, num_tokens: int, num_anchors: int, asked: float) -> float:
    """The anchor density that asks for this share of the slots when the tokens are full."""
    return asked * num_anchors / num_tokens * lengths.sum() / legal.sum()


def run(num_tokens: int, num_anchors: int, *, mean: int, num: int, asked: float, repeats: int) -> dict:
    lengths, legal = conversations(num, mean, num_tokens)
    density = density_for(lengths, legal, num_tokens, num_anchors, asked)
    schedule = Schedule(
        lengths=lengths,
        anchors=count_anchors(legal, num_anchors, density),
        num_tokens=num_tokens,
        num_anchors=num_anchors,
        window=65_536,
        packs_per_step=1,
        epochs=1,
        seed=0,
    )
    tokens, anchors = schedule.fill()
    epochs = iter(range(1, 100))
    times = seconds_of(lambda: schedule.packs(next(epochs)), torch.device("cpu"), repeats, warmup=1)
    return {
        "tokens": num_tokens,
        "anchors": num_anchors,
        "rows": num,
        "mean_length": mean,
        "anchor_density": density,
        "slots_asked": asked,
        "token_waste": 1 - tokens,
        "anchor_fill": anchors,
        "packs": len(schedule.packs(0)),
        **spread(times),
        "rows_per_s": num / spread(times)["seconds_median"],
    }


def sweep(toy: bool) -> list[dict]:
    budgets = ((49_152, 6_144), (8_192, 1_024))
    num, repeats = (3_000, 1) if toy else (65_536, 5)
    return [
        run(tokens, anchors, mean=mean, num=num, asked=asked, repeats=repeats)
        for tokens, anchors in budgets
        for mean in (400, 700, 2_000)
        for asked in (0.9, 0.97, 1.0)
    ]
