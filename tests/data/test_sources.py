"""Files and forms: what is read, what is detected and said, and that every fault is named with its place."""

from __future__ import annotations

import gzip
import json

import pytest

from draftsmith.data.forms import choose_form, parse_row, read_row
from draftsmith.data.sources import open_source
from draftsmith.errors import DataError


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def read(path, form="auto", columns=(), notes=None):
    """The conversations of a source, strictly."""
    notes = [] if notes is None else notes
    chosen = None
    for row in open_source(str(path)).rows(notes.append):
        try:
            value = parse_row(row.value)
            chosen = chosen or choose_form(form, columns, value)
            yield read_row(value, row.number, chosen)
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error


GOOD = json.dumps({"messages": [user("Hi"), assistant("Yo!")]}).encode()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{'messages'", "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[1]", "found list"),
        (b'{"conversations": []}', "found keys conversations"),
        (b"{}", "found keys none"),
        (b'{"messages": [{"role": "user", "content": "Hi"}]}', "no assistant message"),
        (GOOD[:-1] + b', "tags": "x"}', "tags must be"),
        (GOOD[:-1] + b', "tools": {}}', "tools must be"),
        (GOOD[:-1] + b', "finish": "cut"}', "finish is 'cut'"),
        (GOOD[:-1] + b', "finish": ["stop"]}', "finish is "),
        (GOOD[:-1] + b', "id": true}', "id must be"),
        (GOOD.replace(b"Yo", b"\\ud800"), "surrogate"),
    ],
)
def test_lines_that_are_refused(tmp_path, line, reason):
    path = tmp_path / "c.jsonl"
    path.write_bytes(GOOD + b"\n\n" + line + b"\n")
    with pytest.raises(DataError, match=f"c.jsonl, line 3: .*{reason}"):
        list(read(path))


def test_a_row_with_everything(tmp_path):
    path = tmp_path / "c.jsonl.gz"
    row = json.loads(GOOD) | {"id": 7, "tags": ["maths"], "finish": "length", "tools": [{"name": "add"}], "source": 1}
    path.write_bytes(gzip.compress(json.dumps(row).encode()))
    (conversation,) = read(path)
    assert (conversation.id, conversation.tags, conversation.finish) == ("7", ("maths",), "length")
    assert (conversation.tools, conversation.ignored) == ([{"name": "add"}], ("source",))


def test_a_damaged_gzip_file(tmp_path):
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD * 500)[:-9])
    with pytest.raises(DataError, match="damaged file"):
        list(read(path))
    path.write_bytes(GOOD)  # a download that was unpacked on the way: its bytes count, not its name
    assert len(list(read(path))) == 1
