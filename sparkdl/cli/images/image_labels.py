"""The label of each file as a number, from its folder's name or from a table."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from sparkdl.errors import DataError

SHOWN = 5
"""Examples in a message."""


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """The files that are used, with their labels."""

    files: pa.Table
    """Sorted by ``path``, with a column ``label`` if there are labels: int64 or double."""
    names: tuple[str, ...] = ()
    """The classes in the order of their numbers; empty where labels are numbers."""
    absent: tuple[str, ...] = ()
    """Paths that the table names and the folder does not have, sorted."""


def by_folder(files: pa.Table, names: Sequence[str]) -> Labelled:
    """Take the first folder of each ``path``, below the source's, for its class; raises DataError.

    The classes are ``names``, in this order, or those that are found, sorted.
    """
    paths = files["path"].to_pylist()
    outside = [path for path in paths if "/" not in path]
    if outside:
        raise DataError(
            f"{len(outside):,} files lie directly in data.path and so in no class's folder (first: "
            f"{min(outside)}); move them, or set labels.source to 'table' or 'none'"
        )
    numbers, ordered = _numbered([path.split("/", 1)[0] for path in paths], names)
    return Labelled(files=files.append_column("label", numbers), names=ordered)


def by_table(
    files: pa.Table, table: pa.Table, names: Sequence[str], roots: Sequence[str]
) -> Labelled:
    """Take labels from a table of ``path`` and ``label``; files that it does not name are left out.

    Classes are as in `by_folder`. A path in the table may begin with one of ``roots``, which are
    ways to write the source's folder. Raises DataError.
    """
    nulls = max(table["path"].null_count, table["label"].null_count)
    if nulls:
        raise DataError(f"the table of labels has {nulls:,} rows without path or label; drop them")
    starts = [f"{root.rstrip('/')}/" for root in roots]
    wanted = []
    for path in table["path"].to_pylist():
        start = next((start for start in starts if path.startswith(start)), "")
        wanted.append(posixpath.normpath(path.removeprefix(start)))
    if len(set(wanted)) < len(wanted):
        twice = sorted(path for path, count in Counter(wanted).items() if count > 1)
        raise DataError(
            f"the table of labels names {len(twice):,} files several times (first: {twice[0]}); "
            "keep one row for each"
        )
    absent = tuple(sorted(set(wanted) - set(files["path"].to_pylist())))
    named = pa.table({"path": pa.array(wanted, pa.string()), "label": table["label"]})
    used = files.join(named, "path", join_type="inner").sort_by("path")
    labels, kind = used["label"], used["label"].type
    ordered: tuple[str, ...] = ()
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        labels, ordered = _numbered(labels.to_pylist(), names)
    elif names:
        raise DataError(f"labels.names is for labels that are strings; the table has {kind}")
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        labels = labels.cast(pa.int64() if pa.types.is_integer(kind) else pa.float64())
    else:
        raise DataError(f"the table's labels are {kind}; they must be strings or numbers")
    used = used.drop_columns(["label"]).append_column("label", labels)
    return Labelled(files=used, names=ordered, absent=absent)


def _numbered(found: Sequence[str], names: Sequence[str]) -> tuple[pa.Array, tuple[str, ...]]:
    """The number of each class that was found, and the classes in the order of their numbers."""
    unknown = sorted(set(found) - set(names)) if names else []
    if unknown:
        raise DataError(
            f"{len(unknown)} classes are not in labels.names: {', '.join(unknown[:SHOWN])}; name "
            "them there, or leave their files out"
        )
    ordered = tuple(names) or tuple(sorted(set(found)))
    numbers = {name: number for number, name in enumerate(ordered)}
    return pa.array([numbers[name] for name in found], pa.int64()), ordered
