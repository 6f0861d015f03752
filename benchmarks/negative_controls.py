"""What `draftsmith verify` says about exports that are wrong in one way each.

    python -m benchmarks.negative_controls      writes benchmarks/results/negative-controls.json

A tiny drafter learns its target's answers by heart and is exported. Each control then spoils a copy as a faulty
exporter would: the checksums in draftsmith.json are made to fit, so that only the drafter's behaviour can tell. One
control trains with labels shifted by one, one uses another target.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file

from draftsmith.checks import choose_device
from draftsmith.commands import VerifyCommand
from draftsmith.config import TargetOptions
from draftsmith.data import loader
from draftsmith.export.folder import measure
from draftsmith.findings import Findings
from draftsmith.targets import load_target
from draftsmith.verify import verify_folder
from tests.overfit import make_export, make_target

RESULT = Path(__file__).parent / "results" / "negative-controls.json"


def reseal(folder: Path) -> None:
    """Make the recorded checksums fit the files again."""
    path = folder / "draftsmith.json"
    record = json.loads(path.read_text())
    record["files"] = {name: measure(folder / name) for name in record["files"]}
    path.write_text(json.dumps(record))


def edit_config(folder: Path, change: Callable[[dict], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def shift_taps(config: dict) -> None:
    nested = config["dflash_config"]
    nested["target_layer_ids"] = [number + 1 for number in nested["target_layer_ids"]]


def reverse_taps(config: dict) -> None:
    config["dflash_config"]["target_layer_ids"].reverse()


def lose_rope(config: dict) -> None:
    for key in ("rope_theta", "rope_parameters", "rope_scaling"):
        del config[key]


def default_rope(config: dict) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 10000.0


def enlarge_block(config: dict) -> None:
    config["block_size"] = config["dflash_config"]["block_size"] = 16


def reset_norms(tensors: dict) -> None:
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones_like(tensor)


def swap(tensors: dict) -> None:
    key, value = "layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight"
    tensors[key], tensors[value] = tensors[value], tensors[key]


def rename(tensors: dict) -> None:
    tensors["layers.0.self_attn.query.weight"] = tensors.pop("layers.0.self_attn.q_proj.weight")


def halve(tensors: dict) -> None:
    tensors |= {name: tensor.half() for name, tensor in tensors.items()}


CONTROLS: dict[str, tuple[Callable, Callable]] = {
    "tap ids shifted by one": (edit_config, shift_taps),
    "tap ids in another order": (edit_config, reverse_taps),
    "rope_theta lost": (edit_config, lose_rope),
    "rope_theta defaulted to 10000": (edit_config, default_rope),
    "is_causal flipped": (edit_config, lambda config: config.update(is_causal=not config["is_causal"])),
    "norm weights reset": (edit_tensors, reset_norms),
    "block size larger than trained": (edit_config, enlarge_block),
    "two tensors swapped": (edit_tensors, swap),
    "a tensor renamed": (edit_tensors, rename),
    "fp16 weights": (edit_tensors, halve),
}


@contextmanager
def labels_shifted():
    """Training whose slot k is taught the token after its own position."""
    honest = loader.build_blocks

    def shifted(*arguments, **named):
        blocks = honest(*arguments, **named)
        weight = torch.cat([blocks.weight[:, 1:], blocks.weight[:, -1:] * 0], dim=1)
        weight[:, 0] = 0
        label = torch.cat([blocks.label[:, 1:], blocks.label[:, -1:]], dim=1)
        slots = torch.arange(weight.numel())
        rows = slots[slots % weight.shape[1] != 0]
        taught = weight.flatten()[rows] > 0
        rows = torch.cat([rows[taught], rows[~taught]])
        return replace(blocks, label=label, weight=weight, rows=rows, num_rows=int(taught.sum()))

    loader.build_blocks = shifted
    try:
        yield
    finally:
        loader.build_blocks = honest


def spoil(name: str, folder: Path, to: Path) -> Path:
    """A copy of the export with one fault."""
    shutil.copytree(folder, to)
    where, change = CONTROLS[name]
    where(to, change)
    reseal(to)
    return to


def judge(
    folder: Path,
    target: Path,
    engine: tuple = ("reference",),
    url: str = "",
    device: Literal["cpu", "cuda"] = "cpu",
    dtype: Literal["auto", "bfloat16"] = "auto",
) -> Findings:
    """`verify` without the words."""
    options = TargetOptions(path=str(target), dtype=dtype)
    command = VerifyCommand(folder=str(folder), target=options, engine=engine, url=url, device=device)

    def load(layer_ids: tuple[int, ...]):
        return load_target(replace(command.target, layer_ids=layer_ids), choose_device(device))

    return verify_folder(command, load, lambda line: None)


def describe(control: str, found: Findings) -> dict:
    warned = [row.check for row in found.rows if row.passed is None]
    by = [*dict.fromkeys(found.failed), *[f"{check} (warning)" for check in dict.fromkeys(warned)]]
    said = {row.check: row.said for row in found.rows if not row.passed}
    return {"control": control, "caught": bool(by), "by": ", ".join(by), "reported": said}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        target, other = make_target(work / "target"), make_target(work / "other", seed=1)
        (work / "honest").mkdir()
        folder = make_export(work / "honest", target)
        rows = [describe("none (the export as it is)", judge(folder, target))]
        for number, control in enumerate(CONTROLS):
            rows.append(describe(control, judge(spoil(control, folder, work / str(number)), target)))
        rows.append(describe("drafter of another target", judge(folder, other)))
        (work / "shifted").mkdir()
        with labels_shifted():
            shifted = make_export(work / "shifted", target)
        rows.append(describe("labels shifted in training", judge(shifted, target)))
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    for row in rows:
        print(f"{row['control']:<34} {'caught' if row['caught'] else '-':<8} {row['by']}")


if __name__ == "__main__":
    main()
