"""The keys of a job file with types, defaults and meanings, for terminals and pages."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, get_type_hints

from sparkdl.cli.job_files.job_file import PARAMS, DataSection, EstimatorSection
from sparkdl.cli.job_files.job_objects import in_file_words
from sparkdl.cli.job_files.toml_values import dataclass_in, describe, required

_SELECTED_ELSEWHERE = {"test": "data", "table": "data"}
"""Tables with the keys of ``[data]`` of training, which are listed there."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """A line of the reference."""

    name: str
    value: str
    """Values that it takes, in a job file author's words."""
    default: str
    """As TOML has it; empty: there is none."""
    doc: str
    """Meaning of the key, in reStructuredText."""
    is_required: bool = False


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table of the file."""

    name: str
    doc: str
    is_required: bool
    keys: tuple[Key, ...]


def sections_of(kind: type, above: str = "") -> Iterator[Section]:
    """The tables of a job's class, with those within them."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        found = dataclass_in(hints[item.name])
        if found is None:
            continue
        # What the class says of itself, after the name of its section.
        text = re.sub(
            r"^(``\[[\w.]+\]``(, )?)+[^:]*: ", "", " ".join((found.__doc__ or "").split())
        )
        name, doc = f"{above}{item.name}", text[:1].upper() + text[1:]
        is_repeated = item.name in _SELECTED_ELSEWHERE and found is DataSection
        if is_repeated:
            doc += " The keys are those of ``[data]`` of training."
        yield Section(
            name=name,
            doc=doc,
            is_required=item.name in required(kind),
            keys=() if is_repeated else tuple(_keys(found)),
        )
        if above == "" and found is not EstimatorSection and not is_repeated:
            yield from sections_of(found, f"{name}.")


def as_text(kind: type, width: int) -> Iterator[str]:
    """Lines for a terminal of ``width`` columns."""
    for section in sections_of(kind):
        need = " (required)" if section.is_required else ""
        yield from ("", *textwrap.wrap(_plain(f"[{section.name}]{need} {section.doc}"), width))
        for key in section.keys:
            default = f", default {key.default}" if key.default else ""
            need = ", required" if key.is_required else default
            yield from textwrap.wrap(
                f"{key.name}: {key.value}{need}",
                width,
                initial_indent="  ",
                subsequent_indent=" " * 8,
            )
            indent = " " * 6
            yield from textwrap.wrap(
                _plain(key.doc), width, initial_indent=indent, subsequent_indent=indent
            )


def _plain(doc: str) -> str:
    return re.sub(r"`+", "", doc)


def _keys(kind: type) -> Iterator[Key]:
    hints, docs = get_type_hints(kind), _docs(kind)
    for item in fields(kind):
        yield Key(
            name=item.name,
            value=describe(hints[item.name]),
            default=_default(item, kind),
            doc=in_file_words(item.metadata.get("doc", docs.get(item.name, ""))),
            is_required=item.name in required(kind),
        )


def _default(item: Field[Any], kind: type) -> str:
    if item.name in required(kind):
        return ""
    if kind is EstimatorSection and item.name in PARAMS:
        from sparkdl.spark.params.param_table import NOT_SET
        from sparkdl.spark.params.params import default_of

        value = default_of(PARAMS[item.name])
        return "" if value is NOT_SET else _shown(value)
    value = item.default if item.default is not MISSING else item.default_factory()  # type: ignore[operator]
    return _shown(value)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return str(list(value))
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _docs(kind: type) -> dict[str, str]:
    """Field -> the string below it in the source, of a dataclass and those that it is made of."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for line, below in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(line, ast.AnnAssign) and isinstance(below, ast.Expr):
                assert isinstance(line.target, ast.Name) and isinstance(below.value, ast.Constant)
                docs[line.target.id] = " ".join(str(below.value.value).split())
    return docs
