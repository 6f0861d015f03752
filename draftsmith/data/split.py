"""A long document as several samples: each supervised token in exactly one of them, with context before it.

Used by `prepare` where a conversation is longer than max_length, and by `train` where a sample is longer than a pack.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool

from draftsmith.errors import UserError
from draftsmith.types import Sample


class Piece(NamedTuple):
    """Tokens [begin, end) of a document, supervised from `first` on; what precedes it is context."""

    begin: int
    first: int
    end: int


def split(supervised: Bool[np.ndarray, " n"], max_length: int, context: int) -> list[Piece]:
    """Pieces of at most `max_length` tokens that together hold every supervised token once, in order.

    The first begins with the document. Each later one begins `context` tokens before its first supervised token, so a
    stretch without supervision is in no piece, except as context. Positions restart with each piece.
    """
    pieces = []
    piece = Piece(0, 0, min(max_length, len(supervised)))
    while True:
        if supervised[piece.first : piece.end].any():
            pieces.append(piece)
        rest = np.flatnonzero(supervised[piece.end :])
        if not len(rest):
            return pieces
        first = piece.end + int(rest[0])
        begin = max(0, first - context)
        piece = Piece(begin, first, min(begin + max_length, len(supervised)))


def take(sample: Sample, piece: Piece) -> Sample:
    """The piece as a sample of its own; its id says where its supervision begins."""
    supervised = sample.supervised[piece.begin : piece.end].copy()
    supervised[: piece.first - piece.begin] = False
    return Sample(
        id=f"{sample.id}@{piece.first}",
        tokens=sample.tokens[piece.begin : piece.end],
        supervised=supervised,
        tags=sample.tags,
    )


def context_size(overlong: str, given: int | None, max_length: int) -> int:
    """Tokens of context of a later piece: as given, or a quarter. Raises UserError for an option that cannot work."""
    if given is None:
        return max_length // 4
    if overlong != "split":
        raise UserError(f"data.split_context is {given}, but data.overlong is {overlong!r}, not 'split'; give both")
    if not 0 <= given <= max_length - 2:
        raise UserError(
            f"data.split_context is {given}; of pieces of {max_length} tokens it may be 0 to {max_length - 2}"
        )
    return given
