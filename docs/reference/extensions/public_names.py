"""How does the API reference name things as users do?

Types in signatures are resolved from where a class is defined,
``sparkdl.sync.strategy.SyncStrategy``, to the name that users import, ``sparkdl.SyncStrategy``.
Params and their accessors are left out of the classes: `param_tables` lists them. The directive
``other-names`` documents those public names that no other page of the reference has.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import sparkdl

if TYPE_CHECKING:
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

_ACCESSOR = re.compile(r"(set|get)([A-Z]\w*)$")
_KEPT: dict[str, list[str]] = {}


def _is_left_out(
    app: Sphinx, what: str, name: str, item: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out Params and what `with_accessors` has made."""
    from pyspark.ml.param import Param

    if isinstance(item, Param):
        return True
    accessor = _ACCESSOR.match(name)
    doc = getattr(item, "__doc__", None) or ""
    if accessor and doc.startswith(("Set ", "Return ")) and ": " in doc.partition("\n")[0]:
        return True
    # What only carries out a contract is told where the contract is.
    return True if doc.startswith("See `") else None


def _keep(app: Sphinx, what: str, name: str, item: Any, options: Any, lines: list[str]) -> None:
    """Remember what an attribute says: napoleon takes words before a colon for its type."""
    if what in ("attribute", "data", "property"):
        _KEPT[name] = list(lines)


def _restore(app: Sphinx, what: str, name: str, item: Any, options: Any, lines: list[str]) -> None:
    if name in _KEPT:
        lines[:] = _KEPT.pop(name)


def _resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element
) -> nodes.Element | None:
    """A link to the entry that documents what ``node`` names by another way."""
    target = str(node.get("reftarget", ""))
    if node.get("refdomain") != "py" or not target:
        return None
    objects = env.domains.python_domain.objects
    last = target.rpartition(".")[2]
    for prefix in ("sparkdl", "sparkdl.models"):
        name = f"{prefix}.{last}"
        if name in objects and _is_same(target, name):
            entry = objects[name]
            uri = app.builder.get_relative_uri(node["refdoc"], entry.docname)
            link = nodes.reference("", "", internal=True, refuri=f"{uri}#{entry.node_id}")
            return link + content
    return content if _is_internal(target) else None


def _is_same(target: str, name: str) -> bool:
    """Whether a name in a signature, perhaps without its module, means the public ``name``."""
    if "." not in target or target == name:
        return True
    module, _, last = name.rpartition(".")
    value = getattr(import_module(module), last)
    return target == f"{value.__module__}.{value.__qualname__}"


def _is_internal(target: str) -> bool:
    """Whether this is a name of ours that users have no need to look up."""
    _module, _, last = target.rpartition(".")
    return target.startswith("sparkdl.") and last not in sparkdl.__all__


def other_names(folder: Path) -> list[str]:
    """The public names that no page in ``folder`` documents."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted(folder.glob("*.md")))
    named = set(re.findall(r"^\.\. auto\w+:: sparkdl\.(\w+)$", pages, re.MULTILINE))
    return [name for name in sparkdl.__all__ if name not in named and not name.startswith("_")]


class OtherNames(SphinxDirective):
    """Documents the public names that have no page, from their docstrings."""

    option_spec: ClassVar = {}

    def run(self) -> list[nodes.Node]:
        """An entry for each."""
        names = other_names(Path(str(self.env.doc2path(self.env.docname))).parent)
        if not names:
            return self.parse_text_to_nodes("At present there are none.")
        entries = "\n".join(f".. {_directive(name)}:: sparkdl.{name}\n" for name in names)
        return self.parse_text_to_nodes(f"```{{eval-rst}}\n{entries}\n```")


def _directive(name: str) -> str:
    value = getattr(sparkdl, name)
    if not isinstance(value, type):
        return "autofunction" if callable(value) else "autodata"
    return "autoexception" if issubclass(value, BaseException) else "autoclass"


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.add_directive("other-names", OtherNames)
    app.connect("autodoc-skip-member", _is_left_out)
    app.connect("autodoc-process-docstring", _keep, priority=100)  # napoleon's is 500
    app.connect("autodoc-process-docstring", _restore, priority=900)
    app.connect("missing-reference", _resolve)
    return {"parallel_read_safe": True}
