"""Labels and weights of an evaluation, as its tasks read them from Arrow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch

from sparkdl.data import collate
from sparkdl.data.arrow_arrays import to_numpy
from sparkdl.data.column_readers import BadRows, read
from sparkdl.data.column_rules import bad_values, made_dtype
from sparkdl.data.plan import SpoolColumn
from sparkdl.data.ragged import Ragged
from sparkdl.errors import DataError


def read_label(column: SpoolColumn, array: pa.Array) -> torch.Tensor | Ragged:
    """The values of a label or the weight, one per row.

    Raises:
        DataError: a null, a value that is not finite, a negative weight, or a value that is no
            class number where one is needed.
    """
    if column.specification is None:
        read_as = "float64" if column.as_classes else column.dtype
        values = to_numpy(array, read_as, name=column.name)
        return _checked(column, values, np.dtype(column.dtype))
    try:
        rows = read(array, column.specification)
    except BadRows as error:
        raise DataError(error.findings.message(column.name)) from None
    values = rows.parts[-1] if isinstance(rows, Ragged) else rows
    dtype = np.dtype(column.dtype)
    if column.specification.transform is not None:
        dtype = made_dtype(values.dtype, "label", column.dtype)
    if isinstance(rows, Ragged):
        last = values.astype(dtype, copy=False)
        return Ragged((*rows.parts[:-1], last), rows.offsets, rows.shape)
    return _checked(column, values, dtype)


def _checked(column: SpoolColumn, values: np.ndarray, dtype: np.dtype[Any]) -> torch.Tensor:
    wrong = bad_values(values, column.role, as_classes=column.as_classes)
    if wrong.any():
        what = "which is not finite"
        if column.as_classes:
            what = "which is no class number (index strings with StringIndexer)"
        elif column.role == "weight":
            what = "but weights are finite numbers from 0"
        raise DataError(
            f'column "{column.name}" has the {column.role} {values[wrong][0].tolist()}, {what}; '
            "filter such rows out"
        )
    return torch.from_numpy(values.astype(dtype))


def padded(column: SpoolColumn, rows: torch.Tensor | Ragged) -> torch.Tensor:
    """What the loss compares with, ``(rows, ...)``; sequences are padded."""
    if isinstance(rows, torch.Tensor):
        return rows
    found = column.found(rows.shape or (), rows.parts[-1].dtype.name)
    return collate.arguments([found], [rows]).values[0]
