"""How is the site made of these pages? By Sphinx with MyST; ``make docs`` builds it."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "extensions")]

import sparkdl  # noqa: E402

project = "sparkdl"
copyright = "the authors of sparkdl, Apache License 2.0"
version = release = sparkdl.__version__
html_title = f"sparkdl {version}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "repository_links",
    "public_names",
    "param_tables",
    "job_file_tables",
]
exclude_patterns = ["_build", "extensions", "static"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
# A block without a language is no Python.
highlight_language = "text"
default_role = "code"

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Params", "params_style")]

# Names of other packages are not looked up: the build needs no network.
nitpick_ignore_regex = [("py:.*", r"(?!sparkdl\b).*")]

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
