"""Which ids were met, with what content and in which row, for millions of rows in little memory.

A table with open addresses: 24 bytes a place, half of the places free, where a dict of Python objects takes 250.
"""

from __future__ import annotations

import hashlib
from array import array

import numpy as np

ENTRY = np.dtype([("key", "<u8"), ("digest", "<u8"), ("row", "<u8")])
FIRST = 1 << 12
"""Places of a new table; a power of two, as all later sizes are."""


class Seen:
    """Ids met so far; `new` are the numbers of the entries since it was last emptied, for the journal."""

    def __init__(self) -> None:
        self._places = np.zeros(FIRST, ENTRY)
        self._filled = 0
        self.new = array("Q")

    def __len__(self) -> int:
        return self._filled

    def add(self, identifier: str, digest: bytes, row: int) -> tuple[bytes, int] | None:
        """The digest and the row (from 1) that this id has already; None if it is new, and then it has these."""
        key = int.from_bytes(hashlib.blake2b(identifier.encode(), digest_size=8).digest(), "little")
        place = self._place(key)
        if row_before := int(self._places["row"][place]):
            return int(self._places["digest"][place]).to_bytes(8, "little"), row_before
        entry = (key, int.from_bytes(digest[:8], "little"), row)
        self._put(place, entry)
        self.new.extend(entry)
        return None

    def take_new(self) -> bytes:
        """The new entries as bytes of `ENTRY`s; they are then no longer new."""
        content = self.new.tobytes()
        self.new = array("Q")
        return content

    def load(self, entries: np.ndarray) -> None:
        """Entries of an earlier process."""
        for entry in entries.tolist():
            self._put(self._place(entry[0]), entry)

    def _place(self, key: int) -> int:
        """Where the key is, or the free place where it belongs."""
        keys, rows, mask = self._places["key"], self._places["row"], len(self._places) - 1
        place = key & mask
        while rows[place] and keys[place] != key:
            place = (place + 1) & mask
        return place

    def _put(self, place: int, entry: tuple[int, int, int]) -> None:
        self._places[place] = entry
        self._filled += 1
        if 2 * self._filled > len(self._places):
            old = self._places[self._places["row"] > 0]
            self._places = np.zeros(2 * len(self._places), ENTRY)
            for one in old:
                self._places[self._place(int(one["key"]))] = one
