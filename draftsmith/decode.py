"""Speculative decoding, one conversation at a time: the reference by which a drafter is measured.

A cycle: the drafter proposes a block from the context features of all committed tokens before the anchor; the target
runs the block once; the agreeing prefix and one bonus token are committed; both caches fall back to what is committed.
Greedy output is the target's own greedy output, token by token. With sampling the *distribution* is the target's own
(rejection sampling, arXiv 2211.17192, with p and q after temperature, top-k and top-p).

The drafter's cache holds keys and values of context only; a block's own are never kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftsmith.drafters import DFlashDrafter
from draftsmith.targets import Target


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen from logits; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def probabilities(self, logits: Float[Tensor, "n voc"]) -> Float[Tensor, "n voc"]:
        """The distribution that is sampled; one-hot when greedy."""
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        logits = logits.float() / self.temperature
        if self.top_k:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1:
            ordered, index = logits.sort(descending=True)
            share = ordered.softmax(-1)
            beyond = share.cumsum(-1) - share >= self.top_p  # the first token is always kept
            logits = logits.masked_fill(torch.zeros_like(beyond).scatter(1, index, beyond), -torch.inf)
        return logits.softmax(-1)

    def draw(self, chances: Float[Tensor, "n voc"], generator: torch.Generator) -> Int[Tensor, " n"]:
        if self.temperature == 0:
            return chances.argmax(-1)
        return torch.multinomial(chances.cpu(), 1, generator=generator)[:, 0].to(chances.device)


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """An answer, and how it came about."""

    tokens: list[int]
    cycles: list[int]
    """Tokens committed by each cycle, the bonus included; the token that prefill gives belongs to none."""
    drafted: list[bool]
    """Per token: proposed by the drafter and accepted, rather than written by the target."""
    offered: list[int]
    """Tokens proposed in each cycle; those behind the end of the answer do not count."""
    accepted: list[int]
    """How many of them stand."""

    @property
    def accept_length(self) -> float | None:
        """Mean committed tokens per cycle of this answer; None if prefill ended it."""
        return sum(self.cycles) / len(self.cycles) if self.cycles else None


def decode_plain(
    target: Target,
    prompt: Int[Tensor, " n"],
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
) -> list[int]:
    """The target alone, one token at a time."""
    cache = target.new_cache()
    answer: list[int] = []
    pending = prompt
    while len(answer) < max_new_tokens and not (answer and answer[-1] in target.eos_ids):
        logits, _ = target.extend(pending, cache)
        pending = sampling.draw(sampling.probabilities(logits[-1:]), generator)
        answer.append(int(pending))
    return answer


@torch.no_grad()
def decode_speculative(
    target: Target,
    drafter: DFlashDrafter,
    prompt: Int[Tensor, " n"],
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
) -> Decoded:
    """The target with the drafter's help. `max_new_tokens` and stop tokens cut the last cycle as they cut text."""
    cache = target.new_cache()
    logits, fresh = target.extend(prompt, cache)
    answer = sampling.draw(sampling.probabilities(logits[-1:]), generator).tolist()
    decoded = Decoded(tokens=answer, cycles=[], drafted=[False], offered=[], accepted=[])
    context: list | None = None
    start = len(prompt)  # position of the anchor: the last committed token, which the target has not processed
    while len(answer) < max_new_tokens and answer[-1] not in target.eos_ids:
        size = min(drafter.config.block_size, max_new_tokens - len(answer) + 1)
        context = _grow(drafter, context, fresh, start)
        draft, chances = _propose(target, drafter, context, answer[-1], size, sampling, generator)
        block = torch.cat([prompt.new_tensor(answer[-1:]), draft])
        logits, fresh = target.extend(block, cache)
        num_accepted, bonus = _verify(sampling.probabilities(logits), draft, chances, sampling, generator)
        _roll_back(cache, size - 1 - num_accepted)
        fresh = fresh[: num_accepted + 1]  # features of the anchor and of what was accepted
        start += num_accepted + 1
        committed = _until_stop([*draft[:num_accepted].tolist(), bonus], max_new_tokens - len(answer), target.eos_ids)
        answer += committed
        decoded.cycles.append(len(committed))
        cut = len(committed) <= num_accepted  # the answer ends within the block, without the bonus
        decoded.offered.append(len(committed) if cut else size - 1)
        decoded.accepted.append(min(len(committed), num_accepted))
        decoded.drafted.extend(i < num_accepted for i in range(len(committed)))
    return decoded


def _grow(drafter: DFlashDrafter, context, fresh: Float[Tensor, "n tap_hid"], end: int):
    """Add the context keys and values of the tokens at positions end - n .. end - 1 to the drafter's cache."""
    position = torch.arange(end - fresh.shape[0], end, device=fresh.device)
    added = drafter.project(fresh.to(drafter.dtype), position)
    if context is None:
        return added
    return [(torch.cat([k, nk]), torch.cat([v, nv])) for (k, v), (nk, nv) in zip(context, added, strict=True)]


def _propose(target: Target, drafter: DFlashDrafter, context, anchor: int, size: int, sampling: Sampling, generator):
    """Draft tokens (size - 1) and the distribution each was drawn from."""
    block = torch.full((size,), drafter.config.mask_token_id, device=target.head.device)
    block[0] = anchor
    hidden = drafter.propose(context, target.embed(block).to(drafter.dtype))
    chances = sampling.probabilities(hidden.to(target.head.dtype) @ target.head.T)
    return sampling.draw(chances, generator), chances


def _verify(
    wanted: Float[Tensor, "slot voc"],
    draft: Int[Tensor, " drafted"],
    chances: Float[Tensor, "drafted voc"],
    sampling: Sampling,
    generator: torch.Generator,
) -> tuple[int, int]:
    """How many drafted tokens stand, and the bonus token after them.

    Draft x from q stands with probability min(1, p(x) / q(x)); after a rejection the bonus comes from max(p - q, 0),
    renormalised, otherwise from the target's distribution behind the block. With one-hot p and q this is greedy.
    """
    for slot, token in enumerate(draft.tolist()):
        p, q = wanted[slot, token], chances[slot, token]
        if float(torch.rand((), generator=generator)) * float(q) < float(p):
            continue
        residual = (wanted[slot] - chances[slot]).clamp_min(0)
        return slot, int(sampling.draw((residual / residual.sum())[None], generator))
    return len(draft), int(sampling.draw(wanted[len(draft)][None], generator))


def _roll_back(cache, num_rejected: int) -> None:
    if num_rejected:
        cache.crop(-num_rejected)  # a positive argument means the same length to some versions and is refused by others


def _until_stop(tokens: list[int], limit: int, eos_ids: frozenset[int]) -> list[int]:
    tokens = tokens[:limit]
    for i, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: i + 1]
    return tokens
