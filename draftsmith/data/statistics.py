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
from draftsmith.data.dataset import PreparedDataset
from draftsmith.packing import Schedule, count_anchors
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
    shares: dict[float, float]
    """Supervised share of a row, by quantile."""
    duplicates: int
    """Rows whose tokens are those of an earlier one, though their ids differ."""
    token_fill: float
    anchor_fill: float
    """Shares of the packs' budgets that the first epoch fills."""
    tags: dict[str, int]
    decoded: int
    scripts: dict[str, float]
    """Shares of the supervised letters."""


def measure(dataset: PreparedDataset, tokenizer: PreTrainedTokenizerBase, pack: PackOptions, seed: int) -> Statistics:
    lengths, counts = dataset.lengths, dataset.manifest["counts"]
    read = np.unique(np.linspace(0, len(dataset) - 1, min(READ, len(dataset))).astype(np.int64))
    decoded = set(read[:: max(1, len(read) // DECODED)].tolist())
    seen: set[bytes] = set()
    shares, letters = [], Counter()
    for index in read:
        sample = dataset[index]
        seen.add(hashlib.blake2b(sample.tokens.tobytes(), digest_size=8).digest())
        shares.append(float(sample.supervised.mean()))
        if int(index) in decoded:
            letters.update(scripts(str(tokenizer.decode(sample.tokens[sample.supervised].tolist()))))
    bounds = 2 ** np.arange(3, max(4, int(np.ceil(np.log2(lengths.max()))) + 1))
    places = Counter(np.searchsorted(bounds, lengths).tolist())
    schedule = Schedule(
        lengths=np.minimum(lengths, pack.tokens),
        anchors=count_anchors(dataset.legal_counts, min(pack.anchors_per_document, pack.anchors), pack.anchor_density),
        num_tokens=pack.tokens,
        num_anchors=pack.anchors,
        window=pack.window,
        packs_per_step=1,
        epochs=1,
        seed=seed,
    )
    token_fill, anchor_fill = schedule.fill()
    return Statistics(
        rows=len(dataset),
        tokens=counts["tokens"],
        supervised=counts["supervised"] / counts["tokens"],
        lengths={q: int(np.quantile(lengths, q, method="lower")) for q in QUANTILES},
        histogram=tuple((int(bound), places[place]) for place, bound in enumerate(bounds)),
        read=len(read),
        shares={q: float(np.quantile(shares, q)) for q in QUANTILES},
        duplicates=len(read) - len(seen),
        token_fill=float(token_fill),
        anchor_fill=float(anchor_fill),
        tags=counts["tags"],
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
