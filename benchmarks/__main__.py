"""`python -m benchmarks [--toy] [--out FOLDER] [NAME ...]`"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import attention, colocated, loader, measure, packing, step, target


def bench_step(device: torch.device, toy: bool) -> list[dict]:
    if toy:
        return [step.run(step.TOY, device, "off", repeats=3)]
    shape = step.Shape()
    rows = [step.run(shape, device, mode, repeats=10) for mode in ("layer", "on")]
    rows.append(step.run(replace(shape, tokens=49_152, anchors=6_144), device, "on", repeats=5))
    return rows


def bench_target(device: torch.device, toy: bool) -> list[dict]:
    if toy:
        return [target.run(target.build(step.TOY, device, 4, (0, 2)), step.TOY, device, False, repeats=3)]
    shape = replace(step.Shape(), tokens=49_152)
    model = target.build(shape, device, 36, (1, 9, 17, 25, 33))
    return [target.run(model, shape, device, compiled, repeats=5) for compiled in (False, True)]


def bench_colocated(device: torch.device, toy: bool) -> list[dict]:
    if toy:
        return [colocated.run(step.TOY, device, 4, (0, 2), steps=4, workers=0)]
    shape = replace(step.Shape(), tokens=49_152, anchors=6_144)
    return [colocated.run(shape, device, 36, (1, 9, 17, 25, 33), steps=14, workers=8)]


def bench_attention(device: torch.device, toy: bool) -> list[dict]:
    if device.type == "cpu":
        print("flex attention has no backward pass on a CPU: nothing to measure")
        return []
    rows, best = attention.search(step.TOY if toy else step.Shape(), device)
    return rows if toy else rows + attention.windows(device, best)


def bench_packing(device: torch.device, toy: bool) -> list[dict]:
    return packing.sweep(toy)


def bench_loader(device: torch.device, toy: bool) -> list[dict]:
    if toy:
        return loader.run(2_000, 8_192, 1_024, packs=8, repeats=1)
    return loader.run(1_000_000, 49_152, 6_144, packs=60, repeats=3)


BENCHMARKS = {
    "step": bench_step,
    "target": bench_target,
    "colocated": bench_colocated,
    "attention": bench_attention,
    "packing": bench_packing,
    "loader": bench_loader,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], help="which; all by default")
    parser.add_argument("--toy", action="store_true", help="toy sizes, for a CPU")
    parser.add_argument("--out", type=Path, help="benchmarks/results; runs/benchmarks for toy sizes")
    options = parser.parse_args()
    out = options.out or (Path("runs/benchmarks") if options.toy else Path(__file__).parent / "results")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in options.names or BENCHMARKS:
        label = f"{name}-toy" if options.toy else name
        print(f"== {label} on {measure.device_name(device)}", flush=True)
        measure.write(label, device, BENCHMARKS[name](device, options.toy), out)


main()
