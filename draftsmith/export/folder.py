"""An export's folder: written whole or not at all, over nothing but an earlier export.

config.json         what engines read
model.safetensors   bf16 weights
README.md           the model card
draftsmith.json     where it comes from, what was measured, SHA-256 of the files above
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from draftsmith.errors import EnvironmentFault, UserError

FORMAT = "draftsmith-export"
RECORD = "draftsmith.json"
FILES = ("config.json", "model.safetensors", "README.md")


def check_free(folder: Path) -> None:
    """Raise UserError unless `folder` does not exist, is empty, or holds an earlier export and nothing else."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UserError(f"output {folder} is no folder of its own; choose another --output")
    if not folder.exists() or not any(folder.iterdir()):
        return
    foreign = sorted(p.name for p in folder.iterdir() if p.name not in (*FILES, RECORD))
    if foreign or read_record(folder) is None:
        reason = f"it holds {foreign[0]}" if foreign else f"it holds no {RECORD} of an export"
        raise UserError(f"output {folder} exists and is no earlier export ({reason}); choose another --output")


def write_folder(folder: Path, config: dict, tensors: dict[str, Tensor], card: str, record: dict) -> None:
    """Write the four files beside `folder`, flush them, and rename. Raises EnvironmentFault when the disk fails."""
    check_free(folder)
    temporary = folder.with_name(f".tmp-{folder.name}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            temporary / "model.safetensors",
            metadata={"format": "pt"},
        )
        os.chmod(temporary / "model.safetensors", (temporary / "config.json").stat().st_mode)
        (temporary / "README.md").write_text(card)
        files = {name: measure(temporary / name) for name in FILES}
        (temporary / RECORD).write_text(json.dumps({"format": FORMAT, **record, "files": files}, indent=1) + "\n")
        for path in temporary.iterdir():
            _flush(path)
        _replace(temporary, folder)
    except OSError as error:
        raise EnvironmentFault(f"the export {folder} could not be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already after the rename


def read_record(folder: Path) -> dict | None:
    """The export's draftsmith.json; None if there is none. Raises UserError if it is damaged."""
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); export again") from error
    if reason := _fault(record):
        raise UserError(f"{path} is damaged ({reason}); export again, or remove it to do without what was recorded")
    return record


def _fault(record: object) -> str | None:
    """What is wrong with the shape of a record. It may come from anybody, so nothing in it is taken for granted."""
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        return "no record of an export"
    kinds = {"files": dict, "trained": dict, "fingerprints": dict, "measured": dict, "layout": str}
    for key, kind in kinds.items():
        if not isinstance(record.get(key), kind):
            return f"{key} is missing or of the wrong type"
    if not isinstance(record.get("chat_template", {}), dict):  # older exports have none
        return "chat_template is of the wrong type"
    if set(record["files"]) != set(FILES):
        return "files are not those of an export"
    measured, block = record["measured"], record["trained"].get("block_size")
    numbers = (block, measured.get("max_new_tokens"), measured.get("accept_length_pooled"))
    if measured.get("dtype") not in ("float32", "bfloat16") or not all(isinstance(n, int | float) for n in numbers):
        return "trained or measured lacks a figure"
    answers, proposals = measured.get("answers"), measured.get("proposals")
    if not isinstance(answers, list) or not answers or not isinstance(proposals, list):
        return "measured holds no answers"
    if not all(isinstance(a, dict) and _are_ids(a.get("prompt")) and _are_ids(a.get("tokens")) for a in answers):
        return "an answer is not made of token ids"
    if not all(a.get("cycles") == [] or _are_ids(a.get("cycles")) for a in answers):
        return "an answer has no cycles"
    for note in proposals:
        if not isinstance(note, dict) or type(note.get("committed")) is not int:
            return "a proposal belongs to no text"
        if type(note.get("answer")) is not int or not 0 <= note["answer"] < len(answers):
            return "a proposal belongs to no answer"
        widths = [_widths(note.get("tokens")), _widths(note.get("logits"))]
        if widths[0] != widths[1] or len(widths[0]) != block - 1 or len(set(widths[0])) != 1:
            return "a proposal is not a table of tokens and logits"
    return None


def _widths(table: object) -> list[int]:
    """Numbers in each row of a table; empty for anything else."""
    rows = table if isinstance(table, list) else []
    sound = all(isinstance(row, list) and all(isinstance(v, int | float) for v in row) for row in rows)
    return [len(row) for row in rows] if sound else []


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int and i >= 0 for i in value)


def measure(path: Path) -> dict:
    """Size and SHA-256 of a file."""
    with open(path, "rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _replace(temporary: Path, folder: Path) -> None:
    """Two renames when an earlier export is in the way: at every moment one of the two is whole."""
    old = folder.with_name(f".old-{folder.name}-{secrets.token_hex(4)}")
    if folder.exists():
        os.rename(folder, old)
    os.rename(temporary, folder)
    shutil.rmtree(old, ignore_errors=True)
    _flush(folder.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
