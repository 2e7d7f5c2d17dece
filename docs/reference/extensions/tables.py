"""How does a directive make a table of texts that are MyST? As lines that MyST parses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_ROLE = re.compile(r"(?<!`)``([^`]+)``(?!`)")


def as_markdown(doc: str) -> str:
    """A docstring in one line of Markdown: reStructuredText's literals have two backticks."""
    return " ".join(_ROLE.sub(r"`\1`", doc).split())


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; pipes in cells are escaped."""
    lines = [_line(header), _line(["---"] * len(header))]
    lines += [_line([cell.replace("|", "\\|") for cell in row]) for row in rows]
    return ["", *lines, ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
