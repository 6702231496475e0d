"""Sphinx settings: Markdown by MyST, the furo theme, every dead link an error."""

from __future__ import annotations

from importlib.metadata import version as installed_version

project = "Better Compute"
author = "The Better Compute authors"
project_copyright = author
release = version = installed_version("bettercompute")

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "changelog.d"]
nitpicky = True

html_theme = "furo"
html_title = "Better Compute"
