"""A prepared folder as a whole: foreign ones are left alone, and a kill at any point never leaves half of one."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith.config import DataOptions
from draftsmith.data import build, store
from draftsmith.data.dataset import open_prepared
from draftsmith.data.prepare import prepare, tokenizer_fingerprint
from draftsmith.errors import DataError, UserError
from tests.tiny import tiny_tokenizer


def row(question="Hi", answer="Yo!", **more):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


ROWS = [row(f"question {i}", f"answer {i}", tags=["even" if i % 2 == 0 else "odd"]) for i in range(5)]


def write(options, rows):
    with open(options.conversations, "wb") as file:
        file.writelines(one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in rows)


@pytest.fixture
def options(tmp_path):
    options = DataOptions(conversations=str(tmp_path / "c.jsonl"), prepared=str(tmp_path / "out"))
    write(options, ROWS)
    return options


def run(options, tokenizer=None, **more):
    """The manifest and the reported lines."""
    lines = []
    tokenizer = tokenizer or tiny_tokenizer()
    return prepare(tokenizer, tokenizer_fingerprint(tokenizer), options, lines.append, **more), lines


def test_foreign_folders_are_left_alone(options):
    os.mkdir(options.prepared)
    run(options)  # an empty folder is nobody's
    shutil.rmtree(options.prepared)
    for name, content in (("thesis.txt", "years"), (store.MANIFEST, "{}"), (store.MANIFEST, "years")):
        os.mkdir(options.prepared)
        path = os.path.join(options.prepared, name)
        with open(path, "w") as file:
            file.write(content)
        with pytest.raises(DataError, match="was not made by `draftsmith prepare`"):
            run(options)
        with pytest.raises(DataError, match="was not made by `draftsmith prepare`"):
            open_prepared(options.prepared)
        with open(path) as file:
            assert file.read() == content
        shutil.rmtree(options.prepared)
    with open(options.prepared, "w") as file:
        file.write("a file")
    with pytest.raises(DataError, match="was not made by"):
        run(options)


def test_a_link_to_another_disk_stays_a_link(options, tmp_path):
    (tmp_path / "disk" / "real").mkdir(parents=True)
    os.symlink(tmp_path / "disk" / "real", options.prepared)
    run(options)
    with store.claim(Path(options.prepared)) as partial:
        assert partial.parent == tmp_path / "disk"  # a rename does not leave its disk
    run(replace(options, max_length=100))
    assert os.path.islink(options.prepared) and len(open_prepared(options.prepared)) == 5
    assert os.listdir(tmp_path / "disk") == ["real"]


FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def killed(options, name, count):
    """Runs `prepare` in a forked process that is killed (no cleaning up) at the `count`th call of something."""

    def kill_at(function):
        calls = iter(range(1, count))

        def counted(*arguments, **more):
            if next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **more)

        return counted

    child = os.fork()
    if child == 0:
        try:
            owner = {"render": build, "rename": os, "fsync": os}[name]
            setattr(owner, name, kill_at(getattr(owner, name)))
            run(options)
        finally:
            os._exit(0)  # not killed: the assertion below says so
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@FORKS
def test_a_kill_between_the_renames_is_mended(options):
    """Between the two renames of a replacement nothing stands there; the old folder waits beside it."""
    old, _ = run(options)
    write(options, ROWS[::-1])
    killed(options, "rename", renames(options))
    assert not os.path.exists(options.prepared)
    write(options, ROWS)
    back, lines = run(options)
    assert back == old and "put back" in lines[0] and lines[1].startswith("reusing")
    dataset = open_prepared(options.prepared)
    assert dataset.manifest == old and [dataset[i].id for i in range(5)] == dataset.ids
    write(options, ROWS[::-1])
    new, lines = run(options)
    assert any(line.startswith("going on after 5 rows") for line in lines)
    assert open_prepared(options.prepared).fingerprint == new["content_hash"] != old["content_hash"]
    assert sorted(os.listdir(os.path.dirname(options.prepared))) == ["c.jsonl", "out"]


def renames(options):
    """How many renames replacing a folder takes; the last one puts the new folder into its place."""
    count = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", lambda *names, real=os.rename: (count.append(names), real(*names)))
        other = replace(options, prepared=options.prepared + "-counted")
        run(replace(other, max_length=100))
        count.clear()
        run(other)
    shutil.rmtree(other.prepared)
    return len(count)


@FORKS
def test_a_kill_of_the_first_build_leaves_no_folder(options):
    killed(options, "render", 5)
    assert not os.path.exists(options.prepared)
    run(options)
    assert sorted(os.listdir(os.path.dirname(options.prepared))) == ["c.jsonl", "out"]


def test_a_failure_leaves_the_old_folder(options):
    old, _ = run(options)
    write(options, [*ROWS, b"oh no\n"])
    with pytest.raises(DataError, match="line 6"):
        run(options)
    assert open_prepared(options.prepared).manifest == old
    assert sorted(os.listdir(os.path.dirname(options.prepared))) == ["c.jsonl", "out"]


def test_two_at_a_time_are_refused(options):
    with store.claim(Path(options.prepared)) as partial:
        (partial / "mine").touch()
        with pytest.raises(UserError, match="being prepared by another process"):
            run(options)
        assert (partial / "mine").exists()
    run(options)
