"""Token ids of rendered conversations, each stretch of text encoded once.

The text of an answer's prompt, of the same with the answer, and of every later prompt begin alike, so encoding each as
a whole would cost two and more times what the conversation costs. A tokenizer cuts its input at special tokens before
it does anything else: what stands between two of them is encoded the same whatever stands elsewhere. So texts are cut
where the template's own special tokens begin, and a piece that was met before is not encoded again. Where that rule
might not hold (a special token that swallows white space, or that overlaps another one) texts are encoded whole.
"""

from __future__ import annotations

import re

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, Unigram
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SHORT = 64
"""Characters of a piece that is kept for later conversations: role markers and the like."""
KEPT = 1_024
"""Pieces that are kept at most."""
WORDS = 1 << 15
"""Words whose ids the tokenizer itself remembers (10,000 unless told): it takes the first ones that it meets and never
lets go of any. 10 MB of English or of source text; 200 MB where words are whole sentences, as in Chinese."""


class PieceEncoder:
    """Encodes the texts of one conversation after the other; `forget` between them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sample: str) -> None:
        """`sample`: any rendered text of the template; the special tokens in it are where texts are cut."""
        self._tokenizer = tokenizer
        self._core: Tokenizer | None = None
        self._cut: re.Pattern | None = None
        self._pieces: dict[str, list[int]] = {}
        self._kept: dict[str, list[int]] = {}
        if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.split_special_tokens:
            return
        if names := sound_cuts(list(tokenizer.added_tokens_decoder.values()), sample):
            self._cut = re.compile("|".join(map(re.escape, names)))
            self._core = tokenizer.backend_tokenizer
            if isinstance(self._core.model, BPE | Unigram):
                self._core.model._resize_cache(WORDS)

    def encode(self, text: str) -> list[int]:
        """The ids of `tokenizer(text, add_special_tokens=False)`."""
        if self._core is None or self._cut is None:
            return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        cuts = [found.start() for found in self._cut.finditer(text)]
        ids: list[int] = []
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            if begin < end:
                ids += self._encode(text[begin:end])
        return ids

    def forget(self) -> None:
        self._pieces.clear()

    def _encode(self, piece: str) -> list[int]:
        known = self._kept if len(piece) <= SHORT else self._pieces
        if (found := known.get(piece)) is None:
            if len(known) >= KEPT:
                known.clear()
            assert self._core is not None
            self._core.no_truncation()  # an earlier call of the tokenizer may have left it on
            self._core.no_padding()
            # The fast one leaves out the offsets of tokens in the text.
            (encoding,) = self._core.encode_batch_fast([piece], add_special_tokens=False)
            found = known[piece] = encoding.ids
        return found


def sound_cuts(added: list[AddedToken], sample: str) -> list[str]:
    """Those added tokens in `sample` at which a text may be cut without changing its ids."""
    exact = [token for token in added if not token.normalized]
    plain = [t.content for t in exact if t.special and not (t.lstrip or t.rstrip or t.single_word)]
    everything = [token.content for token in added]
    # Neighbours that swallow white space reach over a cut, so with any of them nothing is cut.
    if any(token.lstrip or token.rstrip for token in added):
        return []
    return [one for one in plain if one in sample and not any(_overlap(one, other) for other in everything)]


def _overlap(one: str, other: str) -> bool:
    """True if an occurrence of `other` may cover a part of one of `one`, or stand across its beginning."""
    if one == other:
        return False
    ends = any(one.startswith(other[-size:]) for size in range(1, min(len(one), len(other)) + 1))
    begins = any(other.startswith(one[-size:]) for size in range(1, min(len(one), len(other)) + 1))
    return ends or begins or one in other or other in one
