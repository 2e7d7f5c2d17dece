"""Arrow columns as numpy arrays, as their specifications ask for.

The same functions serve the spool and ``transform()``. Rows that cannot be used raise `BadRows`,
which says which and why.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.data.arrow_arrays import Findings, NotUniform, examine
from sparkdl.data.images import read_images
from sparkdl.data.kinds import ImageKind, Rows, WrongType, kind_of, require
from sparkdl.data.plan import Column
from sparkdl.data.ragged import Array, Ragged
from sparkdl.errors import DataError
from sparkdl.inputs import Image, Specification, Tensor

_WHOLE = ("bool", "uint8", "int8", "int16", "int32", "int64")


class BadRows(ValueError):
    """Rows that cannot be used."""

    def __init__(self, findings: Findings) -> None:
        super().__init__()
        self.findings = findings


def read(
    array: pa.Array, specification: Specification, *, where: str = "", first_row: int = 0
) -> Rows:
    """Convert a column.

    Args:
        array: the column's rows, or, for a transform, a struct array of its columns.
        specification: what becomes of it.
        where: suffix of a row's description, such as `` of partition 2``.
        first_row: number of the array's first row.

    Returns:
        ``(rows, *shape)`` in a dtype of the column's own, or ragged rows.

    Raises:
        BadRows: rows are null, have different shapes, or hold no image.
        DataError: the transform failed, or gave something else than rows.
    """
    with _read_from(array, specification, where, first_row) as values:
        return kind_of(specification).read(values, specification, where=where, first_row=first_row)


def read_usable(
    array: pa.Array, specification: Image, *, where: str = "", first_row: int = 0
) -> tuple[Rows, Array, Findings]:
    """Convert a column of images, without the rows that cannot be used; otherwise as `read`.

    Returns:
        The good rows; which these are, bool ``(rows,)``; what is wrong with the others.

    Raises:
        BadRows: images differ in size.
        DataError: the transform failed, or gave no images.
    """
    with _read_from(array, specification, where, first_row) as values:
        require(values, *ImageKind.TYPES)
        return read_images(values, specification, skip_bad=True, where=where, first_row=first_row)


@contextlib.contextmanager
def _read_from(
    array: pa.Array, specification: Specification, where: str, first_row: int
) -> Iterator[Any]:
    """Yield what to read: the column, or what its transform makes of it; for errors see `read`."""
    values: Any = array
    if specification.transform is not None:
        values = _transformed(array, specification)
    try:
        yield values
    except NotUniform as error:
        is_sequence = specification.has_length
        findings = error.findings or examine(
            values, where=where, first_row=first_row, is_sequence=is_sequence
        )
        raise BadRows(findings) from None
    except WrongType as error:
        raise DataError(
            f'the transform of "{specification.name}" returned {error}, of which '
            f"{type(specification).__name__} cannot be made"
        ) from None


def read_trained(
    array: pa.Array, column: Column, *, first_row: int = 0
) -> tuple[Rows, Array | None]:
    """Convert a column for a module that was trained on ``column``.

    Returns:
        The rows; and, of images of which bad ones are skipped, which rows these are, bool
        ``(rows,)``. None: all.

    Raises:
        DataError: rows cannot be used, or have another shape than in training.
    """
    kind, kept = column.kind, None
    try:
        if not isinstance(kind, Image):
            rows = read(array, kind, where=" of a record batch", first_row=first_row)
        elif kind.skips:  # decoded here and now, each once
            rows, kept, _ = read_usable(array, replace(kind, decode="spool"), first_row=first_row)
        else:
            rows = read(array, replace(kind, decode="spool"), first_row=first_row)
    except BadRows as error:
        raise DataError(error.findings.message(column.name)) from None
    return _as_trained(rows, column), kept


def _as_trained(rows: Rows, column: Column) -> Rows:
    """Rows in the shape and dtype of training.

    Raises:
        DataError: they have others.
    """
    shape = rows.shape if isinstance(rows, Ragged) else rows.shape[1:]
    if shape is None or not len(rows) or shape == tuple(column.shape):
        return _typed(rows, column)
    is_tensor = isinstance(column.kind, Tensor)  # reshaped where that can be done
    if not is_tensor or math.prod(shape) != math.prod(column.shape):
        raise DataError(
            f'column "{column.name}" has rows of shape {shape}; the module was trained on '
            f"{tuple(column.shape)}"
        )
    return _typed(rows, column)


def _typed(rows: Rows, column: Column) -> Rows:
    """The rows with values of the trained dtype."""
    values = rows.parts[-1] if isinstance(rows, Ragged) else rows
    is_made = column.kind.transform is not None
    if is_made and column.dtype in _WHOLE and values.dtype.kind == "f" and values.size:
        raise DataError(
            f'the transform of "{column.name}" returned {values.dtype}; the module was trained on '
            f"{column.dtype}"
        )
    if isinstance(rows, Ragged):
        last = values.astype(column.dtype, copy=False)
        return Ragged((*rows.parts[:-1], last), rows.offsets, column.shape)
    return values.reshape(len(values), *column.shape).astype(column.dtype, copy=False)


def _in_utc(kind: pa.DataType) -> pa.DataType:
    """The type with timestamps in UTC: Spark gives them the session's zone, and a file its own."""
    if pa.types.is_timestamp(kind):
        return kind if kind.tz is None else pa.timestamp(kind.unit, tz="UTC")
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_in_utc(kind.value_type)))
    if pa.types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return pa.struct([field.with_type(_in_utc(field.type)) for field in fields])
    return kind


def _transformed(array: pa.StructArray, specification: Specification) -> Any:
    """Return what the user's function makes of the columns: an Arrow or numpy array."""
    assert specification.transform is not None
    values = [part.cast(_in_utc(part.type)) for part in array.flatten()]
    batch = pa.RecordBatch.from_arrays(values, names=list(specification.columns))
    try:
        result = specification.transform(batch)
        if isinstance(result, pa.ChunkedArray):
            result = result.combine_chunks()
        elif isinstance(result, list):
            result = pa.array(result)
        elif not isinstance(result, pa.Array):
            result = np.asarray(result)
    except Exception as error:  # whatever the user's function raises
        raise DataError(
            f'the transform of "{specification.name}" failed: {type(error).__name__}: {error}\n\n'
            f"{traceback.format_exc().rstrip()}"
        ) from error
    if len(result) != batch.num_rows:
        raise DataError(
            f'the transform of "{specification.name}" returned {len(result)} rows for '
            f"{batch.num_rows}; it must return one for each"
        )
    if isinstance(result, np.ndarray) and result.dtype.kind not in "biuf":
        raise DataError(
            f'the transform of "{specification.name}" returned a numpy array of {result.dtype}; '
            "it must hold numbers; return a pyarrow array or a list of lists for sequences"
        )
    return result
