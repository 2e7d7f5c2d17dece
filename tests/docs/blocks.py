"""The code blocks of README and the pages, and which of them say that they are not run.

A block that cannot run here has a comment in front, which readers do not see::

    <!-- not run: needs YARN -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
REASONS = (
    "needs a GPU",
    "needs Docker",
    "needs Kubernetes",
    "needs YARN",
    "needs a cluster",
    "needs a Connect server",
    "installs packages",
    "serves until it is stopped",
    "the other launcher's",
)
PROGRAMS = (
    "cd", "docker", "export", "kubectl", "make", "pip", "python", "source", "spark-class",
    "spark-submit", "sparkdl",
)  # fmt: skip
"""With what a block begins that holds commands, where it does not say so."""
_EXCUSE = re.compile(r"<!--\s*not run:\s*(.*?)\s*-->\s*$")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block."""

    page: str
    """Path from the repository's root."""
    line: int
    """Of the first line inside, from 1."""
    language: str
    """What the page says; else ``bash`` if it begins with a program that we know, or ``text``."""
    text: str
    excuse: str | None
    """Why it is not run; None: it is."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """README and all pages that somebody writes, as paths from the root."""
    found = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    made = {"_build", "api"}
    return [str(path.relative_to(ROOT)) for path in found if made.isdisjoint(path.parts)]


def blocks(language: str | None = None) -> list[Block]:
    """The blocks of all pages, or those in one language; directives of the site are none."""
    every = [block for page in pages() for block in blocks_of(page)]
    return [block for block in every if language in (None, block.language)]


def blocks_of(page: str) -> Iterator[Block]:
    """The blocks of one page, from top to bottom."""
    yield from parsed(page, (ROOT / page).read_text(encoding="utf-8"))


def parsed(page: str, text: str) -> Iterator[Block]:
    """The blocks of a page's text."""
    excuse = None
    for token in MarkdownIt("commonmark").parse(text):
        if token.type == "html_block":
            match = _EXCUSE.search(token.content)
            excuse = match[1] if match else None
        elif token.type == "fence" and not token.info.startswith("{"):
            assert token.map is not None
            language = token.info.strip() or _guessed(token.content)
            line = token.map[0] + 2
            yield Block(page=page, line=line, language=language, text=token.content, excuse=excuse)
            excuse = None
        elif not token.type.startswith(("list_item", "bullet_list", "ordered_list")):
            excuse = None


def _guessed(text: str) -> str:
    first = (text.split() or [""])[0]
    return "bash" if first in PROGRAMS or re.match(r"[A-Z_]+=", first) else "text"
