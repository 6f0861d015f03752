"""Decoding with the reference drafter, and what another reading of the same weights would score.

The loop is written for the reference alone: the target's features come from transformers' own `hidden_states`, the
drafter keeps no cache, and nothing of `decode.py` is used. Readings answer two questions: is a convention that a folder
states the one its weights were trained with, and which one holds where it states none?
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftsmith.acceptance import near_ties
from draftsmith.reference import Reference
from draftsmith.targets import HFTarget

ANCHORS = 12  # per prompt, for comparing readings


@dataclass(frozen=True, kw_only=True)
class Run:
    """One answer, decoded with the reference drafter's help."""

    tokens: list[int]
    cycles: list[int]
    """Tokens committed by each cycle, cut where the answer ends."""
    accepted: list[int]
    """Drafts that agree, in each cycle, even beyond the end of the answer."""


class Decoder:
    """The target by itself: greedy choices, and the output of every block."""

    def __init__(self, target: HFTarget) -> None:
        self.model, self.ends = target.model, target.eos_ids
        self.embedding = target.model.get_input_embeddings()
        self.head, self.dtype = target.head.float(), target.head.dtype
        self.new_cache = target.new_cache
        names = inspect.signature(type(target.model.model).forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    @torch.no_grad()
    def run(self, tokens: Int[Tensor, " n"], cache) -> tuple[Float[Tensor, "n voc"], tuple[Tensor, ...]]:
        """Logits after each token, and the states behind the embedding and behind each block."""
        out = self.model(input_ids=tokens[None], use_cache=True, output_hidden_states=True, **{self._cache_name: cache})
        return out.logits[0], tuple(state[0] for state in out.hidden_states)

    def greedy(self, prompt: Int[Tensor, " n"], max_new_tokens: int) -> list[int]:
        """The target's own answer, one token at a time."""
        cache, pending = self.new_cache(), prompt
        answer: list[int] = []
        while len(answer) < max_new_tokens and not (answer and answer[-1] in self.ends):
            pending = self.run(pending, cache)[0][-1:].argmax(-1)
            answer.append(int(pending))
        return answer

    def near_ties(self, prompt: Int[Tensor, " n"], answer: list[int]) -> list[set[int]]:
        """Tokens that are all but the greedy choice at each place of the answer; none in fp32."""
        if self.dtype == torch.float32:
            return [set() for _ in answer]
        text = torch.cat([prompt, prompt.new_tensor(answer[:-1])])
        return near_ties(self.run(text, self.new_cache())[0][len(prompt) - 1 :])

    @torch.no_grad()
    def draft(
        self, reference: Reference, features: Float[Tensor, "n tap_hid"], anchor: int, size: int
    ) -> Float[Tensor, "slot voc"]:
        """Logits of every slot of the block behind `features`, through the target's own embedding and head."""
        block = torch.full((size,), reference.reading.mask_token_id, device=self.head.device)
        block[0] = anchor
        hidden = reference.hidden(features.float(), self.embedding(block).float())
        return hidden @ self.head.T

    def decode(
        self, reference: Reference, prompt: Int[Tensor, " n"], max_new_tokens: int, *, whole: bool = False
    ) -> Run:
        """Speculative decoding, greedy: draft a block, let the target check it, keep what agrees and one token more.

        `whole`: blocks do not shrink towards the end. A smaller block proposes otherwise, so the cycles differ.
        """
        block, taps = reference.reading.block_size, reference.reading.taps
        cache = self.new_cache()
        logits, states = self.run(prompt, cache)
        features = tapped(states, taps)
        run = Run(tokens=[int(logits[-1].argmax())], cycles=[], accepted=[])
        while len(run.tokens) < max_new_tokens and run.tokens[-1] not in self.ends:
            room = max_new_tokens - len(run.tokens)
            size, anchor = block if whole else min(block, room + 1), run.tokens[-1]
            draft = self.draft(reference, features, anchor, size)[1:].argmax(-1)
            choice, states = self.check(anchor, draft, cache)
            agreed = leading(draft == choice[:-1])
            run.accepted.append(agreed)
            features = torch.cat([features, tapped(states, taps)[: agreed + 1]])
            new = choice[: agreed + 1].tolist()[:room]
            ends = [i for i, token in enumerate(new) if token in self.ends]
            new = new[: ends[0] + 1] if ends else new
            run.tokens.extend(new)
            run.cycles.append(len(new))
            if agreed + 1 < size:
                cache.crop(agreed + 1 - size)
        return run

    def check(self, anchor: int, draft: Int[Tensor, " n"], cache) -> tuple[Int[Tensor, " m"], tuple[Tensor, ...]]:
        """The target's choice after the anchor and after each drafted token."""
        logits, states = self.run(torch.cat([draft.new_tensor([anchor]), draft]), cache)
        return logits.argmax(-1), states


def tapped(states: tuple[Tensor, ...], taps: tuple[int, ...]) -> Float[Tensor, "n tap_hid"]:
    """A feature is the output of a 0-based block; `states` begins with the embedding."""
    return torch.cat([states[number + 1] for number in taps], dim=-1)


def leading(agrees: Tensor) -> int:
    """How many are true before the first that is not."""
    return int(agrees.int().cumprod(0).sum())


def compare_readings(decoder: Decoder, reference: Reference, texts: list[tuple[Tensor, list[int]]]) -> dict[str, float]:
    """Mean accepted drafts per block on the target's own answers, as the folder is read and as it might be read.

    The next-position reading scores slot k against the token after its own, which is where labels shifted by one end.
    """
    readings = {"as read": reference} | other_readings(reference, decoder.model.config.num_hidden_layers)
    total, count = dict.fromkeys(readings, 0), 0
    for prompt, answer in texts:
        text = torch.cat([prompt, prompt.new_tensor(answer)])
        _, states = decoder.run(text, decoder.new_cache())
        block = reference.reading.block_size
        last = len(text) - block - 1
        anchors = range(len(prompt), last + 1, max(1, (last + 1 - len(prompt)) // ANCHORS))
        for anchor in list(anchors)[:ANCHORS]:
            count += 1
            for name, other in readings.items():
                features = tapped(states, other.reading.taps)[:anchor]
                choice = decoder.draft(other, features, int(text[anchor]), block).argmax(-1)
                wanted = text[anchor + 1 : anchor + block]
                total[name] += leading((choice[:-1] if other.reading.next_position else choice[1:]) == wanted)
    return {name: value / count for name, value in total.items()} if count else {}


def other_readings(reference: Reference, num_target_layers: int) -> dict[str, Reference]:
    """One convention changed at a time."""
    reading = reference.reading
    others = {"labels one position on": reference.read_as(next_position=True)}
    for name, shift in (("taps one block earlier", -1), ("taps one block later", 1)):
        taps = tuple(number + shift for number in reading.taps)
        if all(0 <= number < num_target_layers - 1 for number in taps):
            others[name] = reference.read_as(taps=taps)
    causal = tuple(not rule for rule in reading.causal)
    return others | {"in-block rule (is_causal) flipped": reference.read_as(causal=causal)}


def better_readings(scores: dict[str, float]) -> list[str]:
    """Readings that clearly beat the one in use."""
    base = scores.get("as read", 0.0)
    return [name for name, score in scores.items() if name != "as read" and score > 1.25 * base + 0.25]
