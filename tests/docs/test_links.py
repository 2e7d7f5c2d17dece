from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.docs.blocks import DOCS, ROOT, pages

MARKDOWN = MarkdownIt("commonmark").enable("table")
EVERY = [
    *pages(), *(f"docs/api/{path.name}" for path in (DOCS / "api").glob("*.md")),
    "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md",
]  # fmt: skip
PYTHON_FILE = re.compile(r"`([\w./-]*\w\.py)`")
FOLDERS = (".ci", "benchmarks", "docs", "jobs", "sparkdl", "tests")
YOURS = {"nets.py"}
"""Files that a page tells its reader to write."""


def links(text: str) -> list[str]:
    """Targets of the links and pictures of a page, but for those to other places."""
    inline = [token for token in MARKDOWN.parse(text) if token.type == "inline"]
    children = [child for token in inline for child in token.children or []]
    found = [child.attrGet("href") or child.attrGet("src") for child in children]
    return [str(link) for link in found if link and not re.match(r"\w+:", str(link))]


def anchors(text: str) -> set[str]:
    """What a Git host, and MyST, call the headings of a page; and those that HTML names."""
    tokens = MARKDOWN.parse(text)
    titles = [
        re.sub(r"[`*]|\]\([^)]*\)|\[", "", following.content)
        for token, following in itertools.pairwise(tokens)
        if token.type == "heading_open"
    ]
    named = set(re.findall(r'^<a id="([^"]+)"></a>$', text, re.MULTILINE))
    return named | {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", EVERY)
def test_links_lead_somewhere_on_a_git_host(page: str) -> None:
    path = ROOT / page
    for link in links(path.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


def test_links_and_anchors_are_found() -> None:
    links_of_a_text = "[x](a.md#b) ![y](c.svg) <https://d.e> [z](https://f.g)"
    text = f"# A `b` c: d, e\n\n{links_of_a_text}\n\n| [q](h) |\n|-|\n"
    assert links(text) == ["a.md#b", "c.svg", "h"]
    assert anchors(text) == {"a-b-c-d-e"}


def files_named(text: str) -> set[str]:
    """The Python files that a page names in backticks, outside of its code blocks."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return set(PYTHON_FILE.findall(prose))


def test_python_files_that_pages_name_exist() -> None:
    files = [f"/{path}" for path in ROOT.glob("*.py")]
    for folder in FOLDERS:
        files += [f"/{path}" for path in (ROOT / folder).rglob("*.py")]
    for page in [*pages(), "CONTRIBUTING.md", "benchmarks/README.md"]:
        named = files_named((ROOT / page).read_text(encoding="utf-8")) - YOURS
        missing = [name for name in named if not any(file.endswith(f"/{name}") for file in files)]
        assert not missing, page


def test_names_of_python_files_are_found() -> None:
    text = "see `a/b.py` and `c.py`, `d.toml`, e.py\n\n```python\n`f.py`\n```\n"
    assert files_named(text) == {"a/b.py", "c.py"}


@pytest.mark.parametrize("path", sorted((DOCS / "drawings").glob("*.svg")), ids=lambda p: p.name)
def test_a_drawing_tells_what_it_shows_and_is_used(path: Path) -> None:
    root = ET.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert (root.findtext(f"{space}title") or "").strip()
    assert (root.findtext(f"{space}desc") or "").strip()
    assert "prefers-color-scheme: dark" in (root.findtext(f"{space}style") or "")
    used = [page for page in pages() if f"drawings/{path.name}" in (ROOT / page).read_text("utf-8")]
    assert used
