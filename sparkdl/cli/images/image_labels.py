"""The label of each file as a number, from its folder's name or from a table."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sparkdl.errors import DataError

SHOWN = 5
"""Examples in a message."""


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Which files have labels, and which."""

    rows: np.ndarray
    """int64: numbers of the files that are used, ascending."""
    labels: np.ndarray | None
    """int64 class numbers, or float64, one per used file; None: there are none."""
    names: tuple[str, ...] = ()
    """The classes in the order of their numbers; empty where labels are numbers."""
    absent: tuple[str, ...] = ()
    """Paths that the table names and the folder does not have."""


def by_folder(paths: Sequence[str], names: Sequence[str]) -> Labelled:
    """Take the first folder of each path, below the source's, for its class.

    Args:
        paths: below the source's folder.
        names: the classes in order; empty: those that are found, sorted.

    Raises:
        DataError: files lie in no folder, or in one that is not among ``names``.
    """
    outside = [path for path in paths if "/" not in path]
    if outside:
        raise DataError(
            f"{len(outside):,} files lie directly in data.path and so in no class's folder (first: "
            f"{min(outside)}); move them, or set labels.source to 'table' or 'none'"
        )
    return _numbered([path.split("/", 1)[0] for path in paths], np.arange(len(paths)), names)


def by_table(
    paths: Sequence[str], table: pa.Table, names: Sequence[str], roots: Sequence[str]
) -> Labelled:
    """Take labels from a table of paths.

    Args:
        paths: of the files, below the source's folder.
        table: columns ``path`` and ``label``.
        names: the classes in order; empty: those that are found, sorted.
        roots: ways to write the source's folder, with which a path in the table may begin.

    Raises:
        DataError: a row has no path or label, a file stands there twice, or labels are of a type
            of which no class or number can be made.
    """
    nulls = max(table["path"].null_count, table["label"].null_count)
    if nulls:
        raise DataError(f"the table of labels has {nulls:,} rows without path or label; drop them")
    place = {path: number for number, path in enumerate(paths)}
    wanted = [_below(path, roots) for path in table["path"].to_pylist()]
    if len(set(wanted)) < len(wanted):
        twice = sorted(path for path, count in Counter(wanted).items() if count > 1)
        raise DataError(
            f"the table of labels names {len(twice):,} files several times (first: {twice[0]}); "
            "keep one row for each"
        )
    found = np.array([place.get(path, -1) for path in wanted], dtype=np.int64)
    absent = tuple(sorted(path for path, row in zip(wanted, found, strict=True) if row < 0))
    order = np.argsort(found, kind="stable")[len(absent) :]
    rows, values = found[order], table["label"].take(pa.array(order))
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        labelled = _numbered(values.to_pylist(), rows, names)
        return Labelled(rows=rows, labels=labelled.labels, names=labelled.names, absent=absent)
    if names:
        raise DataError(f"labels.names is for labels that are strings; the table has {kind}")
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise DataError(f"the table's labels are {kind}; they must be strings or numbers")
    dtype = np.int64 if pa.types.is_integer(kind) else np.float64
    return Labelled(rows=rows, labels=np.asarray(values).astype(dtype), absent=absent)


def _numbered(found: Sequence[str], rows: np.ndarray, names: Sequence[str]) -> Labelled:
    unknown = sorted(set(found) - set(names)) if names else []
    if unknown:
        raise DataError(
            f"{len(unknown)} classes are not in labels.names: {', '.join(unknown[:SHOWN])}; name "
            "them there, or leave their files out"
        )
    ordered = tuple(names) or tuple(sorted(set(found)))
    numbers = {name: number for number, name in enumerate(ordered)}
    labels = np.array([numbers[name] for name in found], dtype=np.int64)
    return Labelled(rows=rows, labels=labels, names=ordered)


def _below(path: str, roots: Sequence[str]) -> str:
    """A path of the table as one below the source's folder."""
    for root in roots:
        if path.startswith(f"{root.rstrip('/')}/"):
            path = path[len(root.rstrip("/")) + 1 :]
            break
    return posixpath.normpath(path)
