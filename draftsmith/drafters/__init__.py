"""Drafter variants, by `drafter.kind`."""

from draftsmith.drafters.dflash import DFlashDrafter, build_config

DRAFTERS = {"dflash": (DFlashDrafter, build_config)}
