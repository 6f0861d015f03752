"""What the trainer's own code says about the exported weights, written down so that others can be compared with it.

For a few prompts: the answer, the tokens committed by each cycle, and at two anchors the drafter's best tokens with
their logits. The latter tell a wrong tap, a lost RoPE base or a swapped tensor even when nothing is accepted.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from draftsmith.decode import Sampling, decode_speculative
from draftsmith.drafters import DFlashDrafter
from draftsmith.targets import HFTarget

TOP = 4  # tokens noted per slot


@torch.no_grad()
def measure_record(target: HFTarget, drafter: DFlashDrafter, prompts: list[Tensor], max_new_tokens: int) -> dict:
    """The record as JSON."""
    answers, proposals = [], []
    for number, prompt in enumerate(prompts):
        decoded = decode_speculative(target, drafter, prompt, max_new_tokens, Sampling(), torch.Generator())
        answers.append({"prompt": prompt.tolist(), "tokens": decoded.tokens, "cycles": decoded.cycles})
        for committed in sorted({1, 1 + sum(decoded.cycles[: len(decoded.cycles) // 2])}):
            text = torch.cat([prompt, prompt.new_tensor(decoded.tokens[:committed])])
            proposals.append({"answer": number, "committed": committed, **_propose(target, drafter, text)})
    cycles = [n for answer in answers for n in answer["cycles"]]
    return {
        "dtype": str(drafter.dtype).removeprefix("torch."),
        "max_new_tokens": max_new_tokens,
        "accept_length_pooled": sum(cycles) / max(1, len(cycles)),
        "answers": answers,
        "proposals": proposals,
    }


def _propose(target: HFTarget, drafter: DFlashDrafter, text: Int[Tensor, " n"]) -> dict:
    """Best tokens and their logits for slots 1.. of the block whose anchor is the last token of `text`."""
    _, features = target.extend(text[:-1], target.new_cache())
    context = drafter.project(features.to(drafter.dtype), torch.arange(len(text) - 1, device=text.device))
    block = torch.full((drafter.config.block_size,), drafter.config.mask_token_id, device=text.device)
    block[0] = text[-1]
    hidden = drafter.propose(context, target.embed(block).to(drafter.dtype))
    best = (hidden.to(target.head.dtype) @ target.head.T).float().topk(TOP)
    return {"tokens": best.indices.tolist(), "logits": [[round(v, 4) for v in row] for row in best.values.tolist()]}


def synthetic_prompts(target: HFTarget, count: int) -> list[Tensor]:
    """Random text, always the same, where no held-out prompts are known or they must not be published."""
    generator = torch.Generator().manual_seed(0)
    limit = min(len(target.tokenizer), target.config.vocab_size)
    rows = torch.randint(0, limit, (count, 16), generator=generator)
    return [row.to(target.device) for row in rows]
