"""How are the pages of docs/api made? By Sphinx of the docstrings; ``make reference`` does it.

They are plain Markdown, which a Git host shows and the site takes as it takes other pages.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE / "extensions")]

import sparkdl  # noqa: E402

project = "sparkdl"
version = release = sparkdl.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_markdown_builder",
    "plain_signatures",
    "public_names",
    "param_tables",
    "job_file_tables",
]
exclude_patterns = ["extensions"]
suppress_warnings = ["toc.not_included"]
myst_all_links_external = True  # those to other pages stay as they are
default_role = "code"
highlight_language = "python"
smartquotes_action = "D"  # dashes alone

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

markdown_anchor_signatures = True
