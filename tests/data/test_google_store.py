"""Sets and rows in Google Cloud Storage: gcsfs over HTTP, against an emulator of the store on loopback."""

from __future__ import annotations

import json
import re
import sys

import fsspec
import pytest
from gcp_storage_emulator.server import create_server

from draftsmith.config import DataOptions
from draftsmith.data import shards
from draftsmith.data.cache import Cache
from draftsmith.data.dataset import open_prepared
from draftsmith.data.prepare import prepare, tokenizer_fingerprint
from draftsmith.data.sources import open_source
from draftsmith.errors import DataError
from tests.tiny import tiny_tokenizer

ROWS = [
    {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"answer {i}"}]}
    for i in range(12)
]


@pytest.fixture
def bucket(monkeypatch):
    """An empty one, as gcsfs sees it."""
    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server._api._httpd.server_port}")
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks by gRPC, which the emulator does not know
    for name in [name for name in sys.modules if name.split(".")[0] == "gcsfs"]:
        monkeypatch.delitem(sys.modules, name)  # reads that when it is imported
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "gs", raising=False)
    system = fsspec.get_filesystem_class("gs")
    monkeypatch.setattr(shards, "SHARD_BYTES", 500)
    monkeypatch.setattr(shards, "BATCH", 2)
    yield
    system.clear_instance_cache()
    server.stop()


def test_rows_and_sets(bucket, tmp_path):
    store = fsspec.filesystem("gs")
    lines = [json.dumps(row).encode() + b"\n" for row in ROWS]
    store.pipe_file("bucket/rows/a.jsonl", b"".join(lines[:5]))
    store.pipe_file("bucket/rows/b.jsonl", b"".join(lines[5:]))
    assert len(list(open_source("gs://bucket/rows").rows(print))) == 12
    assert len(list(open_source("gs://bucket/rows/b*.jsonl").rows(print))) == 7
    with pytest.raises(DataError, match="gs://bucket/rows/c.jsonl: no such file"):
        open_source("gs://bucket/rows/c.jsonl")
    before = open_source("gs://bucket/rows").fingerprint()
    store.pipe_file("bucket/rows/b.jsonl", b"".join(reversed(lines[5:])))
    assert open_source("gs://bucket/rows").fingerprint() != before

    tokenizer, said = tiny_tokenizer(), []
    url = "gs://bucket/sets/one"
    options = DataOptions(conversations="gs://bucket/rows", prepared=url, cache=str(tmp_path / "cache"))
    manifest = prepare(tokenizer, tokenizer_fingerprint(tokenizer), options, said.append)
    assert any(re.match(r"uploading \d+ of \d+ files, 0.0 MB, to gs://bucket/sets/one", line) for line in said)
    names = {f"bucket/sets/one/{manifest['at']}/{name}" for name in manifest["files"]}
    assert set(store.find("bucket/sets")) == names | {"bucket/sets/one/manifest.json"}
    there = open_prepared(url, Cache.of(str(tmp_path / "elsewhere"), 1.0), said.append)
    here = open_prepared(url, Cache.of(options.cache, 1.0))
    assert there.fingerprint == here.fingerprint and there.ids == here.ids and len(there) == 12
    assert there[7].tokens.tolist() == here[7].tokens.tolist()
    prepare(tokenizer, tokenizer_fingerprint(tokenizer), options, said.append)
    assert said[-1].startswith("reusing gs://bucket/sets/one: same conversations")


def test_wrong_bytes_are_refused_and_a_set_made_again(bucket, tmp_path):
    store, tokenizer, url = fsspec.filesystem("gs"), tiny_tokenizer(), "gs://bucket/set"
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    options = DataOptions(conversations=str(tmp_path / "c.jsonl"), prepared=url, cache=str(tmp_path / "cache"))
    manifest = prepare(tokenizer, tokenizer_fingerprint(tokenizer), options, print)
    name = f"bucket/set/{manifest['at']}/data-00001.arrow"
    content = store.cat_file(name)
    store.pipe_file(name, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match=r"data-00001.arrow is damaged: its content is not what the manifest says"):
        open_prepared(url, Cache.of(str(tmp_path / "elsewhere"), 1.0))
    store.rm_file(name)
    said = []
    assert prepare(tokenizer, tokenizer_fingerprint(tokenizer), options, said.append) == manifest
    assert "data-00001.arrow is missing or cut" in said[0] and store.cat_file(name) == content
