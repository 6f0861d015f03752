"""Answers of many lengths from one model: in batches by transformers' `generate`, and in slots that are filled again.

The model is random and never ends by itself; how long each answer is, is given. A batch of `generate` goes on until its
longest answer is done, as with a real target whose answers end where they please.
"""

from __future__ import annotations

import os
import time
from collections import deque

import numpy as np
import torch

from benchmarks.measure import clean
from benchmarks.step import Shape, drafter
from benchmarks.target import build
from draftsmith.data.dialogue import Dialogue
from draftsmith.data.prompts import Prompt
from draftsmith.data.sampling import Choice
from draftsmith.data.slots import attending_by_slots
from draftsmith.data.writer import Answer, Writer

SMOLLM2 = Shape(hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, layers=1, vocabulary=49_152, block=6)
GREEDY = Choice(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


def draw(count: int, mean: int, longest: int, vocabulary: int) -> list[Answer]:
    """Log-normal lengths of prompts and answers, longest prompts first."""
    rng = np.random.default_rng(0)
    lengths, limits = (np.clip(rng.lognormal(np.log(mean), 0.6, count), 4, longest).astype(int) for _ in range(2))
    made = []
    for number, (length, limit) in enumerate(zip(sorted(lengths, reverse=True), limits, strict=True)):
        dialogue = Dialogue(Prompt(id=str(number), messages=({"role": "user", "content": ""},)), "last", {})
        prompt = rng.integers(vocabulary, size=length, dtype=np.int32)
        made.append(Answer(dialogue=dialogue, prompt=prompt, limit=int(limit), choice=GREEDY, seed=0))
    return made


def in_batches(model, answers: list[Answer], batch: int) -> None:
    for first in range(0, len(answers), batch):
        rows = answers[first : first + batch]
        width = max(len(row.prompt) for row in rows)
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for number, row in enumerate(rows):
            tokens[number, width - len(row.prompt) :] = torch.from_numpy(row.prompt)
            mask[number, width - len(row.prompt) :] = 1
        limit = max(row.limit for row in rows)
        inputs = {"input_ids": tokens.to(model.device), "attention_mask": mask.to(model.device)}
        with torch.inference_mode():
            model.generate(**inputs, do_sample=False, min_new_tokens=limit, max_new_tokens=limit, pad_token_id=0)


def in_slots(model, answers: list[Answer], batch: int, helper=None, graphs: bool = False) -> None:
    with attending_by_slots(model):
        list(Writer(model, frozenset(), batch, helper, graphs=graphs).write(deque(answers)))


def run(shape: Shape, layers: int, device: torch.device, *, count: int, mean: int, batch: int) -> list[dict]:
    """A random drafter is never right: its row tells what drafting costs, to be divided by the accept length."""
    model = build(shape, device, layers, tuple(range(shape.taps))).model
    helper = drafter(shape, device).eval()
    ways = {"generate": in_batches, "slots": in_slots}
    ways["slots, drafter"] = lambda *given: in_slots(*given, helper)
    if device.type == "cuda":
        ways["slots, graphs"] = lambda *given: in_slots(*given, graphs=True)
        ways["slots, drafter, graphs"] = lambda *given: in_slots(*given, helper, True)
    rows = []
    for name, way in ways.items():
        clean(device)
        way(model, draw(batch, 8, 16, shape.vocabulary), batch)
        answers = draw(count, mean, 4 * mean, shape.vocabulary)
        tokens = sum(answer.limit for answer in answers)
        wall, cpu = time.perf_counter(), time.process_time()
        way(model, answers, batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds, cpu = time.perf_counter() - wall, time.process_time() - cpu
        facts = {
            "answers": count,
            "prompt_tokens": sum(len(a.prompt) for a in answers),
            "tokens": tokens,
            "batch": batch,
        }
        figures = {"seconds": seconds, "cpu_seconds": cpu, "tokens_per_s": tokens / seconds, "load": os.getloadavg()[0]}
        rows.append({"what": name, "layers": layers, "hidden": shape.hidden, **facts, **figures})
    measured = "seconds" if device.type == "cuda" else "cpu_seconds"  # others may use the CPU too
    for row in rows:
        row["ratio_to"] = {"generate": rows[0][measured] / row[measured]}
    return rows
