"""Sets in an object store, over real HTTP: fetched whole or not at all, whatever the store does; no secret is shown."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import re
from dataclasses import replace

import pytest

from draftsmith.config import DataOptions
from draftsmith.data import cache as module
from draftsmith.data import remote, shards, store
from draftsmith.data.cache import Cache
from draftsmith.data.dataset import open_prepared
from draftsmith.data.prepare import prepare, tokenizer_fingerprint
from draftsmith.data.sources import open_source
from draftsmith.errors import DataError, EnvironmentFault, UserError
from tests.data.object_store import KEYS, Store, object_store
from tests.tiny import tiny_tokenizer

URL = "s3://bucket/sets/one"
ROWS = [
    {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"answer {i}"}]}
    for i in range(12)
]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture
def there(monkeypatch) -> Store:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(remote, "CHUNK", 1 << 10)
    monkeypatch.setattr(shards, "SHARD_BYTES", 500)
    monkeypatch.setattr(shards, "BATCH", 2)
    with object_store(monkeypatch) as found:
        yield found


@pytest.fixture
def options(tmp_path) -> DataOptions:
    (tmp_path / "c.jsonl").write_bytes(JSONL)
    return DataOptions(conversations=str(tmp_path / "c.jsonl"), prepared=URL, cache=str(tmp_path / "cache"))


def run(options):
    lines = []
    tokenizer = tiny_tokenizer()
    return prepare(tokenizer, tokenizer_fingerprint(tokenizer), options, lines.append), lines


def cache_of(options) -> Cache:
    return Cache.of(options.cache, options.cache_gb)


def open_there(options, lines=None):
    return open_prepared(options.prepared, cache_of(options), (lines if lines is not None else []).append)


def no_secrets(text: str) -> None:
    assert not re.search("canary|Signature|X-Amz|[?]", text), text


def test_prepared_uploaded_and_read_on_another_machine(there, options, tmp_path):
    manifest, lines = run(options)
    local = run(replace(options, prepared=str(tmp_path / "local")))[0]
    assert local["files"] == manifest["files"]
    version = manifest["at"]
    assert sorted(there.files()) == sorted(
        ["sets/one/manifest.json", *(f"sets/one/{version}/{name}" for name in local["files"])]
    )
    order = [path for method, path in there.requests if method == "PUT"]
    assert order[-1].startswith("/bucket/sets/one/manifest.json")
    assert any(re.match(r"uploading \d of \d files, 0.0 MB, to s3://bucket/sets/one", line) for line in lines)
    here, ours = open_there(options), open_prepared(tmp_path / "local")
    assert here.ids == ours.ids and here.fingerprint == ours.fingerprint
    fetched = [path for method, path in there.requests if method == "GET" and ".arrow" in path]
    assert not fetched  # what was uploaded here stays in the cache
    elsewhere, said = replace(options, cache=str(tmp_path / "elsewhere")), []
    assert [open_there(elsewhere, said)[i].tokens.tolist() for i in range(12)] == [
        ours[i].tokens.tolist() for i in range(12)
    ]
    assert re.match(r"fetching \d files, 0.0 MB, of s3://bucket/sets/one to .*elsewhere", said[0])
    before, said = len(there.requests), []
    open_there(elsewhere, said)
    assert said == [] and not any(".arrow" in path for _, path in there.requests[before:])
    assert pickle.loads(pickle.dumps(open_there(elsewhere)))[3].id == ours[3].id


def test_reuse_and_replacement(there, options, tmp_path):
    run(options)
    (line,) = run(replace(options, cache=str(tmp_path / "elsewhere")))[1]
    assert line.startswith("reusing s3://bucket/sets/one: same conversations")
    reader = open_there(replace(options, cache=str(tmp_path / "reader")))
    old = reader.ids
    manifest, lines = run(replace(options, max_length=100))
    assert lines[0] == "rebuilding s3://bucket/sets/one: max_length changed (4096 -> 100)"
    assert {name.split("/")[2] for name in there.files()} == {"manifest.json", manifest["at"]}
    assert reader.ids == old and pickle.loads(pickle.dumps(reader))[0].id == old[0]  # its copy stays


def test_a_missing_object_of_a_set_is_made_again(there, options):
    manifest, _ = run(options)
    there.delete(f"sets/one/{manifest['at']}/data-00001.arrow")
    again, lines = run(options)
    assert "data-00001.arrow is missing or cut" in lines[0] and again == manifest


def test_foreign_objects_are_left_alone(there, options):
    there.put("sets/one/notes.txt", b"mine")
    for name in ("sets/one/notes.txt", "sets/one/manifest.json"):
        with pytest.raises(DataError, match="s3://bucket/sets/one exists and was not made by"):
            run(options)
        assert there.files() == {name: b"mine"}
        there.delete(name)
        there.put("sets/one/manifest.json", b"mine")
    there.delete("sets/one/manifest.json")
    with pytest.raises(DataError, match="s3://bucket/sets/one holds no prepared conversations; run"):
        open_there(options)


@pytest.mark.parametrize("kind", ["slow", "unavailable", "reset", "short"])
def test_what_passes_is_tried_again(there, options, tmp_path, kind):
    run(options)
    elsewhere = replace(options, cache=str(tmp_path / "elsewhere"))
    faults = [there.fault(kind, path, times=3) for path in ("manifest.json", "data-00001.arrow")]
    assert open_there(elsewhere).ids == open_there(options).ids
    assert all(fault.met == 3 for fault in faults)


@pytest.mark.parametrize("kind", ["slow", "reset", "short"])
def test_what_stays_ends_with_one_clear_error_and_goes_on_later(there, options, tmp_path, kind, monkeypatch):
    run(options)
    elsewhere = replace(options, cache=str(tmp_path / "elsewhere"))
    fault = there.fault(kind, "data-00002.arrow", times=1_000)
    with pytest.raises(
        EnvironmentFault, match=r"s3://bucket/sets/one/\w+/data-00002.arrow could not be reached \("
    ) as caught:
        open_there(elsewhere)
    assert fault.met % remote.TRIES == 0 and "6 tries" in str(caught.value)  # the library below tries a reset twice
    no_secrets(str(caught.value))
    there.faults.clear()
    before = len(there.requests)
    assert len(open_there(elsewhere)) == 12
    fetched = {
        path.rsplit("/", 1)[1] for method, path in there.requests[before:] if "data-" in path and method == "GET"
    }
    assert fetched == {"data-00002.arrow"}


def test_an_expired_token(there, options, tmp_path):
    run(options)
    elsewhere = replace(options, cache=str(tmp_path / "elsewhere"))
    once = there.fault("expired", "data-00000.arrow", times=1)  # renewed meanwhile: a new connection has the new one
    assert len(open_there(elsewhere)) == 12 and once.met == 1
    for path in (tmp_path / "elsewhere").rglob("*.arrow"):
        path.unlink()
    there.fault("expired", "data-00000.arrow", times=1_000)
    with pytest.raises(
        EnvironmentFault, match="the store refuses this .*the credentials are there, have not expired"
    ) as caught:
        open_there(elsewhere)
    no_secrets(str(caught.value))
    there.faults.clear()
    there.fault("expired", "", method="HEAD", times=1_000)
    there.fault("expired", "", times=1_000)
    with pytest.raises(EnvironmentFault, match="s3://bucket/sets/one.*: the store refuses this") as caught:
        run(replace(options, max_length=50))
    no_secrets(str(caught.value))


def test_wrong_bytes_are_fetched_once_more_and_then_refused(there, options, tmp_path):
    run(options)
    elsewhere = replace(options, cache=str(tmp_path / "elsewhere"))
    there.fault("other", "data-00001.arrow")
    assert len(open_there(elsewhere)) == 12
    for path in (tmp_path / "elsewhere").rglob("*.arrow"):
        path.unlink()
    key = next(name for name in there.files() if name.endswith("data-00001.arrow"))
    content = there.files()[key]
    there.put(key, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match="data-00001.arrow is damaged: its content is not what the manifest says"):
        open_there(elsewhere)
    assert not list((tmp_path / "elsewhere").rglob("data-00001*"))


def test_a_missing_object_is_named(there, options, tmp_path):
    run(options)
    there.delete(next(name for name in there.files() if name.endswith("data-00001.arrow")))
    with pytest.raises(DataError, match=r"s3://bucket/sets/one/\w+/data-00001.arrow: no such file"):
        open_there(replace(options, cache=str(tmp_path / "elsewhere")))
    with pytest.raises(DataError, match="s3://nowhere/set holds no prepared|s3://nowhere/set.*no such file"):
        open_there(replace(options, prepared="s3://nowhere/set"))


def test_a_torn_download_is_continued(there, options, tmp_path, monkeypatch):
    run(options)
    elsewhere = replace(options, cache=str(tmp_path / "elsewhere"))
    monkeypatch.setattr(remote, "CHUNK", 200)
    monkeypatch.setattr(module, "AT_ONCE", 1)
    real, count = remote.Remote.read, []

    def stop(self, start, end, file=""):
        count.append(file)
        if file.endswith("data-00001.arrow") and start >= 400:
            raise KeyboardInterrupt
        return real(self, start, end, file)

    monkeypatch.setattr(remote.Remote, "read", stop)
    with pytest.raises(KeyboardInterrupt):
        open_there(elsewhere)
    (part,) = (tmp_path / "elsewhere").rglob("*.part")
    assert part.stat().st_size == 400
    asked = []
    monkeypatch.setattr(
        remote.Remote, "read", lambda self, a, b, file="": (asked.append((file[17:], a)), real(self, a, b, file))[1]
    )
    assert len(open_there(elsewhere)) == 12
    assert ("data-00001.arrow", 400) in asked and ("data-00001.arrow", 0) not in asked
    assert not any(name == "data-00000.arrow" for name, _ in asked)


def _open_in_process(options, barrier, queue):
    barrier.wait()
    lines = []
    dataset = open_there(options, lines)
    barrier.wait()  # both hold it, as the ranks of a run do
    queue.put((dataset.ids, len(lines)))


@pytest.mark.timeout(60)
def test_a_set_in_use_can_be_opened_and_uploaded_again(there, options, tmp_path):
    manifest, _ = run(options)
    first, second = open_there(options), open_there(options)
    assert first.ids == second.ids and first.folder == second.folder
    there.delete(f"sets/one/{manifest['at']}/data-00001.arrow")
    run(options)
    assert open_there(options).ids == first.ids == open_there(replace(options, cache=str(tmp_path / "other"))).ids


@pytest.mark.timeout(240)
def test_two_processes_at_once(there, options, tmp_path):
    run(options)
    elsewhere = replace(options, cache=str(tmp_path / "elsewhere"))
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    children = [context.Process(target=_open_in_process, args=(elsewhere, barrier, queue)) for _ in range(2)]
    for child in children:
        child.start()
    found = [queue.get(timeout=200) for _ in children]
    for child in children:
        child.join()
    assert [ids for ids, _ in found] == [open_there(options).ids] * 2
    assert sorted(fetched for _, fetched in found) == [0, 1]  # one of them fetched, and the other waited for it


def test_the_cache_stays_below_its_limit(there, options, tmp_path):
    run(options)
    run(replace(options, prepared="s3://bucket/two", max_length=100))
    run(replace(options, prepared="s3://bucket/three", max_length=101))
    size = sum(known["size"] for known in run(options)[0]["files"].values())
    small = replace(options, cache=str(tmp_path / "small"), cache_gb=2.5 * size / 1e9)  # two sets fit, three do not
    first = open_there(small)
    open_there(replace(small, prepared="s3://bucket/two"))  # not held: nobody has it
    third = open_there(replace(small, prepared="s3://bucket/three"))
    kept = {path.name for path in (tmp_path / "small").iterdir() if path.is_dir()}
    assert kept == {first.folder.name, third.folder.name}  # the one in use stays, though it is older
    with pytest.raises(UserError, match="sets in use fill .*raise --data.cache_gb"):
        open_there(replace(small, prepared="s3://bucket/two"))
    with pytest.raises(UserError, match=r"s3://bucket/two has 0.0 MB, more than data.cache may hold \(0.0 MB\)"):
        open_there(replace(small, prepared="s3://bucket/two", cache_gb=1e-6))
    with pytest.raises(UserError, match="data.cache_gb 0"):
        open_there(replace(small, cache_gb=0.0))


def test_a_full_disk_is_said_before_the_first_byte(there, options, tmp_path, monkeypatch):
    run(options)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("U", (), {"free": 10})())
    with pytest.raises(EnvironmentFault, match="needs 0.0 MB more, and 0.0 MB are free"):
        open_there(replace(options, cache=str(tmp_path / "elsewhere")))
    assert not list((tmp_path / "elsewhere").rglob("*.arrow*"))


@pytest.mark.parametrize("name", ["../../evil", "/evil", ".hidden", "a/b"])
def test_a_manifest_may_not_name_other_places(there, options, tmp_path, name):
    run(options)
    manifest = json.loads(there.files()["sets/one/manifest.json"])
    manifest["files"][name] = next(iter(manifest["files"].values()))
    there.put("sets/one/manifest.json", json.dumps(manifest).encode())
    with pytest.raises(DataError, match="names files that no set has"):
        open_there(replace(options, cache=str(tmp_path / "elsewhere")))
    there.put("sets/one/manifest.json", json.dumps({"format": store.FORMAT, "schema": 2}).encode())
    with pytest.raises(DataError, match="format is version 2, this program reads 3; run `draftsmith prepare` again"):
        open_there(options)


@pytest.mark.parametrize("times", [1, 2, 4])
def test_a_killed_upload_shows_nothing_and_goes_on(there, options, monkeypatch, times):
    real, calls = remote.Remote.upload, iter(range(times))
    monkeypatch.setattr(module, "AT_ONCE", 1)

    def stop(self, local, file):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        real(self, local, file)

    monkeypatch.setattr(remote.Remote, "upload", stop)
    with pytest.raises(KeyboardInterrupt):
        run(options)
    assert "sets/one/manifest.json" not in there.files() and len(there.files()) == times
    with pytest.raises(DataError, match="holds no prepared conversations"):
        open_there(options)
    monkeypatch.setattr(remote.Remote, "upload", real)
    before = len(there.requests)
    manifest, lines = run(options)
    assert lines[0].startswith("reusing ")  # what was made here before
    puts = [path for method, path in there.requests[before:] if method == "PUT"]
    assert len(puts) == len(manifest["files"]) - times + 1
    assert len(open_there(options)) == 12


def test_upload_faults(there, options):
    there.fault("slow", "data-00000", method="PUT", times=2)
    there.fault("reset", "manifest.json", method="PUT", times=1)
    run(options)
    assert len(open_there(options)) == 12


def test_rows_are_read_from_a_store(there, tmp_path, options):
    for kind in ("slow", "reset", "short"):
        there.put(f"rows/{kind}.jsonl", JSONL)
    there.put("rows/all.json", json.dumps(ROWS).encode())
    fault = (
        there.fault("short", "short.jsonl", times=2),
        there.fault("slow", "slow.jsonl"),
        there.fault("reset", "reset"),
    )
    for name in ("rows/*.jsonl", "rows"):
        rows = list(open_source(f"s3://bucket/{name}").rows(print))
        assert len(rows) == (36 if "*" in name else 48)
        assert rows[0].place == "s3://bucket/rows/reset.jsonl, line 1" or rows[0].file.endswith("all.json")
    assert [one.met for one in fault] == [2, 1, 1]
    local = open_source(options.conversations)
    there_file = open_source("s3://bucket/rows/slow.jsonl")
    assert [row.value for row in there_file.rows(print)] == [row.value for row in local.rows(print)]
    print_before = there_file.fingerprint()
    there.put("rows/slow.jsonl", JSONL[:-1] + b" ")
    fsspec_cache_cleared = open_source("s3://bucket/rows/slow.jsonl")
    assert fsspec_cache_cleared.fingerprint() != print_before


def test_rows_that_cannot_be_read(there):
    there.put("rows/c.jsonl", JSONL * 50)
    with pytest.raises(DataError, match="s3://bucket/rows/d.jsonl: no such file"):
        open_source("s3://bucket/rows/d.jsonl")
    source = open_source("s3://bucket/rows/c.jsonl")
    there.fault("slow", "c.jsonl", times=1_000)
    with pytest.raises(EnvironmentFault, match="s3://bucket/rows/c.jsonl could not be reached .*6 tries") as caught:
        list(source.rows(print))
    no_secrets(str(caught.value))
    there.faults.clear()
    there.fault("expired", "c.jsonl", method="HEAD", times=1_000)
    there.fault("expired", "c.jsonl", times=1_000)
    with pytest.raises(EnvironmentFault, match="the store refuses this") as caught:
        list(open_source("s3://bucket/rows/c.jsonl").rows(print))
    no_secrets(str(caught.value))


def test_no_credentials_at_all(there, monkeypatch, tmp_path):
    for name in KEYS:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(EnvironmentFault, match="the store refuses this .*the credentials are there"):
        open_source("s3://bucket/rows/d.jsonl")
