"""The preview: what is marked, what one block shows, and that no text of the data can steer the terminal."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from draftsmith.config import DataOptions, PackOptions
from draftsmith.data.dataset import open_prepared
from draftsmith.data.mixture import Part, TrainingSet, make_mix, open_training_set
from draftsmith.data.prepare import prepare, tokenizer_fingerprint
from draftsmith.data.statistics import anchors_of, first_epoch, measure
from draftsmith.errors import UserError
from draftsmith.preview import (
    BlockRow,
    PageRow,
    mixture,
    origin,
    preview_block,
    preview_page,
    preview_rows,
    statistics,
    write_page,
)
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@pytest.fixture
def prepared(tmp_path):
    def make(*rows):
        with open(tmp_path / "c.jsonl", "w") as file:
            for question, answer, *tags in rows:
                messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                file.write(json.dumps({"messages": messages, "tags": tags}) + "\n")
        options = DataOptions(conversations=str(tmp_path / "c.jsonl"), prepared=str(tmp_path / "out"))
        prepare(TOKENIZER, tokenizer_fingerprint(TOKENIZER), options, lambda line: None)
        return TrainingSet([Part("out", 1.0, open_prepared(tmp_path / "out"))])

    return make


def printed(items, *, terminal):
    """What a console writes, escape codes included."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, color_system="standard" if terminal else None, width=500)
    for item in items:
        console.print(item) if isinstance(item, Text) else print(item, file=stream)
    return stream.getvalue()


def test_plain_rows_mark_what_is_supervised(prepared):
    dataset = prepared(("Hi", "Yo!", "maths"), ("Ho", "No."))
    rows = preview_rows(dataset, TOKENIZER, 5, colour=False)
    assert len(rows) == 2 and all(isinstance(row, str) for row in rows)
    assert rows[0] == (
        f"--- {dataset.id(0)}: {len(dataset[0].tokens)} tokens, 4 supervised, tags maths\n"
        "<|im_start|>user\\n\nHi<|im_end|>\\n\n<|im_start|>assistant\\n\n[[Yo!<|im_end|>]]\\n\n"
    )
    assert len(preview_rows(dataset, TOKENIZER, 1, colour=False)) == 1
    assert preview_rows(dataset, TOKENIZER, 0, colour=False) == []
    with pytest.raises(UserError, match="rows is -1"):
        preview_rows(dataset, TOKENIZER, -1, colour=False)


def test_coloured_rows(prepared):
    (row,) = preview_rows(prepared(("Hi", "Yo!")), TOKENIZER, 1, colour=True)
    styles = {row.plain[span.start : span.end]: span.style for span in row.spans}
    assert styles["Yo!<|im_end|>"] == "green"
    assert styles["<|im_start|>user\\n\nHi<|im_end|>\\n\n<|im_start|>assistant\\n\n"] == "bright_black"
    assert "\x1b[32mYo!<|im_end|>\x1b[0m" in printed([row], terminal=True)
    assert "[[" not in row.plain


EVIL = "[bold red]x[/] \x1b[31mred\x1b[0m \x07 \x9b2J \u202etxet\u200b a\tb\r \u2028 [[fake]] :smile: é 日"


@pytest.mark.parametrize("colour", [False, True])
def test_nothing_in_the_data_steers_the_terminal(prepared, colour):
    dataset = prepared((EVIL, EVIL, EVIL))
    out = printed(preview_rows(dataset, TOKENIZER, 1, colour=colour), terminal=False)
    for visible in ("[bold red]x[/]", "\\x1b[31mred\\x1b[0m", "\\x07", "\\x9b2J", "\\u202etxet\\u200b", "a\\tb\\r"):
        assert out.count(visible) == 3, visible
    assert out.count("\\u2028") == 3 and out.count(":smile: é 日") == 3
    assert not set(out) & set("\x1b\x07\x9b\u202e\u200b\t\r\u2028")
    fake = "\\[\\[fake\\]\\]" if not colour else "[[fake]]"
    assert out.count(fake) >= 2
    if colour:
        assert "\x1b[31m" not in printed(preview_rows(dataset, TOKENIZER, 1, colour=True), terminal=True)


def test_the_middle_of_a_long_context_is_left_out(prepared):
    (row,) = preview_rows(prepared(("x" * 1000, "y" * 900)), TOKENIZER, 1, colour=False)
    assert "\n... 819 tokens of context left out ...\n" in row  # of 6 + 1000 + 13
    assert [len(stretch) for stretch in re.findall("xx+|yy+", row)] == [94, 87, 900]


def block(anchor, size, tokens, supervised_end, context_start=0):
    slots = np.arange(size)
    scored = (anchor + slots < supervised_end) & (slots > 0)
    label = np.where(scored, tokens[np.minimum(anchor + slots, len(tokens) - 1)], 0)
    given = np.full(size, 300)
    given[0] = tokens[anchor]
    weight = np.where(scored, np.exp(-(slots - 1) / 4), 0).astype(np.float32)
    return BlockRow(
        anchor=anchor,
        context_start=context_start,
        tokens=given,
        position=anchor - context_start + slots,
        label=label,
        weight=weight,
    )


def test_a_block(prepared):
    sample = prepared(("Hi", "Yo!"))[0]
    anchor = int(np.flatnonzero(sample.supervised)[1])
    view = preview_block(TOKENIZER, sample.tokens, block(anchor, 4, sample.tokens, anchor + 3), colour=False)
    rows = view.splitlines()
    assert anchor == 22
    assert rows == [
        "anchor at 22; it sees tokens 0 to 21, which end with: <|im_start|>assistant\\nY",
        "slot  position  input       label             weight",
        f"0     22        {word('o'):<10}  -                 0.000",
        f"1     23        mask (300)  {word('!'):<16}  1.000",
        f"2     24        mask (300)  {word('<|im_end|>'):<16}  0.779",
        "3     25        mask (300)  -                 0.000",
    ]


def word(text):
    return f"'{text}' ({TOKENIZER.convert_tokens_to_ids(text)})"


def test_a_block_in_colour():
    tokens = np.array(TOKENIZER("ab\ncd")["input_ids"])
    view = preview_block(TOKENIZER, tokens, block(1, 3, tokens, 4), colour=True)
    green = [view.plain[span.start : span.end] for span in view.spans if span.style == "green"]
    assert [line.split()[0] for line in green] == ["1", "2"]
    assert "'\\n'" in green[0] and len(view.plain.splitlines()) == 5


def test_a_block_with_nothing_before_it():
    tokens = np.array(TOKENIZER("abcd")["input_ids"])
    view = preview_block(TOKENIZER, tokens, block(0, 2, tokens, 4), colour=False)
    assert view.splitlines()[0] == "anchor at 0; it sees tokens none"


def test_statistics(prepared):
    dataset = prepared(("Hi", "Yo!", "maths", "en\x1b"), ("Ho", "No.", "maths"))
    tokens = int(dataset.lengths.sum())
    assert statistics(dataset) == (
        f"2 rows, {tokens} tokens, {8 / tokens:.1%} supervised, longest {dataset.lengths.max()}, "
        "tags: en\\x1b 1, maths 2"
    )


@pytest.fixture
def mixed(tmp_path) -> tuple[TrainingSet, DataOptions]:
    """Two sets, one of them seen half as often, and a cap on a tag."""
    for name, num in (("a<b>", 6), ("two", 20)):
        rows = [{"id": f"{name} {i}", "text": f"{name} {i}", "tags": ["x"] * (i % 2)} for i in range(num)]
        (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = DataOptions(conversations=str(tmp_path / "c.jsonl"), prepared=str(tmp_path / name))
        prepare(TOKENIZER, tokenizer_fingerprint(TOKENIZER), options, lambda line: None)
    mix = DataOptions(mix=(str(tmp_path / "a<b>"), f"{tmp_path / 'two'}=0.5"), caps=("x=5",))
    return open_training_set(mix, 400), mix


def test_a_mixture(mixed, tmp_path):
    dataset, options = mixed
    schedule = first_epoch(dataset, PackOptions(tokens=400, anchors=40), make_mix(dataset, options), 0)
    visits = schedule.rows(0)
    names = [dataset.part_of(int(row)).name for row in visits]
    assert statistics(dataset).startswith("26 rows, ") and statistics(dataset).endswith("tags: x 13")
    *sets, cap, tags = mixture(dataset, schedule)
    assert len(sets) == 2 and cap.startswith("cap: x, 5 rows an epoch: 5 of ")
    for part, line in zip(dataset.parts, sets, strict=True):
        count = names.count(part.name)
        assert line.startswith(f"mix: {part.name}, weight {part.weight:g}: {len(part.dataset)} rows, {count} visits")
    assert tags == "tags in the first epoch: x 5"
    rows = [row.splitlines()[0] for row in preview_rows(dataset, TOKENIZER, 14, colour=False)]
    assert [row.rsplit(", of ")[1] for row in rows[:4]] == [part.name for part in dataset.parts] * 2
    assert len(set(rows)) == 14 and sum(row.endswith("a<b>") for row in rows) == 6, "of one set all, then the other's"
    assert sorted(dataset.first_rows(100)) == list(range(26))


def test_a_page_of_a_mixture(mixed):
    dataset, options = mixed
    pack = PackOptions(tokens=400, anchors=40)
    figures = measure(dataset, TOKENIZER, first_epoch(dataset, pack, make_mix(dataset, options), 0))
    assert [share.weight for share in figures.shares] == [part.weight for part in dataset.parts]
    assert sum(share.tokens for share in figures.shares) == pytest.approx(1.0) and figures.tag_visits == {"x": 5}
    rows = [PageRow(sample=dataset[i], anchors=[], limit=400, origin=origin(dataset, i)) for i in dataset.first_rows(2)]
    page = preview_page("Preview", figures, rows, "block", TOKENIZER)
    assert "<h2>The mixture</h2>" in page and "<h2>Tags in the first epoch</h2>" in page
    assert "a&lt;b&gt;" in page and "a<b>" not in page
    for share in figures.shares:
        assert f"{share.rows} rows, {share.weight:g} times an epoch: {share.visits} visits in the first" in page
    alone = TrainingSet(dataset.parts[:1])
    single = preview_page("Preview", measure(alone, TOKENIZER, first_epoch(alone, pack, None, 0)), [], "", TOKENIZER)
    assert "The mixture" not in single and "first epoch</h2>" not in single


def page_of(dataset, rows, *, block="a block", limit=10_000, pack=None):
    pack = pack or PackOptions(tokens=400, anchors=40, anchor_density=0.5)
    figures = measure(dataset, TOKENIZER, first_epoch(dataset, pack, None, 0))
    shown = []
    for index in range(rows):
        sample, legal = dataset[index], int(dataset.legal_counts[index])
        shown.append(PageRow(sample=sample, anchors=anchors_of(sample, pack, legal, 0), limit=limit))
    return preview_page("Preview of <out>", figures, shown, block, TOKENIZER), figures


class Reader(HTMLParser):
    """Tags, and the text by the class it stands in."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self.attributes, self.inside = [], {}, [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.inside.append(dict(attrs).get("class", tag))

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        self.inside.pop()

    def handle_data(self, data):
        if self.inside:
            self.text[self.inside[-1]] = self.text.get(self.inside[-1], "") + data


def test_a_page_of_rows(prepared):
    dataset = prepared(("Hi", "Yo!", "maths"), ("Ho", "No."))
    page, _ = page_of(dataset, 1)
    read = Reader(page)
    assert read.text["c"].startswith("context<|im_start|>user\\n\nHi")
    plain, anchored = read.text["s"].removeprefix("Supervised"), read.text["u"].removeprefix("anchors")
    assert sorted(plain + anchored) == sorted("Yo!<|im_end|>") and len(anchored) == 2 and set(anchored) <= set("Yo!")
    assert "4 supervised, tags maths" in read.text["b"] and "a block" in read.text["pre"]
    assert "script" not in read.tags and not any(name in ("src", "href") for name, _ in read.attributes)


def test_what_a_pack_cuts_is_shown_as_cut(prepared):
    dataset = prepared(("Hi", "Yo! and more"))
    length = len(dataset[0].tokens)
    page, _ = page_of(dataset, 1, limit=length - 8)
    assert Reader(page).text["x"] == "cut" + TOKENIZER.decode(dataset[0].tokens[-8:]).replace("\n", "\\n\n")


def test_nothing_in_the_data_becomes_markup(prepared):
    evil = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&lt; " + EVIL
    page, _ = page_of(prepared((evil, evil, evil)), 1, block=evil, pack=PackOptions(anchor_density=0.0))
    read = Reader(page)
    assert not {"script", "img"} & set(read.tags) and not any(name.startswith("on") for name, _ in read.attributes)
    for character in "\x1b\x07\x9b\u202e\u200b\u2028\r":
        assert character not in page
    assert "<script>alert(1)</script>" in read.text["s"]


def test_an_anchor_amid_a_character_does_not_break_it(prepared):
    page, _ = page_of(prepared(("Hi", "日本日本")), 1, pack=PackOptions(tokens=400, anchors=40, anchor_density=1.0))
    assert "\ufffd" not in page and "本" in page


def test_the_page_allows_its_own_style_and_nothing_else(prepared):
    page, _ = page_of(prepared(("Hi", "Yo!")), 1)
    (policy,) = [value for name, value in Reader(page).attributes if name == "content" and "src" in value]
    style = page[page.index("<style>") + 7 : page.index("</style>")]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'"
    assert " style=" not in page


def test_statistics_of_a_set(prepared):
    rows = [(f"q{i}", "Да, 日本 ab", "t") for i in range(20)] + [("q", "abcdefgh" * 20)] * 2
    dataset = prepared(*rows)
    _, figures = page_of(dataset, 0)
    lengths = sorted(dataset.lengths.tolist())
    assert (figures.rows, figures.tags) == (21, {"t": 20})
    assert figures.lengths[0.0] == lengths[0] and figures.lengths[1.0] == lengths[-1]
    assert sum(count for _, count in figures.histogram) == 21
    assert all(sum(low < n <= high for n in lengths) == count for low, (high, count) in bins(figures.histogram))
    assert figures.duplicates == 0 and figures.supervised == pytest.approx(
        sum(int(dataset[i].supervised.sum()) for i in range(21)) / sum(lengths)
    )
    letters = {"CYRILLIC": 40, "CJK": 40, "LATIN": 40 + 160 + 21 * 5}  # of <|im_end|> too
    assert figures.scripts == {name: pytest.approx(count / sum(letters.values())) for name, count in letters.items()}
    schedule_tokens = -(-sum(lengths) // 400)
    assert 0.3 < figures.token_fill <= sum(lengths) / (400 * schedule_tokens)
    assert 0 < figures.anchor_fill <= 1


def bins(histogram):
    bounds = [0, *(bound for bound, _ in histogram)]
    return zip(bounds, histogram, strict=False)


def test_rows_with_the_same_tokens_are_counted(tmp_path):
    with open(tmp_path / "c.jsonl", "w") as file:
        for name in "abc":
            file.write(json.dumps({"id": name, "text": "the same"}) + "\n")
    options = DataOptions(conversations=str(tmp_path / "c.jsonl"), prepared=str(tmp_path / "out"))
    prepare(TOKENIZER, tokenizer_fingerprint(TOKENIZER), options, lambda line: None)
    dataset = TrainingSet([Part("out", 1.0, open_prepared(tmp_path / "out"))])
    assert measure(dataset, TOKENIZER, first_epoch(dataset, PackOptions(), None, 0)).duplicates == 2


def test_writing_a_page(tmp_path):
    write_page(str(tmp_path / "p.html"), "page")
    assert [path.name for path in tmp_path.iterdir()] == ["p.html"] and (tmp_path / "p.html").read_text() == "page"
    for path in (tmp_path, tmp_path / "no" / "p.html"):
        with pytest.raises(UserError, match="name a file in a folder that exists"):
            write_page(str(path), "page")
