"""Rules for the values of a column: which dtype they get, and which labels and weights are bad.

The spool, the sources that workers read by themselves, and `evaluate` all go by these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from sparkdl.data.plan import Column, Role, SpoolColumn
from sparkdl.data.ragged import Array
from sparkdl.errors import DataError
from sparkdl.inputs import Image, Tensor


def stored_dtype(wanted: SpoolColumn, found: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which values are stored that were read, or made, as ``found``."""
    if wanted.kind.keeps_dtype:
        return found
    if wanted.kind.transform is None:
        return np.dtype(wanted.dtype)
    if found.kind == "f":
        return np.dtype(wanted.dtype)
    if wanted.role == "feature" and found.name in ("bool", "uint8"):
        return found
    return np.dtype("int64")


def bad_values(
    values: Array, role: Role, *, as_classes: bool, ignored: int | None = None
) -> np.ndarray:
    """``(rows,)``: True where a label or weight cannot be used; ``ignored`` is no bad label."""
    flat = values.reshape(len(values), math.prod(values.shape[1:]))  # -1 fails without rows
    if values.dtype.kind == "f":
        bad = ~np.isfinite(flat)
        if as_classes:
            bad |= (np.floor(flat) != flat) | (flat >= 2.0**63)  # which int64 cannot hold
    else:
        bad = np.zeros(flat.shape, dtype=bool)
    if as_classes or role == "weight":
        bad |= (flat < 0) & (True if ignored is None else flat != ignored)
    return np.asarray(bad.any(axis=1))


def count_bad(values: Array, wanted: SpoolColumn, place: Callable[[int], str]) -> tuple[int, str]:
    """Count the rows that are bad, and describe the first of them; features are never bad.

    Args:
        values: ``(rows, ...)``.
        wanted: the column.
        place: names a row.
    """
    if wanted.role == "feature" or values.dtype.kind not in "biuf":
        return 0, ""
    bad = bad_values(values, wanted.role, as_classes=wanted.as_classes, ignored=wanted.ignored)
    if not bad.any():
        return 0, ""
    row = int(bad.argmax())
    return int(bad.sum()), f"{values[row].tolist()} in {place(row)}"


def refuse_bad(values: Array, wanted: SpoolColumn, place: Callable[[int], str]) -> None:
    """See that no row is bad; see `count_bad`.

    Raises:
        DataError: with column, count and an example.
    """
    count, first = count_bad(values, wanted, place)
    if count:
        raise DataError(bad_values_message(wanted, count, first))


def remedy_of_shapes(column: SpoolColumn | Column) -> str:
    """Say what to do where the rows of a column have different shapes."""
    kind, name = column.kind, column.name
    if isinstance(kind, Image):
        return f'scale them: sparkdl.Image("{name}", size=(height, width))'
    if column.role != "feature" or not isinstance(kind, Tensor):
        return "pad or drop them"
    if column.dtype == "uint8":
        return f'if they are files of images, inputs=[sparkdl.Image("{name}")] decodes them'
    return f'pad or drop them, or let inputs=[sparkdl.Sequence("{name}")] pad each batch'


def bad_values_message(column: SpoolColumn, count: int, first: str) -> str:
    """One sentence on labels or weights that cannot be used: how many, which, what to do."""
    wanted = {
        True: "whole, non-negative class indices (StringIndexer makes them of other labels, "
        "TorchRegressor learns numbers)",
        False: "finite numbers" + (" that are not negative" * (column.role == "weight")),
    }[column.as_classes]
    rows = "row does" if count == 1 else "rows do"
    remedy = "drop or mend them"
    if column.as_classes and re.match(r"-\d+(\.0)? in ", first):
        number = first.partition(" ")[0].removesuffix(".0")
        if number == "-1":
            remedy += ", make 0 and 1 of labels -1 and 1 by (label + 1) / 2"
        remedy += f", or have them left out by loss=nn.CrossEntropyLoss(ignore_index={number})"
    return (
        f'column "{column.name}" must hold {wanted}, but {count} {rows} not (first: {first}); '
        f"{remedy}"
    )
