"""Where features come from when it is not the target beside the drafter."""

from draftsmith.features.disk import DiskFeatures

__all__ = ["DiskFeatures"]
