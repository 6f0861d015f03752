"""Metrics survive kills and full disks, the console stays inert, a failing tracker ends nothing."""

import io
import json
import resource
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from draftsmith import telemetry
from draftsmith.errors import EnvironmentFault
from draftsmith.telemetry import Console, MetricsFile, TensorBoard, clean
from draftsmith.train import train
from tests.conftest import make_recipe, with_options


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Ascii(io.TextIOWrapper):
    def __init__(self):
        super().__init__(io.BytesIO(), encoding="ascii")


def rows(path: Path) -> list[dict]:
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def write_steps(path: Path, *steps: int, after: int = 0) -> None:
    metrics = MetricsFile(path, step=after, warn=pytest.fail)
    for step in steps:
        metrics.write({"step": step, "loss": 1.0 / step})
    metrics.close()


# Metrics


def test_resume_cuts_later_and_torn_lines(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    write_steps(path, 1, 2, 3, 4)
    with open(path, "ab") as file:
        file.write(b'{"step": 1, "lo')
    write_steps(path, 3, 4, 5, after=2)
    assert [row["step"] for row in rows(path)] == [1, 2, 3, 4, 5]
    write_steps(path, 6, after=5)  # nothing to cut
    assert [row["step"] for row in rows(path)] == [1, 2, 3, 4, 5, 6]
    write_steps(path, 1)
    assert [row["step"] for row in rows(path)] == [1], "a fresh start"
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_torn_line_that_looks_whole_is_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    write_steps(path, 2, after=2)
    assert [row["step"] for row in rows(path)] == [1, 2]


def test_nonfinite_values_are_null_and_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, warn=pytest.fail)
    metrics.write({"step": 1, "loss": float("nan"), "accuracy": [1.0, float("inf")], "eval": {"x": float("-inf")}})
    metrics.write({"step": 2, "loss": 1.5})
    metrics.close()
    first, second = rows(path)
    assert first["loss"] is None and first["accuracy"] == [1.0, None] and first["eval"] == {"x": None}
    assert first["nonfinite"] == ["loss", "accuracy.1", "eval.x"]
    assert second == {"step": 2, "loss": 1.5}


def test_full_disk_is_a_warning_and_leaves_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    warnings = []
    metrics = MetricsFile(path, warn=warnings.append)
    metrics.write({"step": 1})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (15, 12):  # half a line fits, then nothing
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
        try:
            metrics.write({"step": 2})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    metrics.write({"step": 3})
    metrics.close()
    assert [row["step"] for row in rows(path)] == [1, 3]
    assert len(warnings) == 2 and all("step 2" in text for text in warnings)


def test_metrics_that_cannot_be_opened(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(EnvironmentFault, match="metrics.jsonl"):
        MetricsFile(tmp_path / "metrics.jsonl", warn=pytest.fail)


def test_a_line_needs_its_step(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl", warn=pytest.fail)
    with pytest.raises(AssertionError, match="needs its step"):
        metrics.write({"loss": 1.0})
    metrics.close()


# Console

FORGED = (
    "a\x1b[31mred\x1b[0m \x1b]0;title\x07b\x1b]8;;http://x\x1b\\link "
    "\x07\x08\r\x00\x7f\x9b2Jc \u202eevil\u2066 \x1bc[bold]"
)
RECORD = {
    "step": 120,
    "steps": 5000,
    "loss": 3.21449,
    "accept": 2.311,
    "accuracy": 0.4126,
    "tokens_per_second": 12345.6,
    "lr": 5.9e-4,
    "eta": 3723.4,
    "other": 1,
}
LINE = "step 120/5000  loss 3.2145  accept 2.31  accuracy 0.413  12,346 tok/s  lr 5.90e-04  ETA 1:02:03"


def test_clean():
    assert clean(FORGED) == "ared blink c evil [bold]"
    assert clean("größe 語 👩‍🔧\n\tx") == "größe 語 👩‍🔧\n\tx"


def test_plain_lines_when_not_a_terminal():
    out = io.StringIO()
    console = Console(out)
    console.say(FORGED)
    console.warn("two\nlines \x1b[2J")
    console.step(RECORD)
    console.step({"step": 1})
    console.step({"step": 2, "loss": float("nan"), "eta": float("inf"), "lr": None})
    console.close()
    assert out.getvalue().splitlines() == [
        "ared blink c evil [bold]",
        "warning: two lines ",
        LINE,
        "step 1",
        "step 2  loss nan",
    ]


def test_terminal_shows_a_bar_and_the_same_text(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    out = Terminal()
    console = Console(out)
    console.step(RECORD)
    console.say(FORGED + " [/nonsense] :smile:")
    console.warn("loud")
    assert console._bar is not None
    console.close()
    text = out.getvalue()
    assert LINE in clean(text) and "2%" in clean(text)
    assert "ared blink c evil [bold] [/nonsense] :smile:" in text
    assert "\x1b]" not in text and "\x07" not in text and "\x1bc" not in text and "\u202e" not in text
    assert "\x1b[33mwarning: loud" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is back"


def test_ascii_terminal_does_not_end_the_run():
    out = Ascii()
    Console(out).say("größe")
    out.seek(0)
    assert out.read() == "gr\\xf6\\xdfe\n"


SAYING = {
    "plan": "from draftsmith.cli import main; main('plan --target.path Qwen/Qwen3-8B --gpus 1'.split())",
    "much": "from draftsmith.telemetry import Console; c = Console(); [c.say('x' * 5000) for _ in range(99)]",
}


@pytest.mark.parametrize("program", SAYING.values(), ids=SAYING)
@pytest.mark.parametrize(("to", "said"), [("| head -c 1", ""), (">&-", ""), ("> /dev/full", "the work goes on")])
def test_a_console_that_is_gone_does_not_end_the_work(program, to, said):
    program += "; import sys; print('done', file=sys.stderr)"
    command = ["bash", "-c", f'"{sys.executable}" -c "{program}" {to}; exit ${{PIPESTATUS[0]}}']
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr.endswith("done\n"), done.stderr
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr and said in done.stderr


def test_a_help_text_that_nobody_reads_is_no_fault():
    program = "from draftsmith.cli import main; main(['--help'])"
    command = ["bash", "-c", f'"{sys.executable}" -c "{program}" | true; exit ${{PIPESTATUS[0]}}']
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_rich_is_not_imported_for_a_file():
    script = (
        "import sys; from draftsmith.telemetry import Console; c = Console(); c.step({'step': 1, 'steps': 2}); "
        "print([m for m in ('rich', 'torch') if m in sys.modules])"
    )
    root = Path(telemetry.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=60)
    assert done.stdout.splitlines() == ["step 1/2", "[]"], done.stderr


# TensorBoard


class FakeWriter:
    def __init__(self, folder, purge_step):
        self.folder, self.purge_step, self.seen, self.fail = folder, purge_step, [], None

    def add_scalar(self, key, value, step):
        if self.fail:
            raise self.fail
        self.seen.append((key, value, step))

    def close(self):
        if self.fail:
            raise self.fail
        self.seen.append("closed")


@pytest.fixture
def fake_tensorboard(monkeypatch):
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)


def test_tensorboard_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(EnvironmentFault, match=r"pip install 'draftsmith\[tensorboard\]'"):
        TensorBoard(tmp_path, warn=pytest.fail)


def test_tensorboard_scalars(tmp_path, fake_tensorboard):
    board = TensorBoard(tmp_path / "events", step=7, warn=pytest.fail)
    writer = board._writer
    board.write({"step": 8, "loss": 1.5, "rows": 3, "bad": float("nan"), "list": [1], "flag": True, "name": "x"})
    board.close()
    assert writer.seen == [("loss", 1.5, 8), ("rows", 3, 8), "closed"]
    assert writer.purge_step == 8 and writer.folder == str(tmp_path / "events")


def test_evaluations_are_on_the_board_and_count_in_no_rate(world, tmp_path, fake_tensorboard, monkeypatch):
    """An evaluation of two seconds between steps of milliseconds."""
    boards = []
    monkeypatch.setattr(FakeWriter, "close", lambda self: boards.append(self))

    def slow(self) -> dict:
        time.sleep(2.0)
        summary = {"accept_length": 2.5, "accept_length_pooled": 2.0, "prompts": 1, "lossless": True, "by_tag": {}}
        return summary | {"num_near_ties": 0}

    monkeypatch.setattr("draftsmith.report.Report._own_evaluation", slow)
    recipe = with_options(make_recipe(world, tmp_path), "optim", steps=4)
    recipe = with_options(with_options(recipe, "log", every=1, tensorboard=True), "evaluation", every=2)
    train(recipe, Console(io.StringIO()))
    (board,) = boards
    assert [seen for seen in board.seen if seen[0] == "evaluation/accept_length"] == [
        ("evaluation/accept_length", 2.5, step) for step in (2, 4)
    ]
    rates = {step: value for key, value, step in board.seen if key == "tokens_per_second"}
    assert rates[3] > rates[2] / 8, rates


@pytest.mark.parametrize("error", [OSError("disk"), RuntimeError("thread died"), ValueError("closed file")])
def test_tensorboard_failure_is_one_warning(tmp_path, fake_tensorboard, error):
    warnings = []
    board = TensorBoard(tmp_path, warn=warnings.append)
    board._writer.fail = error
    board.write({"step": 1, "loss": 1.0})
    board.write({"step": 2, "loss": 1.0})
    board.close()
    assert len(warnings) == 1 and str(error) in warnings[0]
    board = TensorBoard(tmp_path, warn=warnings.append)
    board._writer.fail = error
    board.close()
    assert len(warnings) == 2
