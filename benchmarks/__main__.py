"""`python -m benchmarks [--toy] [--out FOLDER] [NAME ...]`"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks import (
    answers,
    attention,
    colocated,
    graphs,
    loader,
    loss,
    masks,
    measure,
    packing,
    peers,
    prepare,
    step,
    target,
)


def bench_step(device: torch.device, toy: bool) -> list[dict]:
    if toy:
        return [step.run(step.TOY, device, "off", repeats=3)]
    shape = step.Shape()
    rows = [step.run(shape, device, "on", repeats=10)]
    rate = rows[0]["sustained_tflops"] * 1e12
    for parts in (("head",), ("drafter", "head")):
        rows.append(step.run(shape, device, "on", repeats=10, rate=rate, fp8=parts))
    for row in rows:
        row["ratio_to"] = {"bf16": rows[0]["seconds_median"] / row["seconds_median"]}
    rows.append(step.run(shape, device, "layer", repeats=10, rate=rate))
    large = replace(shape, tokens=49_152, anchors=6_144)
    return rows + [step.run(large, device, "on", repeats=6)]


def bench_target(device: torch.device, toy: bool) -> list[dict]:
    if toy:
        return [target.run(target.build(step.TOY, device, 4, (0, 2)), step.TOY, device, False, repeats=3)]
    shape = replace(step.Shape(), tokens=49_152)
    model = target.build(shape, device, 36, (1, 9, 17, 25, 33))
    plain = target.run(model, shape, device, True, repeats=5)
    quantised = target.run(model, shape, device, True, repeats=5, rate=plain["sustained_tflops"] * 1e12, fp8=True)
    quantised["ratio_to"] = {"bf16": plain["seconds_median"] / quantised["seconds_median"]}
    return [plain, quantised]


def bench_colocated(device: torch.device, toy: bool) -> list[dict]:
    if toy:
        return [colocated.run(step.TOY, device, 4, (0, 2), steps=4, workers=0)]
    shape = replace(step.Shape(), tokens=49_152, anchors=6_144)
    taps = (1, 9, 17, 25, 33)
    return [colocated.run(shape, device, 36, taps, steps=14, workers=8, fp8=fp8) for fp8 in (False, True)]


def bench_attention(device: torch.device, toy: bool) -> list[dict]:
    if device.type == "cpu":
        print("flex attention has no backward pass on a CPU: nothing to measure")
        return []
    rows, best = attention.search(step.TOY if toy else step.Shape(), device)
    return rows if toy else rows + attention.windows(device, best)


def bench_masks(device: torch.device, toy: bool) -> list[dict]:
    if toy:
        return [masks.run(step.TOY, device, repeats=3)]
    shape, window = step.Shape(), {"document": 49_152, "window": 2_048}
    large = replace(shape, tokens=49_152, anchors=6_144)
    return [masks.run(one, device, repeats=10) for one in (shape, large, replace(large, **window))]


def bench_loss(device: torch.device, toy: bool) -> list[dict]:
    return loss.run(step.TOY, device, 256, repeats=3) if toy else loss.run(step.Shape(), device, 15_360, repeats=10)


def bench_graphs(device: torch.device, toy: bool) -> list[dict]:
    if device.type == "cpu":
        print("a CPU has no CUDA graphs: nothing to measure")
        return []
    if toy:
        return [graphs.run(step.TOY, device, "off", repeats=3)]
    work = [(graphs.SMALL, 1_024), (graphs.SMALL, 4_096), (graphs.SMALL, 16_384)]
    work += [(step.Shape(), 1_024), (step.Shape(), 4_096)]
    return [graphs.run(graphs.sized(shape, tokens), device, "on", repeats=20) for shape, tokens in work]


def bench_peers(folder: Path | None, device: torch.device, toy: bool) -> list[dict]:
    if device.type == "cpu" or toy or folder is None:
        print("peers are compared at full size on a GPU, with --peers FOLDER: nothing to measure")
        return []
    return peers.run(step.Shape(), device, folder, repeats=8)


def bench_packing(device: torch.device, toy: bool) -> list[dict]:
    return packing.sweep(toy)


def bench_loader(device: torch.device, toy: bool) -> list[dict]:
    if toy:
        return loader.run(2_000, 8_192, 1_024, packs=8, repeats=1)
    return loader.run(1_000_000, 49_152, 6_144, packs=60, repeats=3)


def bench_prepare(device: torch.device, toy: bool) -> list[dict]:
    target = Path("runs/cache/SmolLM2-135M-Instruct")
    if not (target / "tokenizer.json").is_file():
        print(f"{target} is not there: `make demo` makes it")
        return []
    with tempfile.TemporaryDirectory() as scratch:
        sizes = {"rows": 6_000, "million": 20_000} if toy else {"rows": 30_000, "million": 1_000_000}
        return prepare.run(str(target), Path(scratch), processes=2, repeats=1 if toy else 3, **sizes)


def bench_answers(device: torch.device, toy: bool) -> list[dict]:
    if toy:
        return answers.run(step.TOY, 4, device, count=24, mean=16, batch=4)
    if device.type == "cpu":
        return answers.run(answers.SMOLLM2, 30, device, count=48, mean=48, batch=16)
    return answers.run(step.Shape(), 36, device, count=256, mean=256, batch=32)


BENCHMARKS = {
    "answers": bench_answers,
    "prepare": bench_prepare,
    "step": bench_step,
    "target": bench_target,
    "colocated": bench_colocated,
    "attention": bench_attention,
    "masks": bench_masks,
    "loss": bench_loss,
    "graphs": bench_graphs,
    "peers": partial(bench_peers, None),
    "packing": bench_packing,
    "loader": bench_loader,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], help="which; all by default")
    parser.add_argument("--toy", action="store_true", help="toy sizes, for a CPU")
    parser.add_argument("--out", type=Path, help="benchmarks/results; runs/benchmarks for toy sizes")
    parser.add_argument("--peers", type=Path, help="folder with specforge/ and speculators/, see benchmarks/peers.py")
    options = parser.parse_args()
    out = options.out or (Path("runs/benchmarks") if options.toy else Path(__file__).parent / "results")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    benchmarks = BENCHMARKS | {"peers": partial(bench_peers, options.peers)}
    for name in options.names or benchmarks:
        label = f"{name}-toy" if options.toy else name
        print(f"== {label} on {measure.device_name(device)}", flush=True)
        measure.write(label, device, benchmarks[name](device, options.toy), out)


main()
