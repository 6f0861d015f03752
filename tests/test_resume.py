"""Kill it anywhere, start the same command again, get the same drafter: the same rows, losses and bits."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith import checkpoint
from draftsmith.config import Recipe, to_toml
from tests import children
from tests.children import Ended, Fault
from tests.conftest import make_recipe, with_options

STEPS = 10
EVERY = 3  # checkpoints after steps 3, 6, 9 and 10
TIMINGS = ("tokens_per_second", "eta", "load_wait")


def short(world: Path, folder: Path) -> Recipe:
    """Ten steps with metrics at each, and no decoding."""
    recipe = make_recipe(world, folder)
    recipe = with_options(recipe, "optim", steps=STEPS, packs_per_step=2, noise="gaussian", noise_scale=0.1)
    recipe = with_options(recipe, "checkpoint", every=EVERY)
    recipe = with_options(recipe, "evaluation", prompts="")
    return with_options(recipe, "log", every=1)


def start_again(recipe: Recipe, fault: Fault | None = None, *flags: str) -> Ended:
    """`draftsmith train` with the recipe, as a user would type it again."""
    file = Path(recipe.run).with_name("recipe.toml")
    file.write_text(to_toml(recipe))
    return children.run(["train", str(file), *flags], file.with_name("log.txt"), fault=fault)


def outcome(recipe: Recipe) -> dict:
    """All that two runs of one recipe must have in common."""
    run = Path(recipe.run)
    found = checkpoint.newest_valid(run / "checkpoints", report=lambda line: None)
    assert found is not None
    ledger = (run / "ledger.jsonl").read_bytes()
    assert hashlib.sha256(ledger).hexdigest() == found.facts["ledger"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "step": found.step,
        "ledger": ledger.decode(),
        "metrics": [{k: v for k, v in line.items() if k not in TIMINGS} for line in lines],
        "weights": hashlib.sha256((found.path / "model.safetensors").read_bytes()).hexdigest(),
        "optimizer": hashlib.sha256((found.path / "optimizer.safetensors").read_bytes()).hexdigest(),
        "checkpoints": sorted(path.name for path in (run / "checkpoints").iterdir()),
    }


@pytest.fixture(scope="session")
def golden(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The outcome of the run that nothing disturbed."""
    recipe = short(world, tmp_path_factory.mktemp("golden"))
    ended = start_again(recipe)
    assert ended.code == 0, ended.output
    found = outcome(recipe)
    assert found["step"] == STEPS and len(found["metrics"]) == STEPS
    return found


@pytest.fixture
def run(world: Path, tmp_path: Path) -> Recipe:
    return short(world, tmp_path)


def test_killed_in_mid_epoch_twice(run, golden):
    for step in (5, 3):  # the second time: three steps after the resume
        ended = start_again(run, Fault(call="optimizer step", nth=step))
        assert ended.code == -signal.SIGKILL, ended.output
    assert start_again(run).code == 0
    assert outcome(run) == golden


def test_sparse_metrics_are_the_same_lines_after_a_kill(run, tmp_path):
    sparse = with_options(run, "log", every=4)  # out of step with the checkpoints
    undisturbed = replace(sparse, run=str(tmp_path / "undisturbed"))
    assert start_again(undisturbed).code == 0
    start_again(sparse, Fault(call="optimizer step", nth=8))
    assert start_again(sparse).code == 0
    assert outcome(sparse) == outcome(undisturbed)


def test_muon_resumes_to_the_same_bits_after_a_kill(run, tmp_path):
    muon = with_options(run, "optim", kind="muon", momentum=0.9)
    undisturbed = replace(muon, run=str(tmp_path / "undisturbed"))
    assert start_again(undisturbed).code == 0
    assert start_again(muon, Fault(call="optimizer step", nth=5)).code == -signal.SIGKILL
    assert start_again(muon).code == 0
    assert outcome(muon) == outcome(undisturbed)


def test_killed_before_the_first_checkpoint(run, golden):
    start_again(run, Fault(call="optimizer step", nth=2))
    ended = start_again(run)
    assert ended.code == 0 and "continuing" not in ended.output
    assert outcome(run) == golden


@pytest.mark.parametrize("nth", range(1, 9))
def test_killed_in_mid_save(run, golden, nth):
    ended = start_again(run, Fault(call="fsync", nth=nth, save=2))
    assert ended.code == -signal.SIGKILL, ended.output
    ended = start_again(run)
    assert ended.code == 0, ended.output
    assert outcome(run) == golden


@pytest.mark.parametrize("call", ["rename", "prune"])
def test_killed_while_a_checkpoint_appears_or_goes(run, golden, call):
    ended = start_again(run, Fault(call=call, nth=1, save=3))
    assert ended.code == -signal.SIGKILL, ended.output
    assert start_again(run).code == 0
    assert outcome(run) == golden


def test_killed_during_resume(run, golden):
    start_again(run, Fault(call="optimizer step", nth=5))
    for nth in (1, 2, 3):
        assert start_again(run, Fault(call="fsync", nth=nth)).code == -signal.SIGKILL
    assert start_again(run).code == 0
    assert outcome(run) == golden


def test_more_loader_processes_after_a_kill(run, golden):
    start_again(run, Fault(call="optimizer step", nth=5))
    ended = start_again(run, None, "--data.workers", "1")
    assert ended.code == 0, ended.output
    assert outcome(run) == golden


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_continue(run, golden, number):
    ended = start_again(run, Fault(call="loss", nth=9, signal=number))  # in the first half of step 5
    assert ended.code == 75
    message = ended.output.strip().splitlines()[-1]
    command = f"draftsmith train {Path(run.run) / 'recipe.toml'}"
    assert message == f"draftsmith: stopped by {number.name} after step 5 of 10, saved; continue with: {command}"
    assert "Traceback" not in ended.output
    assert outcome(run)["step"] == 5
    ended = children.run(command.split()[1:], Path(run.run).with_name("log.txt"))
    assert ended.code == 0, ended.output
    assert comparable(outcome(run)) == comparable(golden)


def test_a_signal_to_the_whole_group_spares_the_loader(run, golden):
    fault = Fault(call="loss", nth=9, signal=signal.SIGTERM, whole_group=True)
    ended = start_again(run, fault, "--data.workers", "1")
    assert ended.code == 75, ended.output
    assert "Traceback" not in ended.output
    assert start_again(run).code == 0
    assert comparable(outcome(run)) == comparable(golden)


def comparable(found: dict) -> dict:
    """Without the names of checkpoints: a signal adds one."""
    return {key: value for key, value in found.items() if key != "checkpoints"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_second_ctrl_c_leaves_at_once_and_a_second_sigterm_does_nothing(run, golden, number, code):
    ended = start_again(run, Fault(call="loss", nth=9, times=2, signal=number))
    assert ended.code == code
    assert ("saved; continue with" in ended.output) == (code == 75)
    assert start_again(run).code == 0
    assert outcome(run) == golden


def test_a_finished_run_says_so(run, golden):
    start_again(run)
    before = outcome(run)
    begin = time.process_time()
    ended = start_again(run)
    assert ended.code == 0
    assert "is finished: all 10 steps are done" in ended.output
    assert "step 10/10" not in ended.output
    assert outcome(run) == before == golden
    assert time.process_time() - begin < 5


def test_a_second_process_fences_the_first(run, golden):
    file, log = Path(run.run).with_name("recipe.toml"), Path(run.run).with_name("first.txt")
    file.write_text(to_toml(run))
    first = children.start(["train", str(file)], log, fault=Fault(call="optimizer step", nth=5, signal=signal.SIGSTOP))
    wait_until(lambda: (Path(run.run) / "ledger.jsonl").exists() and ledger_lines(run) == 4)
    assert start_again(run).code == 0
    os.kill(first.pid, signal.SIGCONT)
    ended = children.finish(first, log)
    assert ended.code == 2
    assert "no longer owns" in ended.output and "Traceback" not in ended.output
    assert outcome(run) == golden


def ledger_lines(recipe: Recipe) -> int:
    return len((Path(recipe.run) / "ledger.jsonl").read_bytes().splitlines())


def wait_until(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_flipped_bit_costs_one_checkpoint(run, golden):
    start_again(run, Fault(call="optimizer step", nth=8))
    damaged = Path(run.run) / "checkpoints" / "step-00000006" / "model.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-5] ^= 1
    damaged.write_bytes(data)
    ended = start_again(run)
    assert ended.code == 0, ended.output
    assert "warning: skipped a damaged checkpoint" in ended.output and "step-00000006" in ended.output
    assert "continuing" in ended.output and "from step 3 of 10" in ended.output
    assert comparable(outcome(run)) == comparable(golden)


def test_no_pickle_in_train_resume_evaluate(run, world, tmp_path):
    recipe = with_options(
        run, "evaluation", prompts=str(world / "prompts.jsonl"), every=STEPS, limit=1, max_new_tokens=4
    )
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(recipe))
    log, audit = tmp_path / "log.txt", tmp_path / "audit.txt"
    fault = Fault(call="optimizer step", nth=5, signal=signal.SIGTERM)
    steps = [(["train", str(file)], fault, 75), (["train", str(file)], None, 0), (["evaluate", recipe.run], None, 0)]
    for words, armed, code in steps:
        ended = children.run(words, log, fault=armed, audit=audit)
        assert ended.code == code, ended.output
        assert audit.read_text() == ""
