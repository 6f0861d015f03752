"""`prepare` against the bare tokenizer, and over a million rows: rows a second, memory, a kill on the way.

Text is the Python standard library's source, so nothing is downloaded. Each measurement is a process of its own. Both
rates are taken from the 5,000th row on, when all processes have started. Processor time is given besides: where other
work shares the machine it says more than the clock. The bare tokenizer is measured as it comes, and with a memory of
words as large as `prepare` gives it (`pieces.WORDS`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from draftsmith.config import DataOptions
from draftsmith.data.build import ROWS
from draftsmith.data.pieces import WORDS
from draftsmith.data.prepare import PROGRESS, prepare, tokenizer_fingerprint

QUESTION, ANSWER = 300, 1_450
"""Characters; about 500 tokens of SmolLM2's in all, the template's included."""
_TOKENIZER: list[PreTrainedTokenizerBase] = []


class Moment(NamedTuple):
    """Rows done, and seconds: of the clock, of this process, and of the processes that it started."""

    rows: int
    clock: float
    parent: float
    children: float

    @classmethod
    def now(cls, rows: int) -> Moment:
        children = sum(_processor_seconds(child.pid) for child in multiprocessing.active_children())
        return cls(rows, time.perf_counter(), time.process_time(), children)

    def rates(self, earlier: Moment) -> dict:
        rows, clock, *cpu = (now - then for now, then in zip(self, earlier, strict=True))
        parent, children = (1e6 * seconds / rows for seconds in cpu)
        return {"rows_per_s": rows / clock, "parent_cpu_us_per_row": parent, "children_cpu_us_per_row": children}


def _processor_seconds(pid: int | None) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def conversations(num: int) -> Iterator[dict]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    draw = random.Random(0)
    for number in range(num):
        at = draw.randrange(len(text) - QUESTION - ANSWER)
        question, answer = text[at : at + QUESTION], text[at + QUESTION : at + QUESTION + ANSWER]
        messages = [
            {"role": "user", "content": f"{number} {question}"},
            {"role": "assistant", "content": f"So {answer}"},
        ]
        yield {"messages": messages}


def short_rows(num: int) -> Iterator[dict]:
    """Tokens already, 16 a row."""
    for number in range(num):
        tokens = [number % 1_000 + 3, number // 1_000 + 3] * 8
        yield {"id": f"row {number}", "input_ids": tokens, "loss_mask": [0] * 4 + [1] * 12}


def _load(target: str, words: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process, as in `prepare`
    tokenizer = AutoTokenizer.from_pretrained(target)
    if words:
        tokenizer.backend_tokenizer.model._resize_cache(words)
    _TOKENIZER.append(tokenizer)


def _encode(texts: list[str]) -> int:
    return sum(map(len, _TOKENIZER[0](texts, add_special_tokens=False)["input_ids"]))


def bare_rate(target: str, file: Path, processes: int, words: int) -> dict:
    """Rendered texts, 64 at a time, to as many processes, of which each answers with a count only."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    rows = (json.loads(line)["messages"] for line in file.open("rb"))
    texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in rows]
    batches = iter(texts[at : at + ROWS] for at in range(0, len(texts), ROWS))
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _load, (target, words))
    waiting, done, tokens, begun = deque(), 0, 0, None
    while True:
        waiting.extend(pool.submit(_encode, batch) for batch in islice(batches, 4 * processes - len(waiting)))
        if not waiting:
            break
        tokens += waiting.popleft().result()
        done += ROWS
        if begun is None and done >= PROGRESS:
            begun = Moment.now(done)
    assert begun is not None
    ended = Moment.now(len(texts))
    pool.shutdown()
    return ended.rates(begun) | {"tokens_per_row": tokens / len(texts)}


def prepare_rate(target: str, file: Path, folder: Path, processes: int) -> dict:
    """`prepare` in this process, with its memory on the way."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    moments: list[Moment] = []
    memory: dict[str, float] = {}

    def report(line: str) -> None:
        if " rows read" in line:
            moments.append(Moment.now(int(line.split()[0])))
            if len(moments) == 1 or moments[-1].rows % 100_000 == 0:
                memory[str(moments[-1].rows)] = _memory()
            print(line, flush=True)
        elif line.startswith("going on"):
            print(line, flush=True)

    options = DataOptions(conversations=str(file), prepared=str(folder), processes=processes, form="auto")
    start = time.perf_counter()
    manifest = prepare(tokenizer, tokenizer_fingerprint(tokenizer), options, report)
    end, counts = time.perf_counter(), manifest["counts"]
    rate = (counts["rows_in"] - moments[0].rows) / (end - moments[0].clock)  # with what comes after the last row
    return moments[-1].rates(moments[0]) | {
        "rows_per_s": rate,
        "tokens_per_row": counts["tokens"] / counts["kept"],
        "seconds": end - start,
        "memory_gib": memory,
        "peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "peak_memory_of_a_child_gib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20,
        "content_hash": manifest["content_hash"],
    }


def _memory() -> float:
    """GiB that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


def _apart(*words: object, kill_at: int | None = None) -> dict:
    """A measurement in a process of its own; killed once it has read so many rows, if `kill_at`."""
    command = [sys.executable, "-m", "benchmarks.prepare", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        assert child.stdout is not None
        lines = []
        for line in child.stdout:
            lines.append(line)
            if kill_at is not None and line.startswith(f"{kill_at} rows read"):
                os.killpg(child.pid, signal.SIGKILL)
                return {}
    found = json.loads(lines[-1])
    return found | {"went_on": [line.strip() for line in lines if line.startswith("going on")]}


def run(target: str, scratch: Path, rows: int, million: int, processes: int, repeats: int) -> list[dict]:
    """The rows of the result file."""
    scratch.mkdir(parents=True, exist_ok=True)
    long, short = scratch / "long.jsonl", scratch / "short.jsonl"
    _write(long, conversations(rows))
    ours, bare, tuned = [], [], []
    for number in range(repeats):  # in turn, since other work on the machine comes and goes
        bare.append(_apart("bare", target, long, processes))
        ours.append(_apart("prepare", target, long, scratch / f"set-{number}", processes))
        tuned.append(_apart("tuned", target, long, processes))
    others = {"bare tokenizer": _compare(ours, bare), "bare tokenizer, as many words": _compare(ours, tuned)}
    rates = [one["rows_per_s"] for one in ours]
    result = [
        {
            "what": "rows of about 500 tokens",
            "rows": rows,
            "processes": processes,
            "tokens_per_row": ours[0]["tokens_per_row"],
            "rows_per_s": statistics.median(rates),
            "rows_per_s_spread": max(rates) - min(rates),
            "tokens_per_s": statistics.median(rates) * ours[0]["tokens_per_row"],
            "ratio_to": {name: one["ratio"] for name, one in others.items()},
            "others": others,
            "parent_cpu_us_per_row": statistics.median(one["parent_cpu_us_per_row"] for one in ours),
            "children_cpu_us_per_row": statistics.median(one["children_cpu_us_per_row"] for one in ours),
            "peak_memory_gib": max(one["peak_memory_gib"] for one in ours),
            "peak_memory_of_a_child_gib": max(one["peak_memory_of_a_child_gib"] for one in ours),
            "content_hash": ours[0]["content_hash"],
            "load_average": list(os.getloadavg()),
        }
    ]
    if million:
        _write(short, short_rows(million))
        whole = _apart("prepare", target, short, scratch / "whole", processes)
        _apart("prepare", target, short, scratch / "killed", processes, kill_at=million * 6 // 10)
        resumed = _apart("prepare", target, short, scratch / "killed", processes)
        whole |= {"what": "short rows, tokens already", "rows": million, "processes": processes}
        whole |= {"resumed_seconds": resumed["seconds"], "resumed": resumed["went_on"]}
        whole |= {"resumed_equal": resumed["content_hash"] == whole["content_hash"]}
        result.append(whole | {"load_average": list(os.getloadavg())})
    return result


def _compare(ours: list[dict], other: list[dict]) -> dict:
    """The other's figures, and ours as a share of them: by the clock, and by processor time."""
    by_clock = [mine["rows_per_s"] / its["rows_per_s"] for mine, its in zip(ours, other, strict=True)]
    by_cpu = [_cpu(its) / _cpu(mine) for mine, its in zip(ours, other, strict=True)]
    return {
        "rows_per_s": statistics.median(one["rows_per_s"] for one in other),
        "cpu_us_per_row": statistics.median(map(_cpu, other)),
        "ratio": statistics.median(by_clock),
        "ratios": by_clock,
        "ratio_by_cpu": statistics.median(by_cpu),
    }


def _cpu(found: dict) -> float:
    return found["parent_cpu_us_per_row"] + found["children_cpu_us_per_row"]


def _write(file: Path, rows: Iterator[dict]) -> None:
    with file.open("w") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    """One measurement; the last line of output is its JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prepare")
    parser.add_argument("what", choices=["bare", "tuned", "prepare"])
    parser.add_argument("target")
    parser.add_argument("rest", nargs="+")
    given = parser.parse_args()
    *paths, processes = given.rest
    more = {"bare": [0], "tuned": [WORDS], "prepare": []}[given.what]
    measure = prepare_rate if given.what == "prepare" else bare_rate
    print(json.dumps(measure(given.target, *map(Path, paths), int(processes), *more)))


if __name__ == "__main__":
    main()
