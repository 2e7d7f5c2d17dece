"""The directive ``job-file`` lists what may stand in a job file, from the dataclasses.

```{job-file} sparkdl.cli.job_files.job_file:TrainJob
```
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_type_hints

from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective
from tables import as_markdown, table

from sparkdl.cli.job_files.job_file import DataSection, EstimatorSection
from sparkdl.cli.job_files.toml_values import describe

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

_SELECTED_ELSEWHERE = {"test": "data", "table": "data"}
"""Tables with the keys of ``[data]`` of training, which are listed there."""


def lines_of(kind: type, above: str = "") -> Iterator[str]:
    """A heading-like line and a table for each section of a file."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        section = _dataclass_in(hints[item.name])
        name = f"{above}{item.name}"
        if section is None:
            continue
        yield from ("", f"**`[{name}]`**{_need(item)}. {_opening(section)}", "")
        if item.name in _SELECTED_ELSEWHERE and section is DataSection:
            yield "The keys are those of `[data]` of training."
            continue
        yield from table(("key", "value", "default", "meaning"), _rows(section))
        if kind is not EstimatorSection and above == "":
            yield from _inner(section, f"{name}.")


def _inner(section: type, above: str) -> Iterator[str]:
    """Tables in a section that are dataclasses of their own, such as ``[labels.table]``."""
    if section is not EstimatorSection:
        yield from lines_of(section, above)


def _dataclass_in(hint: Any) -> type | None:
    """The dataclass that a field holds, if it is one, or may be one."""
    for option in (hint, *get_args(hint)):
        if isinstance(option, type) and is_dataclass(option):
            return option
    return None


def _need(item: Field[Any]) -> str:
    return ", required" if _is_required(item) else ""


def _is_required(item: Field[Any]) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def _opening(kind: type) -> str:
    """What the class says of itself, after the name of its section."""
    text = as_markdown((kind.__doc__ or "").replace("\n\n", " "))
    text = re.sub(r"^(`\[[\w.]+\]`(, )?)+[^:]*: ", "", text)
    return text[:1].upper() + text[1:]


def _rows(kind: type) -> Iterator[tuple[str, ...]]:
    hints = get_type_hints(kind)
    docs = _docs(kind)
    for item in fields(kind):
        yield f"`{item.name}`", _value(hints[item.name]), _default(item), docs[item.name]


def _value(hint: Any) -> str:
    return describe(hint).replace("'", "`")


def _default(item: Field[Any]) -> str:
    if _is_required(item):
        return "required"
    value = item.default if item.default is not MISSING else item.default_factory()  # type: ignore[misc]
    if value is None:
        return ""
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value!r}`"


def _docs(kind: type) -> dict[str, str]:
    """Key -> meaning; a Param's own where the key is one."""
    docs = {item.name: as_markdown(item.metadata.get("doc", "")) for item in fields(kind)}
    for base in reversed(kind.__mro__[:-1]):
        found = ModuleAnalyzer.for_module(base.__module__).find_attr_docs()
        for (owner, name), text in found.items():
            if owner == base.__name__:
                docs[name] = as_markdown(" ".join(text))
    return docs


class JobFileDirective(SphinxDirective):
    """Lists the sections and keys of a job's class, given as ``module:Class``."""

    required_arguments = 1
    option_spec: ClassVar = {}

    def run(self) -> list[nodes.Node]:
        """A table for each section."""
        module, _, name = self.arguments[0].partition(":")
        import_module(module)
        kind = getattr(sys.modules[module], name)
        return self.parse_text_to_nodes("\n".join(lines_of(kind)))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.add_directive("job-file", JobFileDirective)
    return {"parallel_read_safe": True}
