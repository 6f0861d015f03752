"""A killed `prepare` goes on where it was, and ends with the bytes of one that was never interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest

from draftsmith.config import DataOptions
from draftsmith.data import build, shards
from draftsmith.data.dataset import open_prepared
from draftsmith.data.prepare import prepare, tokenizer_fingerprint
from draftsmith.data.seen import Seen
from draftsmith.errors import DataError, EnvironmentFault
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def row(question, answer, **more):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


ROWS: list = [row(f"question {i}", f"answer {i}", tags=["odd"] * (i % 2)) for i in range(30)]
ROWS[4], ROWS[17], ROWS[28] = ROWS[3], {"what": 1}, ROWS[2]  # two duplicates, the second of them far away
ROWS[11] |= {"source": "web"}


@pytest.fixture
def options(tmp_path, monkeypatch):
    """A set of four files."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 1_600)
    monkeypatch.setattr(shards, "BATCH", 2)
    monkeypatch.setattr(build, "ROWS", 2)
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(one) + "\n" for one in ROWS))
    return DataOptions(conversations=str(tmp_path / "c.jsonl"), prepared=str(tmp_path / "out"), max_bad_rows=1)


def run(options):
    lines = []
    tokenizer = tiny_tokenizer()
    return prepare(tokenizer, tokenizer_fingerprint(tokenizer), options, lines.append), lines


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def count_calls(options, name):
    """How often an uninterrupted run calls something."""
    calls = []
    owner = {"render": build, "rename": os, "fsync": os}[name]
    with pytest.MonkeyPatch.context() as patch:
        real = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **more: (calls.append(1), real(*args, **more))[1])
        run(options)
    return len(calls)


def killed(options, name, nth):
    """A forked process that is killed at the `nth` call of something."""
    child = os.fork()
    if child == 0:
        try:
            owner = {"render": build, "rename": os, "fsync": os}[name]
            real, calls = getattr(owner, name), iter(range(1, nth))

            def counted(*args, **more):
                if next(calls, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **more)

            setattr(owner, name, counted)
            run(options)
        finally:
            os._exit(0)  # not killed: the assertion below says so
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("name", ["fsync", "rename", "render"])
def test_killed_at_every_place_it_ends_with_the_same_bytes(options, tmp_path, monkeypatch, name):
    whole = replace(options, prepared=str(tmp_path / "whole"))
    manifest, _ = run(whole)
    assert manifest["counts"] | {"dropped": {"exact duplicate": 2}, "bad": 1, "kept": 27} == manifest["counts"]
    assert sum(name.endswith(".arrow") for name in manifest["files"]) == 4
    num = count_calls(replace(options, prepared=str(tmp_path / "counted")), name)
    kept_rows = set()
    for nth in range(1, num + 1, 1 if name != "render" else 5):
        killed(options, name, nth)
        rendered = []
        real = build._render_row
        monkeypatch.setattr(
            build,
            "_render_row",
            lambda job, row, real=real, seen=rendered: (seen.append(row.number), real(job, row))[1],
        )
        before = os.path.exists(options.prepared)  # the last rename or a later call: it was complete
        again, lines = run(options)
        monkeypatch.setattr(build, "_render_row", real)
        assert before == lines[0].startswith("reusing")
        if not before:
            assert rendered == list(range(31 - len(rendered), 31))
            kept_rows.add(30 - len(rendered))
            assert any(line.startswith(f"going on after {30 - len(rendered)} rows") for line in lines) == (
                len(rendered) < 30
            )
        assert files(options.prepared) == files(whole.prepared) and again == manifest
        assert sorted(os.listdir(tmp_path)) == ["c.jsonl", "counted", "out", "whole"]
        for path in Path(options.prepared).iterdir():
            path.unlink()
        os.rmdir(options.prepared)
    assert len(kept_rows) >= 4  # nothing, and after each file but the last, or all


def test_killed_twice_and_continued_by_more_processes(options, tmp_path):
    whole = replace(options, prepared=str(tmp_path / "whole"))
    run(whole)
    killed(options, "render", 14)
    killed(options, "render", 14)
    _, lines = run(replace(options, processes=2))
    assert any("(2 finished files)" in line for line in lines)
    assert files(options.prepared) == files(whole.prepared)


def test_a_killed_run_forgets_no_held_out_row(options, tmp_path):
    options = replace(options, held_out=0.4)
    whole = replace(options, prepared=str(tmp_path / "whole"))
    manifest, _ = run(whole)
    assert manifest["counts"]["held_out"] > 5
    killed(options, "render", 27)
    _, lines = run(options)
    assert any("of an interrupted run" in line for line in lines)
    assert files(options.prepared) == files(whole.prepared)


def partial(options):
    return Path(options.prepared).parent / ".out.partial"


def rewrite(path, change):
    path.write_bytes(change(path.read_bytes()))


def flip(content):
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("damaged", ["set/data-00001.arrow", "journal/00001.seen"])
@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_what_is_not_as_it_was_written_is_done_again(options, tmp_path, damaged, how):
    whole = replace(options, prepared=str(tmp_path / "whole"))
    run(whole)
    killed(options, "render", 25)
    first = json.loads((partial(options) / "journal" / "00000.json").read_text())["tally"]["rows_in"]
    path = partial(options) / damaged
    assert path.exists()
    {"flip": lambda: rewrite(path, flip), "cut": lambda: rewrite(path, lambda c: c[:-8]), "gone": path.unlink}[how]()
    _, lines = run(options)
    assert any(line.startswith(f"going on after {first} rows (1 finished files)") for line in lines)
    assert files(options.prepared) == files(whole.prepared)


def change_rows(options):
    rewrite(Path(options.conversations), lambda content: content.replace(b"answer 1", b"answer!1"))
    return options


@pytest.mark.parametrize(
    "change",
    [lambda o: replace(o, max_length=100), lambda o: replace(o, train_on="last"), change_rows],
)
def test_other_inputs_begin_afresh(options, tmp_path, change):
    killed(options, "render", 27)
    assert partial(options).exists()
    options = change(options)
    _, lines = run(options)
    assert not any(line.startswith("going on") for line in lines)
    whole = replace(options, prepared=str(tmp_path / "whole"))
    run(whole)
    assert files(options.prepared) == files(whole.prepared)


def test_a_lower_limit_of_bad_rows_is_not_got_round(options):
    killed(options, "render", 25)
    with pytest.raises(DataError, match="line 18"):
        run(replace(options, max_bad_rows=0))
    assert not partial(options).exists()


def test_an_interrupt_keeps_finished_files_and_nothing_else(options, monkeypatch):
    real = build._render_row
    for number, kept in ((3, False), (20, True)):

        def interrupt(job, row, number=number):
            if row.number == number:
                raise KeyboardInterrupt
            return real(job, row)

        monkeypatch.setattr(build, "_render_row", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(options)
        assert partial(options).exists() == kept
    monkeypatch.setattr(build, "_render_row", real)
    assert any(line.startswith("going on after") for line in run(options)[1])


def test_a_full_disk_keeps_finished_files(options, monkeypatch):
    real = os.fsync
    calls = iter(range(12))

    def full(handle):
        if next(calls, None) is None:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run(options)
    monkeypatch.setattr(os, "fsync", real)
    assert any(line.startswith("going on after") for line in run(options)[1])


def test_a_file_that_grows_meanwhile_stops_the_run(options, monkeypatch):
    real = build._render_row

    def grow(job, row):
        if row.number == 10:
            with open(options.conversations, "ab") as file:
                file.write(b"\n")
        return real(job, row)

    monkeypatch.setattr(build, "_render_row", grow)
    with pytest.raises(DataError, match="c.jsonl changed while it was read"):
        run(options)
    assert os.listdir(Path(options.prepared).parent) == ["c.jsonl"]


def test_datasets_reads_several_files(options):
    run(options)
    loaded = datasets.load_from_disk(options.prepared)
    ours = open_prepared(options.prepared)
    assert loaded["id"][:] == ours.ids and loaded[20]["tokens"] == ours[20].tokens.tolist()
    features = datasets.Features.from_arrow_schema(shards.COLUMNS)
    assert loaded.features == features


def test_seen_equals_a_dict():
    seen, known = Seen(), {}
    generator = np.random.default_rng(0)
    names = [f"id {n}" for n in generator.integers(0, 9_000, 20_000)]
    for number, name in enumerate(names, 1):
        digest = bytes([number % 3]) * 8
        assert seen.add(name, digest, number) == known.get(name)
        known.setdefault(name, (digest, number))
    assert 3 * len(seen) == 3 * len(known) == len(seen.new)
    again = Seen()
    again.load(np.frombuffer(seen.new, shards.ENTRY))
    assert all(again.add(name, b"", 1) == known[name] for name in known)


SCRIPT = """
    import json, sys
    from draftsmith.config import DataOptions
    from draftsmith.data.prepare import prepare, tokenizer_fingerprint
    from tests.tiny import tiny_tokenizer
    options = DataOptions(conversations=sys.argv[1], prepared=sys.argv[2], max_bad_rows=1, processes=2)
    tokenizer = tiny_tokenizer()
    prepare(tokenizer, tokenizer_fingerprint(tokenizer), options, print)
"""


@pytest.mark.timeout(120)
def test_a_script_without_a_guard_gets_one_clear_error(options, tmp_path):
    """Each new process runs the script again; it must neither hang nor do the work over and over."""
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "script.py"), options.conversations, options.prepared]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and EnvironmentFault.__name__ in last and "under `if __name__ == '__main__':`" in last
    assert done.stderr.count("Traceback") == 2  # the cause and the error, of the script itself alone
    assert not Path(options.prepared).exists()
