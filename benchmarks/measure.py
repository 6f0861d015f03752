"""Timing, the sustained matrix rate, and the one shape of result files."""

from __future__ import annotations

import gc
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from draftsmith import __version__


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"


def seconds_of(action: Callable[[], object], device: torch.device, repeats: int, warmup: int = 2) -> list[float]:
    """Seconds of each call. On a GPU they are those between the ends of one call's work and of the next one's, as it
    runs without waiting for the host: a step is followed by another in training too.
    """
    if device.type == "cuda":
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(warmup + repeats)]
        for end in ends:
            action()
            end.record()
        _wait(device)
        return [one.elapsed_time(other) / 1e3 for one, other in zip(ends[warmup - 1 :], ends[warmup:], strict=False)]
    times = []
    for number in range(warmup + repeats):
        _wait(device)
        start = time.perf_counter()
        action()
        _wait(device)
        if number >= warmup:
            times.append(time.perf_counter() - start)
    return times


def sustained_rate(device: torch.device, seconds: float, size: int = 8192) -> float:
    """FLOP/s of size^3 matrix products run back to back for some seconds: what the chip's power allows, no burst."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    _wait(device)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(10 if device.type == "cuda" else 1):
            torch.mm(a, b, out=out)
            count += 1
        _wait(device)
    return count * 2 * size**3 / (time.perf_counter() - start)


def clean(device: torch.device) -> None:
    """Let go of what an earlier benchmark of this process left: compiled code, and models in reference cycles."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float:
    """Largest memory in use since `clean`."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def spread(times: list[float]) -> dict[str, float]:
    return {"seconds_median": statistics.median(times), "seconds_spread": max(times) - min(times)}


def write(name: str, device: torch.device, rows: list[dict], folder: Path) -> Path:
    """Write the result file and print its rows."""
    label = device_name(device)
    result = {
        "name": name,
        "commit": _commit(),
        "device": label,
        "versions": {"draftsmith": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "rows": rows,
    }
    path = folder / f"{name}-{label.replace(' ', '_')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    return path


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
