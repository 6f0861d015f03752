"""Figures of a prepared set that show, before any training, what is wrong with it."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftsmith.anchors import draw_anchors
from draftsmith.config import PackOptions
from draftsmith.data.mixture import Share, TrainingSet, shares
from draftsmith.packing import Mix, Schedule, count_anchors
from draftsmith.types import Sample

READ = 20_000
"""Rows that are read as a whole, evenly spread; of a larger set the rest is not looked into."""
DECODED = 1_000
"""Rows whose supervised text is decoded, evenly spread."""
QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Of the whole set, save where `read` or `decoded` say of how many rows."""

    rows: int
    tokens: int
    supervised: float
    """Share of the tokens."""
    lengths: dict[float, int]
    """Tokens of a row, by quantile."""
    histogram: tuple[tuple[int, int], ...]
    """(upper bound, rows) in powers of two."""
    read: int
    supervised_shares: dict[float, float]
    """Supervised share of a row, by quantile."""
    duplicates: int
    """Rows whose tokens are those of an earlier one, though their ids differ."""
    token_fill: float
    anchor_fill: float
    """Shares of the packs' budgets that the first epoch fills."""
    tags: dict[str, int]
    """Rows that carry each."""
    modes: dict[str, int]
    """Rows with thinking and without, if the template knows both."""
    shares: tuple[Share, ...]
    """Of a mixture."""
    tag_visits: dict[str, int]
    """Of a mixture: rows of each tag that the first epoch sees, as often as it does."""
    decoded: int
    scripts: dict[str, float]
    """Shares of the supervised letters."""


def first_epoch(dataset: TrainingSet, pack: PackOptions, mix: Mix | None, seed: int) -> Schedule:
    """As a run would see it that cuts what is longer than a pack."""
    return Schedule(
        lengths=np.minimum(dataset.lengths, pack.tokens),
        anchors=count_anchors(dataset.legal_counts, min(pack.anchors_per_document, pack.anchors), pack.anchor_density),
        num_tokens=pack.tokens,
        num_anchors=pack.anchors,
        window=pack.window,
        packs_per_step=1,
        epochs=1,
        seed=seed,
        mix=mix,
    )


def visits_by_tag(dataset: TrainingSet, schedule: Schedule) -> dict[str, int]:
    rows = schedule.rows(0)
    return {tag: int(dataset.tagged(tag)[rows].sum()) for tag in dataset.counts["tags"]}


def measure(dataset: TrainingSet, tokenizer: PreTrainedTokenizerBase, schedule: Schedule) -> Statistics:
    lengths, counts = dataset.lengths, dataset.counts
    mixed = len(dataset.parts) > 1 or schedule.mix is not None
    read = np.unique(np.linspace(0, len(dataset) - 1, min(READ, len(dataset))).astype(np.int64))
    decoded = set(read[:: max(1, len(read) // DECODED)].tolist())
    seen: set[bytes] = set()
    supervised, letters = [], Counter()
    for index in read:
        sample = dataset[index]
        seen.add(hashlib.blake2b(sample.tokens.tobytes(), digest_size=8).digest())
        supervised.append(float(sample.supervised.mean()))
        if int(index) in decoded:
            letters.update(scripts(str(tokenizer.decode(sample.tokens[sample.supervised].tolist()))))
    bounds = 2 ** np.arange(3, max(4, int(np.ceil(np.log2(lengths.max()))) + 1))
    places = Counter(np.searchsorted(bounds, lengths).tolist())
    token_fill, anchor_fill = schedule.fill()
    return Statistics(
        rows=len(dataset),
        tokens=counts["tokens"],
        supervised=counts["supervised"] / counts["tokens"],
        lengths={q: int(np.quantile(lengths, q, method="lower")) for q in QUANTILES},
        histogram=tuple((int(bound), places[place]) for place, bound in enumerate(bounds)),
        read=len(read),
        supervised_shares={q: float(np.quantile(supervised, q)) for q in QUANTILES},
        duplicates=len(read) - len(seen),
        token_fill=float(token_fill),
        anchor_fill=float(anchor_fill),
        tags=counts["tags"],
        modes=counts["modes"],
        shares=tuple(shares(dataset, schedule)) if mixed else (),
        tag_visits=visits_by_tag(dataset, schedule) if mixed else {},
        decoded=len(decoded),
        scripts={name: count / letters.total() for name, count in letters.most_common(8)},
    )


def scripts(text: str) -> Counter:
    """Letters by script: the first word of their Unicode name (LATIN, CYRILLIC, CJK, ...)."""
    letters = Counter(character for character in text if character.isalpha())
    found = Counter()
    for letter, count in letters.items():
        found[unicodedata.name(letter, "OTHER").split()[0].split("-")[0]] += count
    return found


def anchors_of(sample: Sample, pack: PackOptions, num_legal: int, seed: int) -> list[int]:
    """The anchors that the loader draws in the row in the first epoch."""
    num = int(count_anchors(np.array([num_legal]), pack.anchors_per_document, pack.anchor_density)[0])
    return draw_anchors(sample, num, seed, epoch=0).tolist()
