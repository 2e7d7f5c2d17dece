"""How do signatures and tables look in plain Markdown?

A signature is a heading by its name, and a block. Cells of tables are not padded, so that a change
of one row changes no other.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx import addnodes
from sphinx_markdown_builder.translator import MarkdownTranslator

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_WIDTH = 100
_PATH = re.compile(r"~(?:\w+\.)*(\w+)")
"""As Sphinx writes the name of a class of which the last part shall be shown."""
_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)


def as_python(signature: addnodes.desc_signature) -> str:
    """The text of a signature; parameters that do not fit into a line have one each.

    The text alone is looked at: Sphinx divides at every comma where a default is no Python.
    """
    text = " ".join(signature.astext().replace("\xa0", " ").split())
    text = _PATH.sub(r"\1", text)
    start = text.find("(")
    if start < 0 or len(text) <= _WIDTH:
        return text
    parameters, depth, begin = [], 0, start + 1
    for place in range(start, len(text)):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth == 0 or (depth == 1 and text[place] == ","):
            parameters.append(text[begin:place].strip())
            begin = place + 1
        if depth == 0:
            break
    inside = "".join(f"    {parameter},\n" for parameter in parameters if parameter)
    return f"{text[:start]}(\n{inside}){text[begin:]}"


def not_padded(page: str) -> str:
    """A page whose tables have cells as wide as their texts."""
    return _ROW.sub(lambda row: re.sub(r"-{4,}", "---", re.sub(" {2,}", " ", row[0])), page)


class Translator(MarkdownTranslator):
    """Writes pages as `MarkdownTranslator` does, but for signatures and tables."""

    def astext(self) -> str:
        """The page."""
        return not_padded(super().astext())

    def visit_desc_signature(self, node: addnodes.desc_signature) -> None:
        """A heading that other pages can link to, and the signature in a block."""
        for anchor in node.get("ids", []):
            self._add_anchor(anchor)
        is_member = bool(node.get("class"))
        level = "###" if is_member else "##"
        name = str(node["fullname"]).rpartition(".")[2] if is_member else node["fullname"]
        self.add(f"{level} {name}", prefix_eol=1, suffix_eol=2)
        self.add(f"```py\n{as_python(node)}\n```", prefix_eol=1, suffix_eol=2)
        raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.set_translator("markdown", Translator)
    return {"parallel_read_safe": True}
