"""Exports, by `--to`: a drafter and its target to config.json and tensors."""

from draftsmith.export.speculators import speculators
from draftsmith.export.zlab import zlab

EXPORTS = {"zlab": zlab, "speculators": speculators}
