"""Where features come from: `layout -> function(pack) -> Features`."""

from draftsmith.features.disk import DiskFeatures

__all__ = ["DiskFeatures"]
