"""The watchdog names a process that does not get on, and leaves the others alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from draftsmith.pulse import Pulse
from draftsmith.ranks import alone
from draftsmith.watchdog import Beat

RANK = """
import ctypes, faulthandler, signal, sys, time
from pathlib import Path
from draftsmith.pulse import Pulse
faulthandler.register(signal.SIGUSR1)
pulse = Pulse(hang_seconds=1.0)
pulse.beat_into(Path(sys.argv[1]) / f"{sys.argv[2]}.beat", sys.argv[2])
for step in range(10_000):
    pulse.step = step
    with pulse("forward"):
        time.sleep(0.01)
        if step == 20 and sys.argv[3] == "lock":
            ctypes.PyDLL(None).sleep(60)  # holds the interpreter lock
    with pulse("receive"):
        time.sleep(4.0 if step == 20 and sys.argv[3] == "wait" else 0.01)
"""


def start(folder: Path, name: str, fault: str) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", RANK, str(folder), name, fault], stderr=subprocess.PIPE)
    while not (folder / f"{name}.beat").exists():
        time.sleep(0.02)
    return process


def watch(folder: Path, launcher: int) -> subprocess.Popen:
    words = [sys.executable, "-m", "draftsmith.watchdog", str(folder), str(launcher)]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("fault", ["lock", "stop"])
def test_a_hung_rank_is_named_and_killed(tmp_path, fault):
    hung, sound = start(tmp_path, "rank-1", fault), start(tmp_path, "rank-0", "wait")
    watchdog = watch(tmp_path, os.getpid())
    if fault == "stop":
        os.kill(hung.pid, signal.SIGSTOP)
    assert hung.wait(40) == -signal.SIGKILL
    assert sound.poll() is None  # it waited for four seconds, which is no fault
    sound.kill()
    said = watchdog.communicate(timeout=20)[1]
    assert said.count("hangs") == 1 and "rank-1 hangs in section" in said
    assert ("'forward' of step 20" if fault == "lock" else "it has been stopped (SIGSTOP)") in said
    if fault == "lock":
        assert b"most recent call first" in hung.communicate()[1]  # its stacks
    else:
        hung.communicate()
    sound.communicate()


def test_ranks_without_their_launcher_are_ended(tmp_path):
    rank = start(tmp_path, "rank-0", "none")
    launcher = subprocess.Popen([sys.executable, "-c", "pass"])
    launcher.wait()
    watchdog = watch(tmp_path, launcher.pid)
    assert rank.wait(15) == -signal.SIGKILL
    assert "its launcher is gone" in watchdog.communicate(timeout=20)[1]
    rank.communicate()


def test_a_section_may_take_ten_times_what_it_took(tmp_path):
    pulse = Pulse(hang_seconds=1.0)
    pulse.beat_into(tmp_path / "a.beat", "a")

    def allowed(section: str) -> float:
        with pulse(section):
            return Beat.read(tmp_path / "a.beat").deadline - time.monotonic()

    assert allowed("forward") > 1000  # the first times may compile
    for _ in range(3):
        with pulse("forward"):
            time.sleep(0.3)
    assert 2.5 < allowed("forward") < 5.0
    assert allowed("receive") < 0  # no deadline
    assert 0.5 < Beat.read(tmp_path / "a.beat").deadline - time.monotonic() <= 1.0


def test_sections_nest_and_are_added_up(tmp_path):
    pulse = Pulse()
    pulse.beat_into(tmp_path / "a.beat", "a")
    with pulse("evaluate"):
        with pulse("capture"):
            pass
        assert Beat.read(tmp_path / "a.beat").section == "evaluate"
    taken = pulse.take()
    assert set(taken) == {"evaluate", "capture"} and taken["evaluate"] >= taken["capture"] > 0
    assert pulse.take() == {}


def test_a_rank_that_waits_for_another_has_no_deadline(tmp_path, monkeypatch):
    """Rank 0 may save or evaluate for minutes; the others wait for its word, and for its part of the sums."""
    ranks = alone(torch.device("cpu"), hang_seconds=0.5)
    ranks.pulse.beat_into(tmp_path / "a.beat", "a")
    for _ in range(5):  # past the first times, which may compile
        with ranks.pulse("exchange"):
            pass
    seen: list[Beat] = []

    class Pending:
        def wait(self) -> None:
            seen.append(Beat.read(tmp_path / "a.beat"))

    ranks._pending, ranks._drafters = Pending(), "a group"
    ranks._finish_agreeing()
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: Pending().wait())
    ranks.sum_(torch.zeros(1))
    assert [(beat.section, beat.deadline) for beat in seen] == [("exchange", 0.0)] * 2
