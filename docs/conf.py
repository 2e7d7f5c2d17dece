"""How is the site made of these pages? By Sphinx with MyST; ``make docs`` builds it."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import sparkdl  # noqa: E402

project = "sparkdl"
copyright = "the authors of sparkdl, Apache License 2.0"
version = release = sparkdl.__version__
html_title = f"sparkdl {version}"

extensions = ["myst_parser", "repository_links"]
exclude_patterns = ["_build", "reference", "static"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
# A block without a language is no Python.
highlight_language = "text"
default_role = "code"

# The pages of api/ are made by reference/conf.py, with anchors in HTML, which MyST does not see.
# The tests look at all links.
suppress_warnings = ["myst.header", "myst.xref_missing"]

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
