"""Frozen targets, by backend."""

from draftsmith.targets.base import Target
from draftsmith.targets.hf import HFTarget, load_target

TARGETS = {"hf": load_target}

__all__ = ["TARGETS", "HFTarget", "Target", "load_target"]
