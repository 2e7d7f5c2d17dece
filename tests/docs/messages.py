"""The texts that the package's source holds, with placeholders where values are put in."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.docs.blocks import ROOT

HOLE = "\0"


@cache
def texts() -> tuple[str, ...]:
    """Every string of the package, and of what the jobs print."""
    found: set[str] = set()
    for path in sorted((ROOT / "sparkdl").rglob("*.py")):
        found |= texts_of(path)
    return tuple(sorted(found))


def texts_of(path: Path) -> set[str]:
    """The strings of a file; of those with values in them the whole, with `HOLE` for each."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.add("".join(_part(part) for part in node.values))
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
        ):
            found.add(re.sub(r"%[.\w]*[sdrgf]", HOLE, node.value))
    return found


def _part(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else HOLE


def is_said(message: str) -> bool:
    """Whether a text has what ``message`` says, in its order; ``…`` stands for any value."""
    parts = [re.escape(part) for part in message.split("…")]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in texts())
