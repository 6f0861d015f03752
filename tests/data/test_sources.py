"""Files and forms: what is read, what is detected and said, and that every fault is named with its place."""

from __future__ import annotations

import functools
import gzip
import http.server
import json
import sys
import threading

import datasets
import fsspec
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from draftsmith.data.forms import choose_form, parse_row, read_row
from draftsmith.data.prompts import content_id
from draftsmith.data.sources import open_source
from draftsmith.errors import DataError, EnvironmentFault, UserError


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


ROWS = [{"id": f"r{i}", "messages": [user(f"q{i} é\u2028"), assistant(f"a{i}")], "tags": ["t"]} for i in range(2_500)]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def as_parquet(path):
    parquet.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=700)


def as_arrow_file(path):
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=300)


def as_arrow_stream(path):
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


def as_dataset_folder(path):
    datasets.Dataset.from_list(ROWS).save_to_disk(path, num_shards=3)


def as_folder(path):
    path.mkdir()
    (path / ".hidden.jsonl").write_bytes(b"no")
    (path / "README.md").write_bytes(b"no")
    (path / "b.json").write_text(json.dumps(ROWS[900:], indent=1))
    (path / "a.jsonl.zst").write_bytes(pa.compress(JSONL[: JSONL.index(b'{"id": "r900"')], "zstd", asbytes=True))


WRITERS = {
    "c.jsonl": lambda path: path.write_bytes(JSONL),
    "c.jsonl.gz": lambda path: path.write_bytes(gzip.compress(JSONL)),
    "c.jsonl.zst": lambda path: path.write_bytes(pa.compress(JSONL, "zstd", asbytes=True)),
    "no-suffix": lambda path: path.write_bytes(JSONL),
    "c.json": lambda path: path.write_text("\ufeff" + json.dumps(ROWS)),
    "lines.json": lambda path: path.write_bytes(JSONL),
    "c.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS).encode())),
    "c.parquet": as_parquet,
    "c.arrow": as_arrow_file,
    "stream.arrow": as_arrow_stream,
    "saved": as_dataset_folder,
    "folder": as_folder,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name):
    WRITERS[name](tmp_path / name)
    found = list(read(tmp_path / name))
    assert [one.id for one in found] == [row["id"] for row in ROWS]
    assert [one.messages for one in found] == [row["messages"] for row in ROWS]
    assert found[5].tags == ("t",)


def test_a_glob_in_order_of_names(tmp_path):
    for name, row in (("b.jsonl", ROWS[1]), ("a.jsonl", ROWS[0]), ("c.txt", ROWS[2])):
        (tmp_path / name).write_text(json.dumps(row))
    assert [one.id for one in read(tmp_path / "*.jsonl")] == ["r0", "r1"]
    with pytest.raises(DataError, match="no file matches"):
        open_source(str(tmp_path / "*.parquet"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty holds no file whose name ends with .jsonl"):
        open_source(str(tmp_path / "empty"))


@pytest.mark.parametrize("cut", [10, 100_000, 150_001])
def test_a_cut_off_array_is_read_up_to_the_cut_and_says_so(tmp_path, cut, monkeypatch):
    monkeypatch.setattr("draftsmith.data.sources.CHUNK", 4096)
    whole, notes = json.dumps(ROWS), []
    (tmp_path / "c.json").write_text(whole[:-cut])
    found = list(read(tmp_path / "c.json", notes=notes))
    assert 1_000 < len(found) < 2_500 and [one.id for one in found] == [row["id"] for row in ROWS[: len(found)]]
    assert notes == [f"{tmp_path / 'c.json'} is cut off after row {len(found)}: it was read up to there"]
    (tmp_path / "c.json").write_text(whole[:-cut] + whole)  # wrong in its midst: not a cut
    with pytest.raises(DataError, match=rf"row {len(found) + 1}: not JSON"):
        list(read(tmp_path / "c.json"))


def test_damaged_tables(tmp_path):
    for name in ("c.parquet", "c.arrow", "c.jsonl.zst"):
        path = tmp_path / name
        WRITERS[name](path)
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(DataError, match=f"{name}: damaged file|{name} could not be read"):
            list(read(path))


@pytest.fixture
def web(tmp_path):
    """A server of `tmp_path` on loopback."""
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("name", ["c.jsonl.gz", "c.jsonl"])
def test_a_url_is_read_and_shown_without_its_secrets(tmp_path, web, name):
    WRITERS[name](tmp_path / name)
    source = open_source(f"http://{web}/{name}?token=s3cret")
    rows = list(source.rows(print))
    assert len(rows) == 2_500 and source.name == rows[0].file == f"http://{web}/{name}"
    assert source.fingerprint() == open_source(str(tmp_path / name)).fingerprint()
    with pytest.raises(DataError) as caught:
        open_source(f"http://user:s3cret@{web}/nowhere.jsonl?token=s3cret")
    assert "nowhere.jsonl: no such file" in str(caught.value) and "s3cret" not in str(caught.value)


def test_an_object_store(tmp_path):
    store = fsspec.filesystem("memory")
    for name, start in (("b.jsonl", 1), ("a.jsonl", 0)):
        store.pipe(f"/bucket/{name}", json.dumps(ROWS[start]).encode())
    assert [one.id for one in read("memory://bucket/*.jsonl")] == ["r0", "r1"]
    assert [one.id for one in read("memory://bucket")] == ["r0", "r1"]
    before = open_source("memory://bucket").fingerprint()
    store.pipe("/bucket/b.jsonl", json.dumps(ROWS[2]).encode())
    assert open_source("memory://bucket").fingerprint() != before
    store.rm("/bucket", recursive=True)


@pytest.mark.parametrize(("url", "package"), [("s3://bucket/c.jsonl", "s3fs"), ("gs://bucket/c.jsonl", "gcsfs")])
def test_a_missing_package_is_named(monkeypatch, url, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(
        sys.modules["fsspec.registry"]._registry, url[:2], raising=False
    )  # an earlier test may have used it
    with pytest.raises(EnvironmentFault, match=f"{url}: this needs {package}; install it with: pip install {package}"):
        open_source(url)


def test_a_hugging_face_set(monkeypatch):
    asked = []

    def load(*arguments, **more):
        asked.append((*arguments, more))
        return datasets.Dataset.from_list(ROWS[: 3 if more["revision"] is None else 2])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert [one.id for one in read("some-one/chats")] == ["r0", "r1", "r2"]
    pinned = open_source("some-one/chats", subset="maths", split="test", revision="abc")
    assert asked[-1] == ("some-one/chats", "maths", {"split": "test", "revision": "abc"})
    assert pinned.fingerprint() != open_source("some-one/chats").fingerprint() and pinned.name == "some-one/chats"

    def fail(*arguments, **more):
        raise datasets.exceptions.DatasetNotFoundError("it does not exist\nlong story")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match=r"some-one/chats is no file .* could be loaded: it does not exist$"):
        open_source("some-one/chats")


def test_a_hugging_face_set_in_the_local_cache(monkeypatch, tmp_path):
    """As `datasets` leaves it after a download, and without a network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    for module in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    place = tmp_path / "some-one___chats" / "default" / "0.0.0" / ("a" * 40)
    place.mkdir(parents=True)
    table = datasets.Dataset.from_list(ROWS[:5])
    with pa.ipc.new_stream(place / "chats-train.arrow", table.data.schema) as writer:
        writer.write_table(table.data.table)
    splits = datasets.SplitDict(dataset_name="chats")
    splits.add(datasets.SplitInfo("train", num_examples=5, dataset_name="chats"))
    names = {"builder_name": "json", "dataset_name": "chats", "config_name": "default", "version": "0.0.0"}
    datasets.DatasetInfo(features=table.features, splits=splits, **names).write_to_directory(str(place))
    assert [one.id for one in read("some-one/chats")] == [row["id"] for row in ROWS[:5]]
    with pytest.raises(DataError, match="some-one/other is no file or folder here, and no Hugging Face data set"):
        open_source("some-one/other")


TALK = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo!"}]
CALL = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'}
ANSWERED = [user("Hi"), assistant("Yo!")]
BRIEF = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("row", "form", "messages"),
    [
        ({"conversations": TALK}, "sharegpt", ANSWERED),
        ({"conversations": TALK, "system": "Be brief."}, "sharegpt", [BRIEF, *ANSWERED]),
        ({"prompt": "Hi", "response": "Yo!"}, "prompt_response", ANSWERED),
        ({"prompt": [user("Hi")], "completion": [assistant("Yo!")]}, "prompt_response", ANSWERED),
        (
            {"instruction": "Add.", "input": "1 1", "output": "2"},
            "prompt_response",
            [user("Add.\n\n1 1"), assistant("2")],
        ),
        ({"instruction": "Hi", "input": "", "output": "Yo!"}, "prompt_response", ANSWERED),
        ({"question": "Hi", "answer": "Yo!", "system": "Be brief."}, "prompt_response", [BRIEF, *ANSWERED]),
    ],
)
def test_forms_are_detected(tmp_path, row, form, messages):
    (tmp_path / "c.jsonl").write_text(json.dumps(row))
    (one,) = read(tmp_path / "c.jsonl")
    assert choose_form("auto", (), row).name == form
    assert one.messages == messages and not one.ignored
    assert one.id == content_id(messages)


def test_function_calls_of_sharegpt(tmp_path):
    row = {"conversations": [TALK[0], CALL, {"from": "observation", "value": "2"}, TALK[1]]}
    (tmp_path / "c.jsonl").write_text(json.dumps(row))
    (one,) = read(tmp_path / "c.jsonl")
    assert one.messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    assert one.messages[2] == {"role": "tool", "content": "2"}


def test_text_and_tokens(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "Once"}')
    (text,) = read(tmp_path / "t.jsonl")
    assert text.text == "Once" and text.messages == []
    (tmp_path / "i.jsonl").write_text('{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}')
    (ids,) = read(tmp_path / "i.jsonl")
    assert (ids.tokens, ids.mask) == ([5, 6, 7], [False, True, True])
    (tmp_path / "l.jsonl").write_text('{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}')
    assert next(read(tmp_path / "l.jsonl")).mask == ids.mask


def test_columns_and_form_can_be_named(tmp_path):
    (tmp_path / "c.jsonl").write_text(json.dumps({"q": "Hi", "a": "Yo!", "text": "other"}))
    (one,) = read(tmp_path / "c.jsonl", columns=("prompt=q", "response=a"))
    assert one.messages == ANSWERED and one.ignored == ("text",)
    (one,) = read(tmp_path / "c.jsonl", form="text")
    assert one.text == "other"
    with pytest.raises(UserError, match="data.columns 'q': give PART=COLUMN; parts: messages, conversations, prompt"):
        list(read(tmp_path / "c.jsonl", columns=("q",)))
    with pytest.raises(DataError, match="line 1: expected an object with a prompt and a response, found keys q, a"):
        list(read(tmp_path / "c.jsonl", form="prompt_response"))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "Hi"}, "a prompt without an answer; let the target answer first"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "turn 1 must be an object .* from: human, user"),
        ({"conversations": {}}, "conversations must be a list"),
        ({"conversations": [TALK[0], {**CALL, "value": "add(1)"}]}, "turn 2: the function call is not JSON"),
        ({"text": ""}, "text must be a text that is not empty"),
        ({"input_ids": [5, 6], "loss_mask": [1]}, "as long as each other and not empty; they have 2 and 1"),
        ({"input_ids": [5, -6], "loss_mask": [1, 1]}, "input_ids holds -6"),
        ({"input_ids": [5, 6], "loss_mask": [1, 2]}, "loss_mask may hold 0 and 1 only"),
        ({"input_ids": [5, 6], "labels": [-100, 7]}, "labels differs from the token at position 1"),
        ({"input_ids": "5 6", "loss_mask": [1, 1]}, "input_ids must be a list of whole numbers"),
        ({"prompt": "Hi", "response": 3}, "message 2 .* has no text"),
        ({"messages": ANSWERED, "served": [{"message": 0, "answer_ids": [1]}]}, "message 0 is no answer"),
        ({"messages": ANSWERED, "served": [{"message": 1}]}, "served must be a list of objects"),
        ({"messages": ANSWERED, "chat_template_kwargs": 3}, "chat_template_kwargs must be an object"),
        ({"messages": ANSWERED, "tools": "{"}, "tools is text that is not JSON"),
        ({"what": 1}, "expected an object .*messages.*found keys what"),
    ],
)
def test_rows_that_are_refused(tmp_path, row, reason):
    (tmp_path / "c.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=f"line 1: .*{reason}"):
        list(read(tmp_path / "c.jsonl"))


def test_parquet_nulls_are_no_values(tmp_path):
    """A table gives each message all keys that any has."""
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    rows = [{"messages": [user("Hi"), {"role": "assistant", "content": None, "tool_calls": [call]}, *ANSWERED[1:]]}]
    rows[0]["messages"].insert(2, {"role": "tool", "content": "2"})
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    (one,) = read(tmp_path / "c.parquet")
    assert one.messages[0] == user("Hi") and "tool_calls" not in one.messages[3]
