"""What cannot work, found before anything is loaded: options against each other, and against the machine."""

from __future__ import annotations

import os

import torch

from draftsmith.config import Recipe
from draftsmith.errors import UserError
from draftsmith.ranges import check_options
from draftsmith.shapes import TILE, anchor_unit


def check_recipe(recipe: Recipe) -> None:
    """Combinations that cannot work, or options that would have no effect. Raises UserError."""
    check_options(recipe)
    optim, pack = recipe.optim, recipe.pack
    if not recipe.data.prepared and not recipe.data.mix:
        raise UserError("data.prepared is not given, nor data.mix; make a prepared folder with `draftsmith prepare`")
    if (optim.noise == "none") != (optim.noise_scale == 0):
        raise UserError(
            f"optim.noise is {optim.noise!r} and optim.noise_scale is {optim.noise_scale}; give both or neither"
        )
    if recipe.drafter.block_size > pack.tokens:
        raise UserError(
            f"drafter.block_size {recipe.drafter.block_size} is larger than pack.tokens {pack.tokens}; "
            "lower the former or raise the latter"
        )
    if recipe.checkpoint.keep < 2:
        raise UserError(f"checkpoint.keep is {recipe.checkpoint.keep}; at least 2 are kept, so that one can be damaged")
    if recipe.evaluation.at_start and not recipe.evaluation.prompts:
        raise UserError("evaluation.at_start has no effect without evaluation.prompts; give prompts or turn it off")


def check_tiles(recipe: Recipe) -> None:
    """A GPU's attention works on whole tiles. Raises UserError naming the nearest budgets that fit."""
    budgets = {"pack.tokens": (recipe.pack.tokens, TILE)}
    slots = recipe.pack.anchors * recipe.drafter.block_size
    budgets["pack.anchors"] = (recipe.pack.anchors, anchor_unit(recipe.drafter.block_size))
    for name, (value, unit) in budgets.items():
        if value % unit:
            raise UserError(
                f"{name} is {value}; on a GPU it must be a multiple of {unit} (attention works on tiles of {TILE}, and "
                f"the blocks are {slots} slots); use {value // unit * unit or unit} or {(value // unit + 1) * unit}"
            )


def choose_device(wanted: str) -> torch.device:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UserError("device is 'cuda' but torch finds no CUDA device; use 'cpu' or 'auto'")
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise UserError(f"process {local} of this host has no GPU: there are {count}; start no more than {count}")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
