"""Encoding in pieces gives the tokenizer's own ids, whatever the text holds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from draftsmith.data.pieces import PieceEncoder, sound_cuts
from tests.data.test_templates import FAMILIES, family
from tests.tiny import CHATML, tiny_tokenizer

TEXTS = st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im_", "|>", " ", "\n", "user\n", "é", "a b", "<"]))


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(TEXTS, max_size=5))
def test_any_text_gives_the_tokenizers_ids(texts):
    tokenizer = tiny_tokenizer()
    encoder = PieceEncoder(tokenizer, CHATML)
    assert encoder._cut is not None
    for text in map("".join, texts):
        assert encoder.encode(text) == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert encoder.encode(text) == tokenizer(text, add_special_tokens=False)["input_ids"]  # now from memory


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name):
    tokenizer, _ = family(name)
    encoder = PieceEncoder(tokenizer, tokenizer.chat_template)
    marks = [token.content for token in tokenizer.added_tokens_decoder.values()]
    text = " \n".join(f"{mark}user  {mark}x\n\n" for mark in marks) + "tail "
    tokenizer(text, truncation=True, max_length=2)  # which the tokenizer remembers
    assert encoder.encode(text) == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "added",
    [
        AddedToken("<|x|>", lstrip=True, special=True),
        AddedToken("<|x|>", rstrip=True, special=True),
        "<|im_start|>user",
    ],
)
def test_tokens_that_reach_over_a_cut_forbid_it(added):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [added]})
    names = sound_cuts(list(tokenizer.added_tokens_decoder.values()), CHATML)
    assert "<|im_start|>" not in names
    encoder = PieceEncoder(tokenizer, CHATML)
    for text in ("<|im_start|>user <|x|> a<|im_end|>\n", "a <|im_start|>user<|x|>\n"):
        assert encoder.encode(text) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_what_was_encoded_is_not_encoded_again(monkeypatch):
    tokenizer = tiny_tokenizer()
    encoder = PieceEncoder(tokenizer, CHATML)
    pieces = []
    real = encoder._encode
    monkeypatch.setattr(encoder, "_encode", lambda piece: (pieces.append(piece not in encoder._pieces), real(piece))[1])
    prompt = "<|im_start|>user\n" + "long " * 50 + "<|im_end|>\n<|im_start|>assistant\n"
    encoder.encode(prompt)
    encoder.encode(prompt + "An answer.")
    assert len(encoder._pieces) == 1  # the question; the answer and the marks are short
    encoder.forget()
    assert not encoder._pieces and encoder._kept
