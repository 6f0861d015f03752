"""`draftsmith train` that starts its own processes: to the end, after deaths, and when somebody wants it to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.config import Recipe, to_toml
from draftsmith.errors import UserError
from draftsmith.launch import number_of_processes
from tests.conftest import with_options
from tests.test_pipeline import assert_equal, outcome, short

LONG = 4_000  # steps that no test waits for


def start(recipe: Recipe, *flags: str, launcher: tuple[str, ...] = ()) -> tuple[subprocess.Popen, Path]:
    file = Path(recipe.run).with_suffix(".toml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(to_toml(recipe))
    log = file.with_suffix(".log")
    words = [sys.executable, "-m", *launcher, "draftsmith", "train", str(file), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(log, "w") as output:
        # A group of its own, as a terminal's or a scheduler's job has.
        return subprocess.Popen(words, stdout=output, stderr=output, env=environment, start_new_session=True), log


def long(world: Path, folder: Path, **pipeline) -> Recipe:
    recipe = short(world, folder, "split", processes=2, targets=1, drafters=1, **pipeline)
    recipe = with_options(recipe, "optim", steps=LONG)
    recipe = with_options(recipe, "evaluation", prompts="", at_start=False)
    return with_options(recipe, "checkpoint", every=50)


def until(condition, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def steps_of(recipe: Recipe) -> int:
    file = Path(recipe.run) / "ledger.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def ranks_of(launcher: int) -> list[int]:
    """Process ids of a launcher's ranks, in order."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            values = dict(part.split(b"=", 1) for part in path.read_bytes().split(b"\0") if b"=" in part)
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == launcher and b"RANK" in values:
            found[int(values[b"RANK"])] = int(path.parent.name)
    return [found[rank] for rank in sorted(found)]


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text() for pid in pids)


@pytest.fixture(scope="module")
def alone(world, tmp_path_factory) -> dict:
    recipe = short(world, tmp_path_factory.mktemp("alone"))
    process, log = start(recipe)
    assert process.wait(120) == 0, log.read_text()
    return outcome(recipe)


def test_to_the_end(world, tmp_path, alone):
    recipe = short(world, tmp_path, processes=2)
    process, log = start(recipe)
    assert process.wait(120) == 0, log.read_text()
    assert_equal(outcome(recipe), alone)
    assert log.read_text().count("run folder:") == 1


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_run_continues(world, tmp_path):
    recipe = long(world, tmp_path, max_restarts=1)
    process, log = start(recipe)
    until(lambda: steps_of(recipe) > 60)
    first = ranks_of(process.pid)
    os.kill(first[1], signal.SIGKILL)
    until(lambda: "continuing" in log.read_text())
    until(lambda: steps_of(recipe) > 120)
    assert "rank 1 was killed by SIGKILL; starting again from the last checkpoint (1 of 1)" in log.read_text()
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    assert process.wait(60) == 3
    assert (
        "rank 1 was killed by SIGKILL; the last checkpoint is intact, continue with" in log.read_text().splitlines()[-1]
    )
    lines = (Path(recipe.run) / "ledger.jsonl").read_text().splitlines()
    assert [f'"step":{number}' + "}" in line for number, line in enumerate(lines, 1)] == [True] * len(lines)


def test_a_run_of_one_process_is_started_again_too(world, tmp_path):
    recipe = short(world, tmp_path, max_restarts=1)
    recipe = with_options(recipe, "optim", steps=LONG)
    process, log = start(recipe)
    until(lambda: steps_of(recipe) > 3)
    os.kill(ranks_of(process.pid)[0], signal.SIGKILL)
    until(lambda: "continuing" in log.read_text() and steps_of(recipe) > 5)
    assert "rank 0 was killed by SIGKILL; starting again from the last checkpoint (1 of 1)" in log.read_text()
    process.terminate()
    assert process.wait(60) == 75, log.read_text()


@pytest.mark.slow
def test_a_signal_to_the_launcher_saves(world, tmp_path):
    recipe = long(world, tmp_path)
    process, log = start(recipe)
    until(lambda: steps_of(recipe) > 5)
    process.terminate()
    assert process.wait(60) == 75, log.read_text()
    assert "saved; continue with: draftsmith train" in log.read_text()
    assert outcome_step(recipe) == steps_of(recipe)


TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--local-addr", "127.0.0.1", "-m")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "number", "code"),
    [((), signal.SIGINT, 75), ((), signal.SIGTERM, 75), (TORCHRUN, signal.SIGTERM, 1), (TORCHRUN, signal.SIGINT, 1)],
    ids=["Ctrl-C", "SIGTERM to all", "torchrun, SIGTERM to all", "torchrun, Ctrl-C"],
)
def test_a_signal_to_every_process_saves(world, tmp_path, launcher, number, code):
    """A terminal's Ctrl-C and a scheduler's SIGTERM reach the ranks twice: from it, and passed on by the launcher."""
    recipe = long(world, tmp_path)
    if launcher:
        recipe = with_options(recipe, "pipeline", processes=None)
    process, log = start(recipe, launcher=launcher)
    try:
        until(lambda: steps_of(recipe) > 5)
        os.killpg(process.pid, number)
        assert process.wait(60) == code, log.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert "saved; continue with: draftsmith train" in log.read_text()
    assert outcome_step(recipe) == steps_of(recipe)


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_orphans(world, tmp_path):
    recipe = long(world, tmp_path)
    process, _ = start(recipe)
    until(lambda: steps_of(recipe) > 5)
    pids = ranks_of(process.pid)
    assert len(pids) == 2
    process.kill()
    process.wait()
    until(lambda: gone(pids), 12.0)


@pytest.mark.slow
def test_a_stopped_rank_is_named(world, tmp_path):
    recipe = long(world, tmp_path)
    process, log = start(recipe)
    until(lambda: steps_of(recipe) > 5)
    os.kill(ranks_of(process.pid)[1], signal.SIGSTOP)
    begun = time.monotonic()
    assert process.wait(60) == 3
    assert time.monotonic() - begun < 60
    text = log.read_text()
    assert "rank 1 (target 0) hangs in section" in text and "it has been stopped (SIGSTOP)" in text


@pytest.mark.parametrize(
    ("layout", "packs", "pipeline", "expected"),
    [
        ("colocated", 4, {}, 4),
        ("colocated", 8, {}, 4),
        ("colocated", 3, {}, 3),
        ("colocated", 8, {"processes": 2}, 2),
        ("split", 4, {"targets": 2}, 4),
        ("split", 4, {"targets": 1, "drafters": 2}, 3),
        ("split", 4, {"targets": 6, "drafters": 2}, "8 processes are asked for, but this host has 4 GPUs"),
        ("colocated", 8, {"processes": 5}, "5 processes are asked for, but this host has 4 GPUs"),
        ("colocated", 8, {"processes": 0}, "pipeline.processes is 0"),
    ],
)
def test_processes_of_a_host_with_four_gpus(world, tmp_path, monkeypatch, layout, packs, pipeline, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    recipe = replace(
        with_options(short(world, tmp_path, layout, **pipeline), "optim", packs_per_step=packs), device="auto"
    )
    said: list[str] = []
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            number_of_processes(recipe, said.append)
        return
    assert number_of_processes(recipe, said.append) == expected
    assert bool(said) == (packs < 4)
    assert not said or "4 GPUs, but optim.packs_per_step is 3" in said[0]


def test_what_a_rank_refuses_is_said_once(world, tmp_path):
    recipe = short(world, tmp_path, processes=2)
    recipe = replace(recipe, target=replace(recipe.target, layer_ids=(0, 9)))
    process, log = start(recipe)
    assert process.wait(120) == 2
    assert log.read_text().count("draftsmith:") == 1 and "target.layer_ids [0, 9]" in log.read_text()


def outcome_step(recipe: Recipe) -> int:
    return max(int(path.name.removeprefix("step-")) for path in (Path(recipe.run) / "checkpoints").glob("step-*"))
