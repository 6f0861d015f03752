"""Many answers at a time: slots are filled, advance together, and are filled again where an answer has ended.

With a drafter, a step of the target looks at a whole block in each slot: the token that the target chose last and what
the drafter proposes behind it. The target's own choices are made at every place of the block; they are the answer up to
and including the first one that differs from the proposal, because that far the target has seen its own answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.data.dialogue import Dialogue
from draftsmith.data.sampling import Choice, choose, choose_along, numbers
from draftsmith.data.slots import SlotDrafter, SlotTarget, ladder
from draftsmith.drafters import DFlashDrafter

SHARE = 8
"""Slots are filled again when one in so many is free: a prefill of several rows costs little more than one of one."""


@dataclass(kw_only=True)
class Answer:
    """An answer that is asked for, being written, or done."""

    dialogue: Dialogue
    prompt: Int[np.ndarray, " n"]
    """The rendered conversation up to where the answer begins."""
    limit: int
    """Tokens, at most."""
    choice: Choice
    seed: int
    numbers: Float[Tensor, " limit"] | None = None
    """Of `sampling.numbers`, once it is being written."""
    tokens: list[int] = field(default_factory=list)
    """What is written so far, the end token included."""
    finish: str = ""
    """stop or length, when it is done."""

    @property
    def place(self) -> int:
        """Of the last token, which the target has chosen but not seen."""
        return len(self.prompt) + len(self.tokens) - 1

    def begin(self) -> None:
        dialogue, greedy = self.dialogue, self.choice.temperature == 0
        drawn = None if greedy else numbers(self.seed, dialogue.prompt.id, dialogue.answers, self.limit)
        self.numbers = torch.zeros(self.limit, dtype=torch.float64) if drawn is None else drawn

    def extend(self, tokens: list[int], stop_ids: frozenset[int]) -> int:
        """Add what is within the answer; returns how much that was."""
        for number, token in enumerate(tokens, 1):
            self.tokens.append(token)
            if token in stop_ids or len(self.tokens) == self.limit:
                self.finish = "stop" if token in stop_ids else "length"
                return number
        return len(tokens)


class Writer:
    """Answers what is waiting; `cycles` and `committed` say how much a drafter helped."""

    def __init__(
        self,
        model: PreTrainedModel,
        stop_ids: frozenset[int],
        slots: int,
        drafter: DFlashDrafter | None = None,
        *,
        graphs: bool = False,
    ) -> None:
        taps = drafter.config.target_layer_ids if drafter else []
        self.target = SlotTarget(model, slots, taps, graphs)
        self.drafter = SlotDrafter(drafter, model, slots, graphs) if drafter else None
        self.size = drafter.config.block_size if drafter else 1
        self.stop_ids, self.device = stop_ids, self.target.device
        self.texts: list[Answer | None] = [None] * slots
        self.least = 128 if graphs else 16  # width of the narrowest view: a graph for each
        self.cycles = self.committed = 0

    def write(self, waiting: deque[Answer]) -> Iterator[Answer]:
        """Each answer when it is done. Whoever takes it may put others into `waiting`, at either end."""
        while waiting or any(self.texts):
            if not waiting:
                self._leave_empty_slots()
            self._fill(waiting)
            yield from self._take_done()
            if any(self.texts):
                self._step()
                yield from self._take_done()

    def _fill(self, waiting: deque[Answer]) -> None:
        share = max(1, len(self.texts) // SHARE)
        free = [slot for slot, text in enumerate(self.texts) if text is None]
        while waiting and len(free) >= (count := min(share, len(waiting))):
            self._begin(free[:count], [waiting.popleft() for _ in range(count)])
            free = free[count:]

    def _begin(self, slots: list[int], answers: list[Answer]) -> None:
        """Prompts enter free slots, and the first token of each answer is chosen."""
        width = ladder(max(len(answer.prompt) for answer in answers), self.least)
        self._reserve(max(width, *(len(answer.prompt) + answer.limit + self.size for answer in answers)))
        tokens = np.zeros((len(answers), width), dtype=np.int64)
        for row, answer in zip(tokens, answers, strict=True):
            answer.begin()
            row[: len(answer.prompt)] = answer.prompt
        slot, length = self._put(slots), self._put([len(answer.prompt) for answer in answers])
        logits, features = self.target.prefill(slot, self._put(tokens), length)
        if self.drafter:
            place = torch.arange(width, device=self.device).expand(len(answers), -1)
            self.drafter.add(slot, place, features)
        uniform = self._put([float(answer.numbers[0]) for answer in answers])[:, None]
        first = choose(logits[:, None], uniform, [answer.choice for answer in answers])
        for number, answer, token in zip(slots, answers, first[:, 0].tolist(), strict=True):
            answer.extend([token], self.stop_ids)
            self.texts[number] = answer

    def _step(self) -> None:
        """Every slot advances: by one token, or as far as its draft is right and one more."""
        start = np.array([text.place if text else 0 for text in self.texts])
        view = min(ladder(int(start.max()) + self.size, self.least), self.target.cache.length)
        tokens = self._put([[text.tokens[-1] if text else 0] for text in self.texts])
        place = self._put(start[:, None] + np.arange(self.size))
        uniform = self._put(np.stack([self._numbers(text) for text in self.texts]))
        choices = [text.choice if text else None for text in self.texts]
        draft = tokens[:, :0]
        if self.drafter:
            # The likeliest, for sampled rows too: of drafts drawn by their numbers fewer are accepted (docs/log.md).
            draft = self.drafter.propose(view, tokens, start, place).argmax(-1)
        logits, features = self.target.step(view, torch.cat([tokens, draft], dim=1), place)
        if self.drafter:
            self.drafter.add(torch.arange(len(start), device=self.device), place, features)
        chosen, right = choose_along(logits, uniform, choices, draft)
        found = torch.cat([right[:, None], chosen], dim=1).tolist()
        for text, (count, *row) in zip(self.texts, found, strict=True):
            if text:
                self.cycles += 1
                self.committed += text.extend(row[: count + 1], self.stop_ids)

    def _numbers(self, text: Answer | None) -> Float[np.ndarray, " size"]:
        """For the next places of an answer; 0 beyond its end."""
        found = np.zeros(self.size)
        if text:
            own = text.numbers[len(text.tokens) : len(text.tokens) + self.size].numpy()
            found[: len(own)] = own
        return found

    def _take_done(self) -> Iterator[Answer]:
        for slot, text in enumerate(self.texts):
            if text and text.finish:
                self.texts[slot] = None
                yield text

    def _caches(self) -> list[SlotTarget | SlotDrafter]:
        return [self.target, *([self.drafter] if self.drafter else [])]

    def _reserve(self, length: int) -> None:
        if length > self.target.cache.length:
            for one in self._caches():
                one.replayed.forget()
                one.cache.lengthen(ladder(length, self.least))

    def _leave_empty_slots(self) -> None:
        """On a CPU an empty slot costs as much as another; towards the end, half of them or more are let go."""
        kept = [slot for slot, text in enumerate(self.texts) if text]
        if self.device.type == "cpu" and 0 < len(kept) <= len(self.texts) // 2:
            for one in self._caches():
                one.cache.keep(kept)
            self.texts = [self.texts[slot] for slot in kept]

    def _put(self, values: list | np.ndarray) -> Tensor:
        return torch.as_tensor(np.asarray(values), device=self.device)
