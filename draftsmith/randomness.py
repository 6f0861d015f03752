"""Counter-based randomness: a generator is a pure function of its key, so there is no generator state to save.

Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) keyed by a hash of the words that
name the draw: who draws (its purpose), the run's seed, the epoch, the sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from jaxtyping import UInt64


def keyed_seed(*words: str | int) -> int:
    """A 64-bit number that depends on every word and on their order."""
    text = "\x1f".join(str(word) for word in words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def keyed_generator(*words: str | int) -> np.random.Generator:
    """A fresh NumPy generator for exactly this key."""
    return np.random.Generator(np.random.Philox(key=keyed_seed(*words)))


def name_keys(names: Iterable[str]) -> UInt64[np.ndarray, " n"]:
    """A 64-bit key for each name, for `keyed_draws`."""
    digests = b"".join(hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(digests, "<u8")


def keyed_draws(keys: UInt64[np.ndarray, " n"], *words: str | int) -> UInt64[np.ndarray, " n"]:
    """A 64-bit draw for each key, which depends on that key and the words alone.

    The finaliser of SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014): for
    millions of keys at once, where a generator each would take a minute.
    """
    draws = keys ^ np.uint64(keyed_seed(*words))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        draws = (draws ^ (draws >> np.uint64(shift))) * np.uint64(factor)
    return draws ^ (draws >> np.uint64(31))
