"""What `verify` measures: a drafter's folder, its target, prompts, and what the reference does on them.

How far two implementations may differ is decided here, once, by the target's number format. In fp32 on a CPU they
agree but for rounding, so the bounds are tight. In bf16 every kernel rounds in its own way: the order of two nearly
equal logits may change, after which the cycles of an answer are cut elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.acceptance import Agreement, agreement
from draftsmith.commands import VerifyCommand
from draftsmith.config import TargetOptions
from draftsmith.data.chat import prompt_tokens
from draftsmith.data.prompts import Prompt
from draftsmith.errors import UserError
from draftsmith.export.read import DrafterFolder
from draftsmith.export.record import synthetic_prompts
from draftsmith.readings import Decoder, Run
from draftsmith.reference import Reference
from draftsmith.targets import HFTarget


@dataclass(frozen=True)
class Bounds:
    """How far two implementations may differ."""

    logits: float
    """Of a slot's logits, in standard deviations over the vocabulary."""
    accept: float
    """Of the accept length, relative."""
    slot: float
    """Of a slot's acceptance, absolute."""


BOUNDS = {
    torch.float32: Bounds(logits=2e-3, accept=0.02, slot=0.02),
    torch.bfloat16: Bounds(logits=0.3, accept=0.1, slot=0.1),
}
ACROSS = Bounds(logits=1.0, accept=0.1, slot=0.1)
"""Between fp32 and bf16: the target's own features differ too."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What engines are compared with. It holds no model, so that an engine finds the GPU's memory free."""

    layout: str
    request: dict
    plain: list[list[int]]
    ties: list[list[set[int]]]
    """Near ties at each place of the target's own answers."""
    runs: list[Run]
    whole_runs: list[Run]
    bounds: Bounds

    def compare(self, outputs: list[list[int]]) -> list[Agreement]:
        """Each output against plain decoding."""
        rows = zip(self.plain, outputs, self.ties, strict=True)
        return [agreement(plain, output, ties.__getitem__) for plain, output, ties in rows]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is verified, and on which text."""

    folder: DrafterFolder
    target: HFTarget
    options: TargetOptions
    decoder: Decoder
    reference: Reference
    prompts: list[Tensor]
    max_new_tokens: int

    @property
    def bounds(self) -> Bounds:
        return BOUNDS[self.target.head.dtype]

    @property
    def record_bounds(self) -> Bounds:
        """Against what was recorded at export, perhaps in another number format."""
        recorded = ((self.folder.record or {}).get("measured") or {}).get("dtype", "")
        return self.bounds if str(self.target.head.dtype) == f"torch.{recorded}" else ACROSS

    @cached_property
    def plain(self) -> list[list[int]]:
        """The target's own greedy answers."""
        return [self.decoder.greedy(prompt, self.max_new_tokens) for prompt in self.prompts]

    @cached_property
    def runs(self) -> list[Run]:
        """The reference's; the last blocks of an answer shrink, as in our loop and in PyPI `dflash`."""
        return [self.decoder.decode(self.reference, prompt, self.max_new_tokens) for prompt in self.prompts]

    @cached_property
    def whole_runs(self) -> list[Run]:
        """The reference's with whole blocks to the end, as in vLLM."""
        decode = self.decoder.decode
        return [decode(self.reference, prompt, self.max_new_tokens, whole=True) for prompt in self.prompts]

    @cached_property
    def expected(self) -> Expected:
        """What engines are asked, and what they should say."""
        return Expected(
            layout=self.folder.layout,
            request=self._request(),
            plain=self.plain,
            ties=[self.decoder.near_ties(p, a) for p, a in zip(self.prompts, self.plain, strict=True)],
            runs=self.runs,
            whole_runs=self.whole_runs,
            bounds=self.bounds,
        )

    def _request(self) -> dict:
        path = self.options.path
        return {
            "drafter": str(self.folder.path.resolve()),
            "target": str(Path(path).resolve()) if Path(path).is_dir() else path,
            "revision": self.options.revision,
            "prompts": [prompt.tolist() for prompt in self.prompts],
            "max_new_tokens": self.max_new_tokens,
            "eos_ids": sorted(self.target.eos_ids),
            "block_size": self.reference.reading.block_size,
            "dtype": str(self.target.head.dtype).removeprefix("torch."),
        }


def make_subject(command: VerifyCommand, rows: list[Prompt], folder: DrafterFolder, target: HFTarget) -> Subject:
    """Prompts are those given, or those recorded with the export, or random text. Raises UserError or DataError."""
    measured = (folder.record or {}).get("measured")
    limit = command.max_new_tokens
    if rows:
        arguments = (folder.record or {}).get("chat_template")  # as the run rendered its own
        prompts = [torch.from_numpy(prompt_tokens(target.tokenizer, row, arguments)) for row in rows]
    elif measured:
        prompts = [torch.tensor(answer["prompt"]) for answer in measured["answers"]]
        if max(int(prompt.max()) for prompt in prompts) >= target.config.vocab_size:
            raise UserError(
                f"the prompts recorded in {folder.path} are not of this target's vocabulary; give --prompts"
            )
        limit = measured["max_new_tokens"]
    else:
        prompts = synthetic_prompts(target, command.limit)
    return Subject(
        folder=folder,
        target=target,
        options=command.target,
        decoder=Decoder(target),
        reference=Reference.from_folder(folder.path, target.device),
        prompts=[prompt.to(target.device) for prompt in prompts],
        max_new_tokens=limit,
    )


def pooled(cycles: list[list[int]]) -> float:
    """All committed tokens over all cycles."""
    numbers = [n for answer in cycles for n in answer]
    return sum(numbers) / max(1, len(numbers))


def accept_by_slot(accepted: list[list[int]], block_size: int) -> list[float]:
    """Share of cycles in which slot k was accepted."""
    numbers = [n for answer in accepted for n in answer]
    return [sum(n >= slot for n in numbers) / max(1, len(numbers)) for slot in range(1, block_size)]
