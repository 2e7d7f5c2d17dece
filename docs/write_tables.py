"""Writes the tables of docs/api/params.md and docs/api/job_files.md from the classes.

Run it by ``make tables``; a test says when they are out of date. A table stands between comments::

    <!-- table: params TorchModel -->
    <!-- end of table -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from pyspark.ml.param import Params
from torch import nn

import sparkdl
from sparkdl.cli.job_files.key_reference import Key, sections_of
from sparkdl.data.plan import Column
from sparkdl.spark.params import param_table

PAGES = [Path(__file__).parent / "api" / name for name in ("params.md", "job_files.md")]
_TABLE = re.compile(r"(<!-- table: (\S+) (.*?) -->\n).*?(<!-- end of table -->\n)", re.DOTALL)
_ROLE = re.compile(r"(?<!`)``([^`]+)``(?!`)")


def written(text: str) -> str:
    """A page's text with its tables made anew."""
    kinds: dict[str, Callable[[str], Iterable[str]]] = {"params": params, "job-file": job_file}

    def replacement(match: re.Match[str]) -> str:
        lines = [line.rstrip() for line in kinds[match[2]](match[3])]
        return match[1] + "\n".join(lines) + "\n" + match[4]

    return _TABLE.sub(replacement, text)


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


def params(names: str) -> list[str]:
    """The Params of some classes, in the order of their table, which is that of tasks."""
    instances = [_instance(name) for name in names.split()]
    there = {param.name for each in instances for param in each.params}
    tables = vars(param_table).values()
    rows = [param_table.options(each) for each in tables if str(each).endswith("Arguments'>")]
    order = dict.fromkeys(name for options in rows for name in options)
    assert there <= order.keys()
    return table(
        ("Param", "default", "meaning"),
        [
            (f"`{name}`", _default(instances, name), _meaning(instances, name))
            for name in order
            if name in there
        ],
    )


def _instance(name: str) -> Params:
    """An instance with its defaults; models are given a module that does nothing."""
    cls: Any = getattr(sparkdl, name)
    if not name.endswith("Model"):
        return cls()
    column = Column(name="features", role="feature", shape=(1,), dtype="float32")
    return cls(nn.Identity(), [column], num_classes=2)


def _default(instances: list[Params], name: str) -> str:
    """The default; where classes differ, those of each."""
    values: dict[str, list[str]] = {}
    for each in instances:
        if each.hasParam(name):
            values.setdefault(_shown(each, name), []).append(f"`{type(each).__name__}`")
    if len(values) == 1:
        return next(iter(values))
    return "; ".join(f"{value} in {', '.join(owners)}" for value, owners in values.items())


def _shown(each: Params, name: str) -> str:
    if not each.hasDefault(name):
        return "not set"
    value = each._defaultParamMap[each.getParam(name)]
    if isinstance(value, sparkdl.SyncStrategy):
        return f"`{type(value).__name__}()`"
    return f"`{value!r}`"


def _meaning(instances: list[Params], name: str) -> str:
    having = [each for each in instances if each.hasParam(name)]
    docs = dict.fromkeys(as_markdown(each.getParam(name).doc) for each in having)
    owners = ", ".join(f"`{type(each).__name__}`" for each in having)
    only = f" Only in {owners}." if len(having) < len(instances) else ""
    return " / ".join(docs) + only


def job_file(where: str) -> Iterator[str]:
    """A heading-like line and a table for each section of a file, given as ``module:Class``."""
    module, _, name = where.partition(":")
    for section in sections_of(getattr(import_module(module), name)):
        need = ", required" if section.is_required else ""
        yield from ("", f"**`[{section.name}]`**{need}. {as_markdown(section.doc)}", "")
        if section.keys:
            yield from table(("key", "value", "default", "meaning"), map(_row, section.keys))


def _row(key: Key) -> tuple[str, ...]:
    default = "required" if key.is_required else f"`{key.default}`" * bool(key.default)
    return f"`{key.name}`", key.value.replace("'", "`"), default, as_markdown(key.doc)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
