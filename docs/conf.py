"""Sphinx configuration: plain Markdown through MyST."""

from draftsmith import __version__

project = "draftsmith"
author = "the draftsmith developers"
copyright = "2026, the draftsmith developers"  # noqa: A001
version = release = __version__
extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "pydata_sphinx_theme"
html_theme_options = {"show_nav_level": 2, "navigation_with_keys": False}
