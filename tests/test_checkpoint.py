"""Checkpoints survive damage, kills and full disks; the ledger and the fence tell the truth."""

import errno
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftsmith import checkpoint
from draftsmith.checkpoint import CorruptCheckpoint, Superseded
from draftsmith.errors import EnvironmentFault, UserError


def state(step: int) -> dict:
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(8, 6, generator=generator)
    return {
        "model": {"fc.weight": weight.bfloat16(), "norm.weight": torch.ones(6), "scale": torch.tensor(float(step))},
        "optimizer": {"fc.weight.exp_avg": weight.T, "odd": torch.tensor([float("nan"), -0.0, float("inf")])},
    }


def save(folder: Path, step: int, *, run_id: str = "run-a", generation: str = "g1") -> Path:
    return checkpoint.save(
        folder,
        step=step,
        run_id=run_id,
        generation=generation,
        tensors=state(step),
        documents={"config.json": '{"block_size": 16}\n', "recipe.toml": "seed = 0  # größer\r\n"},
        facts={"seed": 1, "metrics": {"loss": 0.1 + step}, "betas": (0.9, 0.95), 7: "int key", 10: "another"},
    )


def assert_holds(found: checkpoint.Checkpoint, step: int) -> None:
    assert found.step == step
    for stem, named in state(step).items():
        read = found.tensors(stem)
        assert read.keys() == named.keys()
        for name, tensor in named.items():
            assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
            one, other = (value.contiguous().reshape(-1).view(torch.uint8) for value in (read[name], tensor))
            assert torch.equal(one, other), name


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.startswith("step-")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


def test_round_trip(folder):
    path = save(folder, 500)
    assert path == folder / "step-00000500"
    found = checkpoint.load(path)
    assert_holds(found, 500)
    assert found.document("recipe.toml") == "seed = 0  # größer\r\n"
    assert (found.run_id, found.generation) == ("run-a", "g1")
    assert found.facts["betas"] == [0.9, 0.95] and found.facts["10"] == "another"
    assert leftovers(folder) == []
    with pytest.raises(CorruptCheckpoint, match="ema.safetensors"):
        found.tensors("ema")
    modes = {file.stat().st_mode for file in path.iterdir()}
    assert len(modes) == 1, "safetensors files must not be more private than the others"


def test_plain_safetensors_for_other_programs(folder):
    from safetensors import safe_open

    with safe_open(save(folder, 1) / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


# Damage


def test_every_flipped_bit_is_found_and_the_previous_checkpoint_used(folder):
    save(folder, 1)
    path = save(folder, 2)
    rng = random.Random(0)
    files = sorted(path.iterdir())
    assert len(files) == 5
    for trial in range(75):
        file = files[trial % len(files)]
        good = file.read_bytes()
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        file.write_bytes(bad)
        lines = []
        found = checkpoint.newest_valid(folder, run_id="run-a", report=lines.append)
        assert found is not None and found.step == 1, f"trial {trial}: {file.name}"
        assert len(lines) == 1 and file.name in lines[0]
        file.write_bytes(good)
    assert_holds(checkpoint.newest_valid(folder), 2)


def truncated(path: Path, other: Path) -> str:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-1])
    return "model.safetensors.*bytes"


def emptied_manifest(path: Path, other: Path) -> str:
    (path / "manifest.json").write_bytes(b"")
    return "manifest.json"


def deleted(path: Path, other: Path) -> str:
    (path / "recipe.toml").unlink()
    return "recipe.toml: missing"


def deleted_manifest(path: Path, other: Path) -> str:
    (path / "manifest.json").unlink()
    return "manifest.json: missing"


def added(path: Path, other: Path) -> str:
    (path / "optimizer.pt").write_bytes(b"")
    return "optimizer.pt: not part"


def swapped(path: Path, other: Path) -> str:
    shutil.copy(other / "model.safetensors", path / "model.safetensors")
    return "model.safetensors: SHA-256"


def swapped_manifest(path: Path, other: Path) -> str:
    shutil.copy(other / "manifest.json", path / "manifest.json")
    return "manifest.json: it is of step 1"


def swapped_whole(path: Path, other: Path) -> str:
    shutil.rmtree(path)
    shutil.copytree(other, path)
    return "manifest.json: it is of step 1"


def linked(path: Path, other: Path) -> str:
    (path / "model.safetensors").rename(path.parent.parent / "elsewhere")
    (path / "model.safetensors").symlink_to(path.parent.parent / "elsewhere")
    return "model.safetensors: not a regular file"


def linked_manifest(path: Path, other: Path) -> str:
    (path / "manifest.json").rename(path.parent.parent / "elsewhere")
    (path / "manifest.json").symlink_to(path.parent.parent / "elsewhere")
    return "manifest.json: links"


def linked_folder(path: Path, other: Path) -> str:
    path.rename(path.parent.parent / path.name)
    path.symlink_to(path.parent.parent / path.name)
    return "links are refused"


def folder_for_file(path: Path, other: Path) -> str:
    (path / "recipe.toml").unlink()
    (path / "recipe.toml").mkdir()
    return "recipe.toml: not a regular file"


@pytest.mark.parametrize(
    "damage",
    [
        truncated,
        emptied_manifest,
        deleted,
        deleted_manifest,
        added,
        swapped,
        swapped_manifest,
        swapped_whole,
        linked,
        linked_manifest,
        linked_folder,
        folder_for_file,
    ],
)
def test_damage_is_refused(folder, damage):
    other, path = save(folder, 1), save(folder, 2)
    message = damage(path, other)
    with pytest.raises(CorruptCheckpoint, match=message):
        checkpoint.load(path)
    lines = []
    assert checkpoint.newest_valid(folder, report=lines.append).step == 1
    assert len(lines) == 1 and path.name in lines[0]


def forge(path: Path, **changes) -> None:
    """A manifest with valid seal, as someone who knows the format could write it."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    del manifest["sha256"]
    (path / "manifest.json").write_bytes(checkpoint._seal({**manifest, **changes}))


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/b", "..", ".hidden", "a\\b", "", "a\nb"])
def test_forged_file_name(folder, name):
    path = save(folder, 1)
    (folder / "outside").write_bytes(b"")
    files = json.loads((path / "manifest.json").read_bytes())["files"]
    forge(path, files={**files, name: {"size": 0, "sha256": "0" * 64}})
    with pytest.raises(CorruptCheckpoint, match="not a plain one"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": "other"}, "not that of a draftsmith checkpoint"),
        ({"format": 2}, "format 2; this version reads format 1"),
        ({"step": "1"}, "wrong type"),
        ({"step": True}, "wrong type"),
        ({"facts": []}, "wrong type"),
        ({"files": {"a": {"size": "1", "sha256": "0" * 64}}}, "wrong type"),
        ({"files": {"a": 3}}, "wrong type"),
    ],
)
def test_forged_field(folder, changes, message):
    path = save(folder, 1)
    forge(path)
    checkpoint.load(path)  # the forger's tool works
    forge(path, **changes)
    with pytest.raises(CorruptCheckpoint, match=message):
        checkpoint.load(path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}", "[]", "null", "\ufffe", '{"step": 1e999}']
)
def test_hostile_manifest(folder, text):
    path = save(folder, 1)
    (path / "manifest.json").write_text(text)
    with pytest.raises(CorruptCheckpoint, match="manifest.json"):
        checkpoint.load(path)


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/b", "manifest.json", "", ".hidden"])
def test_save_refuses_names_that_leave_the_folder(folder, name):
    with pytest.raises(ValueError, match="plain file name"):
        checkpoint.save(folder, step=1, run_id="r", generation="g", tensors={}, documents={name: ""}, facts={})
    assert not folder.exists()


def test_write_that_reads_back_differently_is_not_published(folder, monkeypatch):
    save(folder, 1)
    intact = checkpoint.save_file

    def faulty(tensors, path, metadata):
        intact(tensors, path, metadata=metadata)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(checkpoint, "save_file", faulty)
    with pytest.raises(EnvironmentFault, match="reads back differently"):
        save(folder, 2)
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]


# Choosing and deleting


def test_newest_valid_without_any(folder):
    assert checkpoint.newest_valid(folder) is None
    (save(folder, 1) / "manifest.json").unlink()
    lines = []
    assert checkpoint.newest_valid(folder, report=lines.append) is None
    assert "none of the 1" in lines[-1]


def test_newest_is_by_number_and_of_the_run(folder):
    save(folder, 99_999_999)
    save(folder, 100_000_000)
    assert checkpoint.newest_valid(folder).step == 100_000_000
    save(folder, 200_000_000, run_id="run-b")
    lines = []
    assert checkpoint.newest_valid(folder, run_id="run-a", report=lines.append).step == 100_000_000
    assert "run-b" in lines[0]


def test_leftovers_go_but_not_those_of_the_living_owner(folder):
    save(folder, 1)
    token = checkpoint.claim(folder.parent)
    (folder / ".tmp-old-step-00000002-aa").mkdir()
    (folder / ".tmp-old-step-00000002-aa" / "model.safetensors").write_bytes(b"half")
    (folder / f".tmp-{token}-step-00000002-aa").mkdir()
    lines = []
    assert checkpoint.newest_valid(folder, report=lines.append).step == 1
    assert leftovers(folder) == [f".tmp-{token}-step-00000002-aa"]
    assert len(lines) == 1 and ".tmp-old-step-00000002-aa" in lines[0]


def test_valid_checkpoint_is_never_overwritten_and_a_damaged_one_moves_aside(folder):
    path = save(folder, 1)
    before = (path / "manifest.json").stat().st_ino
    with pytest.raises(UserError, match="never overwritten"):
        save(folder, 1)
    assert (path / "manifest.json").stat().st_ino == before and leftovers(folder) == []
    (path / "recipe.toml").write_bytes(b"x")
    save(folder, 1)
    assert_holds(checkpoint.load(path), 1)
    (aside,) = leftovers(folder)
    assert aside.startswith("damaged-step-00000001-") and (folder / aside / "recipe.toml").read_bytes() == b"x"


def test_prune_keeps_the_newest_valid_and_the_best_and_nothing_foreign_goes(folder):
    for step in range(1, 9):
        save(folder, step, run_id="run-b" if step == 3 else "run-a")
    (folder / "step-00000007" / "model.safetensors").write_bytes(b"damaged")
    (folder / "step-00000004" / "notes.txt").write_text("a user's file")
    (folder / "step-00000000").mkdir()
    (folder / "step-00000000" / "thesis.txt").write_text("not ours")
    (folder / "mine").mkdir()
    (folder.parent / "linked").mkdir()
    (folder / "step-00000009").symlink_to(folder.parent / "linked")
    assert checkpoint.prune(folder, 2, "step-00000002") == ["step-00000005", "step-00000001"]
    kept = sorted(path.name for path in folder.iterdir())
    assert kept == ["mine", *(f"step-{step:08d}" for step in (0, 2, 3, 4, 6, 7, 8, 9))]
    assert (folder.parent / "linked").is_dir()


def test_prune_deletes_nothing_until_enough_verify(folder):
    paths = [save(folder, step) for step in range(1, 5)]
    for path in paths[1:3]:
        (path / "model.safetensors").write_bytes(b"damaged")
    assert checkpoint.prune(folder, 2, None) == []
    assert len(list(folder.iterdir())) == 4
    with pytest.raises(UserError, match="at least 2"):
        checkpoint.prune(folder, 1, None)


def test_prune_reads_again_only_what_this_process_has_not(folder, monkeypatch):
    names = [save(folder, step).name for step in range(1, 5)]
    read = []
    measure = checkpoint._measure
    monkeypatch.setattr(checkpoint, "_measure", lambda path: read.append(path.parent.name) or measure(path))
    assert checkpoint.prune(folder, 2, None, verified=names[3:]) == names[:2][::-1]
    assert set(read) == {names[2]}, "the older one of those that stay; the newer one was known"
    read.clear()
    assert checkpoint.prune(folder, 2, None, verified=names) == [] and read == []


def test_prune_notices_a_known_checkpoint_that_lost_a_part(folder):
    names = [save(folder, step).name for step in range(1, 4)]
    (folder / names[2] / "model.safetensors").write_bytes(b"cut")
    assert checkpoint.prune(folder, 2, None, verified=names) == []
    assert sorted(path.name for path in folder.iterdir()) == names


def test_prune_of_a_named_run_ignores_newer_foreign_ones(folder):
    for step in range(1, 4):
        save(folder, step)
    for step in range(4, 6):
        save(folder, step, run_id="run-b")
    assert checkpoint.prune(folder, 2, None, run_id="run-a") == ["step-00000001"]


# Kills and full disks

KILLS = '''
import json, os, resource, signal, sys
from pathlib import Path
sys.path.insert(0, os.path.dirname(sys.argv[2]))
import test_checkpoint as t
from draftsmith import checkpoint

root = Path(sys.argv[1])

def kill_before(count):
    """Every write, fsync, mkdir, rename and delete counts; the process dies before the given one, or after it."""
    left = [count]
    def wrap(module, name):
        intact = getattr(module, name)
        def wrapped(*args, **kwargs):
            for when in ("before", "after"):
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                if when == "before":
                    result = intact(*args, **kwargs)
            return result
        setattr(module, name, wrapped)
    for name in ("fsync", "rename", "replace", "mkdir", "chmod", "unlink", "rmdir"):
        wrap(os, name)
    wrap(checkpoint, "save_file")
    class Torn:
        """Writes a half first, so that a kill between leaves a torn file."""
        def __init__(self, file): self.file = file
        def __enter__(self): return self
        def __exit__(self, *_): self.file.close()
        def fileno(self): return self.file.fileno()
        def flush(self): self.file.flush()
        def write(self, data):
            for part in (data[: len(data) // 2], data[len(data) // 2 :]):
                self.file.write(part); self.file.flush()
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
    import builtins
    checkpoint.open = lambda path, mode: Torn(builtins.open(path, mode)) if "x" in mode else builtins.open(path, mode)

def kill_at_size(size):
    """The kernel kills the process when a file grows past `size` bytes: truly in the middle of a write."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

def attempt(name, arm):
    folder = root / name / "checkpoints"
    t.save(folder, 1); t.save(folder, 2)
    child = os.fork()
    if child == 0:
        arm()
        t.save(folder, 3)
        checkpoint.prune(folder, 2, None)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, status
    found = checkpoint.newest_valid(folder, run_id="run-a", report=lambda text: None)
    t.assert_holds(found, found.step)
    kept = sorted(path.name for path in folder.iterdir())
    for path in folder.iterdir():
        checkpoint.load(path)
    print(json.dumps([name, found.step, kept, os.WIFSIGNALED(status)]))
    return os.WIFSIGNALED(status)

count = 0
while attempt(f"call-{count}", lambda: kill_before(count)):
    count += 1
for size in range(1, 700, 60):
    attempt(f"size-{size}", lambda: kill_at_size(size))
'''


def run_script(script: str, *arguments: object) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(checkpoint.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kill_at_every_call_and_in_the_middle_of_writes(tmp_path):
    rows = [json.loads(line) for line in run_script(KILLS, tmp_path, __file__).splitlines()]
    by_call = [row for row in rows if row[0].startswith("call")]
    assert len(by_call) > 40 and not by_call[-1][3]
    steps = [row[1] for row in by_call]
    assert steps == sorted(steps) and set(steps) == {2, 3}, "old until the rename, new from then on"
    for name, step, kept, _ in rows:
        expected = ["step-00000001", "step-00000002"] if step == 2 else ["step-00000002", "step-00000003"]
        assert kept in (expected, ["step-00000001", "step-00000002", "step-00000003"]), name
    sizes = [row for row in rows if row[0].startswith("size")]
    assert sum(row[3] for row in sizes) >= 8 and all(row[1] == 2 for row in sizes if row[3])


def test_order_of_writes_survives_power_loss(folder, monkeypatch):
    """Everything is fsynced before the rename, the manifest after all other files, and the parent after the rename."""
    save(folder, 1)
    events = []
    fsync, rename = os.fsync, os.rename

    def logged_fsync(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def logged_rename(source, target):
        events.append(f"rename to {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "rename", logged_rename)
    save(folder, 2)
    assert events[-1] == "checkpoints" and events[-2] == "rename to step-00000002"
    assert events[-3].startswith(".tmp-g1-step-00000002") and events[-4] == "manifest.json"
    assert set(events[:-4]) == {"model.safetensors", "optimizer.safetensors", "config.json", "recipe.toml"}


@pytest.mark.parametrize("failing", range(1, 8))
def test_full_disk_at_any_file_leaves_the_previous(folder, monkeypatch, failing):
    save(folder, 1)
    calls = 0
    intact = os.fsync

    def full(descriptor):
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        intact(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentFault, match="No space left.*intact"):
        save(folder, 2)
    monkeypatch.undo()
    assert leftovers(folder) == []
    published = failing == 7  # only the directory entry of the finished checkpoint was not forced to disk
    assert_holds(checkpoint.newest_valid(folder, report=pytest.fail), 2 if published else 1)


@pytest.mark.parametrize("size", [40, 200, 400, 700])
def test_real_write_failure_inside_safetensors_or_python(folder, size):
    """A file size limit makes the kernel refuse the write itself, also the one that safetensors does in Rust."""
    save(folder, 1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        with pytest.raises(EnvironmentFault, match="File too large"):
            save(folder, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    assert_holds(checkpoint.newest_valid(folder, report=pytest.fail), 1)


def test_nothing_is_unpickled(tmp_path):
    script = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import pickle
import test_checkpoint as t
from draftsmith import checkpoint
seen = []
sys.addaudithook(lambda event, args: seen.append(event) if event in ("pickle.find_class", "exec", "import") else None)
folder = Path(sys.argv[1]) / "checkpoints"
for step in (1, 2, 3):
    t.save(folder, step)
    t.assert_holds(checkpoint.newest_valid(folder), step)
checkpoint.prune(folder, 2, None)
print(seen.count("pickle.find_class"))
pickle.loads(pickle.dumps(Path))
print(seen.count("pickle.find_class"))
"""
    assert run_script(script, tmp_path, Path(__file__).parent).split() == ["0", "1"]


# Fencing


def test_a_second_claim_fences_the_first(folder):
    run = folder.parent
    first = checkpoint.claim(run)
    checkpoint.check_generation(run, first)
    save(folder, 1, generation=first)
    second = checkpoint.claim(run)
    assert first != second
    checkpoint.check_generation(run, second)
    with pytest.raises(Superseded, match="another process has claimed"):
        checkpoint.check_generation(run, first)
    with pytest.raises(Superseded):
        save(folder, 2, generation=first)
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    save(folder, 2, generation=second)
    (run / "generation").unlink()
    with pytest.raises(Superseded, match="gone"):
        checkpoint.check_generation(run, second)


def test_claim_in_the_middle_of_a_save(folder, monkeypatch):
    """The old owner was stopped while writing; the new one claims and removes its half. It must say so, not 'disk'."""
    first = checkpoint.claim(folder.parent)
    intact = checkpoint._write

    def slow(path, data):
        if path.name == "recipe.toml":
            monkeypatch.setattr(checkpoint, "_write", intact)
            checkpoint.claim(folder.parent)
            checkpoint.newest_valid(folder, report=lambda text: None)
        intact(path, data)

    monkeypatch.setattr(checkpoint, "_write", slow)
    with pytest.raises(Superseded, match="another process has claimed"):
        save(folder, 1, generation=first)
    assert list(folder.iterdir()) == []
