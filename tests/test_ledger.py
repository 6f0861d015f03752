"""The ledger: what was trained on, and that nobody changed it."""

from __future__ import annotations

import hashlib
import resource
from pathlib import Path

import pytest

from draftsmith.errors import EnvironmentFault
from draftsmith.ledger import CorruptLedger, Ledger


def record(ledger: Ledger, step: int) -> str:
    return ledger.append(step, step // 3, [2 * step, 2 * step + 1], [f"sample-{step}", "ü"])


def filled(path: Path, steps: int) -> list[str]:
    ledger = Ledger(path)
    hashes = [ledger.hash]
    for step in range(1, steps + 1):
        hashes.append(record(ledger, step))
    ledger.sync()
    ledger.close()
    return hashes


def test_ledger_resumed_equals_never_stopped(tmp_path):
    straight = filled(tmp_path / "straight.jsonl", 6)
    assert len(set(straight)) == 7
    path = tmp_path / "resumed.jsonl"
    filled(path, 5)
    with open(path, "ab") as file:
        file.write(b'{"epoch":2,"packs":[12,')  # torn by a kill
    for cut in (3, 2):  # twice: the second resume is a bug class of its own
        ledger = Ledger.resume(path, cut, straight[cut])
        assert ledger.hash == straight[cut]
        assert len(path.read_bytes().splitlines()) == cut
        for step in range(cut + 1, 7):
            assert record(ledger, step) == straight[step]
        ledger.close()
    assert path.read_bytes() == (tmp_path / "straight.jsonl").read_bytes()
    Ledger.resume(path, 0, straight[0]).close()
    assert path.read_bytes() == b""


def test_ledger_hash_is_that_of_the_file(tmp_path):
    hashes = filled(tmp_path / "ledger.jsonl", 4)
    assert hashlib.sha256((tmp_path / "ledger.jsonl").read_bytes()).hexdigest() == hashes[-1]


@pytest.mark.parametrize(
    "tamper",
    [
        lambda lines: lines[1:],
        lambda lines: [lines[1], lines[0], *lines[2:]],
        lambda lines: [lines[0], lines[1].replace(b"sample-2", b"sample-9"), *lines[2:]],
        lambda lines: [lines[0], lines[0], *lines[1:]],
        lambda lines: lines[:2],
        lambda lines: [],
        lambda lines: [b"null\n", *lines],
        lambda lines: [lines[0].replace(b'"step":1', b'"step":"1"'), *lines[1:]],
    ],
)
def test_tampered_ledger_is_refused_and_left_alone(tmp_path, tamper):
    path = tmp_path / "ledger.jsonl"
    hashes = filled(path, 4)
    data = b"".join(tamper(path.read_bytes().splitlines(keepends=True)))
    path.write_bytes(data)
    with pytest.raises(CorruptLedger, match="ledger.jsonl"):
        Ledger.resume(path, 3, hashes[3])
    assert path.read_bytes() == data


def test_missing_ledger_and_unrecorded_lines(tmp_path):
    hashes = filled(tmp_path / "ledger.jsonl", 2)
    with pytest.raises(CorruptLedger):
        Ledger.resume(tmp_path / "other.jsonl", 2, hashes[2])
    assert not (tmp_path / "other.jsonl").exists()
    Ledger(tmp_path / "ledger.jsonl").close()
    assert (tmp_path / "ledger.jsonl").read_bytes() == b""


def test_ledger_on_a_full_disk(tmp_path):
    straight, said = filled(tmp_path / "straight.jsonl", 5), []
    path = tmp_path / "full.jsonl"
    ledger = Ledger(path, warn=said.append)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))  # the second line is cut
    try:
        for step in (1, 2, 3):
            assert record(ledger, step) == straight[step]
        with pytest.raises(EnvironmentFault, match="full.jsonl"):
            ledger.sync()
        assert len(said) == 1 and "full.jsonl" in said[0] and "training goes on" in said[0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    ledger.sync()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == straight[3]
    record(ledger, 4)
    assert record(ledger, 5) == straight[5] and len(said) == 1
    ledger.close()
    assert path.read_bytes() == (tmp_path / "straight.jsonl").read_bytes()


def test_killed_on_a_full_disk_the_ledger_resumes(tmp_path):
    path, said = tmp_path / "ledger.jsonl", []
    ledger = Ledger(path, warn=said.append)
    before = record(ledger, 1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (70, limit[1]))
    try:
        record(ledger, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    ledger.close()
    assert not path.read_bytes().endswith(b"\n")
    Ledger.resume(path, 1, before).close()
    assert path.read_bytes().endswith(b"\n")
