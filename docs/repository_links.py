"""How do links to files outside of docs/ work both on a Git host and on the site?

Pages link to such files as a Git host wants it, ``../benchmarks/README.md``. On the site those
that are pages there, by inclusion, are linked as such; the text of a page that includes another
file has its links bent in the same way.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PAGES = {
    "benchmarks/README.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security_policy.md",
}
"""File of the repository -> page of the site."""

_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def bent(text: str, folder: str) -> str:
    """``text`` with its links to pages of the site that a Git host has elsewhere made to fit.

    Args:
        text: MyST.
        folder: where its links start from, relative to the repository's root.
    """
    is_page = folder == "docs" or folder.startswith("docs/")

    def replacement(match: re.Match[str]) -> str:
        start, target, anchor, end = match.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        is_page_of_docs = path.startswith("docs/") and not is_page
        page = path.removeprefix("docs/") if is_page_of_docs else PAGES.get(path)
        if page is None or "://" in target:
            return match.group(0)
        # From a page's own folder, as deep below docs/ as it is; what is included lies in docs/.
        up = posixpath.relpath("docs", folder) if is_page else "."
        return f"{start}{posixpath.normpath(posixpath.join(up, page))}{anchor or ''}{end}"

    return _LINK.sub(replacement, text)


def _on_read(app: Sphinx, name: str, content: list[str]) -> None:
    content[0] = bent(content[0], posixpath.dirname(f"docs/{name}"))


def _on_include(app: Sphinx, path: Path, name: str, content: list[str]) -> None:
    folder = Path(app.srcdir)  # where a relative path starts from
    included = (folder / path).resolve().relative_to(folder.resolve().parent)
    content[0] = bent(content[0], included.parent.as_posix())


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("source-read", _on_read)
    app.connect("include-read", _on_include)
    return {"parallel_read_safe": True}
