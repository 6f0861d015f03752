"""Whole runs of `draftsmith train` on one and two GPUs: the real command, a random target, documents of varied length.

A run is ended once it has written enough lines of metrics, so nothing is spent on checkpoints. Stages alone are
`step` and `target`, measured on the two GPUs at the same time; the link is measured by `link`.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.step import Shape
from draftsmith.config import (
    CheckpointOptions,
    DataOptions,
    DFlashOptions,
    LogOptions,
    LossOptions,
    OptimOptions,
    PackOptions,
    PipelineOptions,
    Recipe,
    TargetOptions,
    to_toml,
)
from draftsmith.data.prepare import prepare, tokenizer_fingerprint
from draftsmith.targets.hf import load_tokenizer
from tests.tiny import NUM_TOKENS, tiny_tokenizer


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One run."""

    name: str
    layout: str
    processes: int
    packs_per_step: int
    pipeline: dict
    gpus: str
    """CUDA_VISIBLE_DEVICES."""


LAYOUTS = (
    Layout(name="1", layout="colocated", processes=1, packs_per_step=1, pipeline={}, gpus="0"),
    Layout(name="1, two packs a step", layout="colocated", processes=1, packs_per_step=2, pipeline={}, gpus="1"),
    Layout(name="2 colocated", layout="colocated", processes=2, packs_per_step=2, pipeline={}, gpus="0,1"),
    Layout(
        name="1+1", layout="split", processes=2, packs_per_step=1, pipeline={"targets": 1, "drafters": 1}, gpus="0,1"
    ),
    Layout(
        name="2 colocated, canonical",
        layout="colocated",
        processes=2,
        packs_per_step=2,
        pipeline={"canonical": True},
        gpus="0,1",
    ),
)


def make_world(folder: Path, shape: Shape, num_layers: int, device: torch.device) -> Recipe:
    """A random target, rows of random tokens, and the recipe that trains on them."""
    config = Qwen3Config(
        **shape.sizes,
        num_hidden_layers=num_layers,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        max_position_embeddings=40_960,
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        Qwen3ForCausalLM(config).to(dtype).save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    rng, mean = np.random.default_rng(0), shape.document
    with open(folder / "rows.jsonl", "w") as rows:
        for length in np.clip(rng.lognormal(np.log(mean) - 0.125, 0.5, 600), 16, shape.tokens // 4).astype(int):
            mask = [0] * (length // 5) + [1] * (length - length // 5)
            rows.write(
                json.dumps({"input_ids": rng.integers(3, NUM_TOKENS, length).tolist(), "loss_mask": mask}) + "\n"
            )
    target = TargetOptions(path=str(folder / "target"))
    data = DataOptions(
        conversations=str(folder / "rows.jsonl"),
        prepared=str(folder / "prepared"),
        form="tokens",
        max_length=shape.tokens,
        workers=2,
    )
    tokenizer = load_tokenizer(target)
    prepare(tokenizer, tokenizer_fingerprint(tokenizer), data, lambda line: None)
    return Recipe(
        at_end="nothing",
        target=target,
        data=data,
        pack=PackOptions(
            tokens=shape.tokens,
            anchors=shape.anchors,
            anchors_per_document=shape.anchors,
            anchor_density=shape.anchors / shape.tokens / 0.8,
        ),
        drafter=DFlashOptions(num_layers=shape.layers, block_size=shape.block),
        loss=LossOptions(chunk=shape.chunk),
        optim=OptimOptions(steps=100_000),
        checkpoint=CheckpointOptions(every=100_000),
        log=LogOptions(every=1),
    )


def start(recipe: Recipe, layout: Layout, folder: Path) -> tuple[subprocess.Popen, Path]:
    run = folder / f"run-{layout.name.replace(' ', '-').replace(',', '')}"
    pipeline = PipelineOptions(processes=layout.processes, **layout.pipeline)
    recipe = replace(recipe, run=str(run), layout=layout.layout, pipeline=pipeline)
    recipe = replace(recipe, optim=replace(recipe.optim, packs_per_step=layout.packs_per_step))
    file = run.with_suffix(".toml")
    file.write_text(to_toml(recipe))
    log = open(run.with_suffix(".log"), "w")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": layout.gpus, "NCCL_NVLS_ENABLE": "0"}
    words = [sys.executable, "-m", "draftsmith", "train", str(file)]
    return subprocess.Popen(words, stdout=log, stderr=log, env=environment, start_new_session=True), run


def follow(process: subprocess.Popen, run: Path, lines: int, seconds: float) -> list[dict]:
    """The first lines of metrics of a run, which is killed then; fewer if the time is up or it ends."""
    until, file = time.monotonic() + seconds, run / "metrics.jsonl"
    found: list[dict] = []
    while time.monotonic() < until and len(found) < lines:
        time.sleep(0.5)
        if file.exists():
            whole = file.read_text().rpartition("\n")[0]
            found = [json.loads(line) for line in whole.splitlines() if line]
        if process.poll() is not None:
            break
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.5)
        subprocess.run(["pkill", "-9", "-f", "draftsmith-launch-"], check=False)  # ranks, whose launcher is gone
        time.sleep(2)
    if len(found) < lines:
        print(run.with_suffix(".log").read_text()[-3000:], flush=True)
    return found


def row(layout: Layout, lines: list[dict], skip: int, shape: Shape) -> dict:
    """What a run's lines say, the first ones left out."""
    kept = lines[skip:]
    rates = [line["tokens_per_second"] for line in kept]
    if not rates:
        return {"layout": layout.name, "failed": f"{len(lines)} lines of metrics"}
    waits = {
        name: statistics.median(line[f"{name}_wait"] for line in kept)
        for name in ("target", "drafter", "load")
        if f"{name}_wait" in kept[0]
    }
    return {
        "layout": layout.name,
        "processes": layout.processes,
        "packs_per_step": layout.packs_per_step,
        "tokens": shape.tokens,
        "anchors": shape.anchors,
        "block": shape.block,
        "steps": len(kept),
        "padding": statistics.mean(line["padding"] for line in kept),
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_spread": max(rates) - min(rates),
        "wait_share": waits,
        "loss": [line["loss"] for line in lines],
    }


def link(out: Path) -> None:
    """One of two ranks (torchrun's environment): bandwidth of the wire, and captures whose weights two ranks share."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from benchmarks import target as capture

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    found: dict = {}
    sizes = {"wire": 49_152 * 5 * 4096 * 2, "gradients": 4 * 2**30}
    for name, size in sizes.items():
        buffer, times = torch.zeros(size // 4, device=device), []
        for _ in range(5):
            torch.cuda.synchronize()
            dist.barrier()
            begin = time.perf_counter()
            if name == "gradients":
                dist.all_reduce(buffer)
            elif rank == 0:
                dist.send(buffer, 1)
            else:
                dist.recv(buffer, 0)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        seconds = statistics.median(times[1:])
        found[name] = {"bytes": size, "seconds_median": seconds, "gb_per_s": size / seconds / 1e9}
        del buffer
    shape = replace(Shape(), tokens=49_152)
    model = capture.build(shape, device, 36, (1, 9, 17, 25, 33))
    model.compile_layers()
    for name in ("whole", "shared by two (FSDP2)"):
        if name != "whole":
            mesh = init_device_mesh("cuda", (2,))
            for layer in model.model.model.layers:
                fully_shard(layer, mesh=mesh)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        times = capture_times(model, shape, device)
        found[name] = {
            "seconds_median": statistics.median(times),
            "tokens_per_s": shape.tokens / statistics.median(times),
            "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        }
        if rank == 0:
            print(name, found[name], flush=True)
            (out / "link.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def capture_times(model, shape: Shape, device: torch.device) -> list[float]:
    from types import SimpleNamespace

    index = torch.arange(shape.tokens, device=device)
    begin = index // shape.document * shape.document
    tokens = torch.randint(shape.vocabulary, (shape.tokens,), device=device)
    pack = SimpleNamespace(tokens=tokens, position=index - begin, doc_start=begin)
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.capture(pack)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times[2:]


def main(folder: Path, out: Path, toy: bool) -> None:
    """All runs, in the order of their worth; what is done is on disk after each."""
    from benchmarks.step import TOY

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = replace(TOY, tokens=512, anchors=64) if toy else replace(Shape(), tokens=49_152, anchors=6_144)
    began = time.monotonic()
    recipe = make_world(folder, shape, 6 if toy else 36, device)
    print(f"world made in {time.monotonic() - began:.0f} s", flush=True)
    torch.cuda.empty_cache() if device.type == "cuda" else None
    rows: list[dict] = []

    def measure(layouts: tuple[Layout, ...], lines: int, seconds: float) -> None:
        started = [(layout, *start(recipe, layout, folder)) for layout in layouts]
        for layout, process, run in started:
            rows.append(row(layout, follow(process, run, lines, seconds), 4, shape))
            print(f"{time.monotonic() - began:.0f} s", json.dumps(rows[-1]), flush=True)
            (out / "rows.json").write_text(json.dumps(rows))
            (out / f"{run.name}.log").write_text(run.with_suffix(".log").read_text()[-20_000:])

    measure(LAYOUTS[:2], 10, 200)
    measure(LAYOUTS[3:4], 16, 110)
    measure(LAYOUTS[2:3], 14, 110)
    measure(LAYOUTS[4:5], 10, 90)


if __name__ == "__main__":
    where, results = Path(sys.argv[1]), Path(sys.argv[2])
    if "link" in sys.argv[3:]:
        link(results)
    else:
        where.mkdir(parents=True, exist_ok=True)
        main(where, results, "toy" in sys.argv[3:])
