"""Arrow columns as numpy arrays, as their specifications ask for.

The same functions serve the spool and ``transform()``. Rows that cannot be used raise `BadRows`,
which says which and why.
"""

from __future__ import annotations

import math
import traceback
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.data.arrow_arrays import Findings, NotUniform, examine, offsets, uniform
from sparkdl.data.images import encoded, read_images, usable_images
from sparkdl.data.plan import Column
from sparkdl.data.ragged import Array, Ragged, offsets_of
from sparkdl.errors import DataError
from sparkdl.inputs import Image, Sequence, Sparse, Specification, Tensor

Rows = Array | Ragged

_IMAGE_TYPES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_struct)
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
    values: Any = array
    if specification.transform is not None:
        values = _transformed(array, specification)
    try:
        if isinstance(specification, Image):
            _require(values, *_IMAGE_TYPES)
            return (encoded if specification.num_parts else read_images)(
                values, specification, where=where, first_row=first_row
            )
        if isinstance(specification, Sequence):
            rows = _sequence(values, specification)
            _require_numbers(rows.parts[0])
            return rows
        if isinstance(specification, Sparse):
            _require(values, pa.types.is_struct)
            return _sparse(values, where=where, first_row=first_row)
        dense = values if isinstance(values, np.ndarray) else uniform(values)
        _require_numbers(dense)
        return dense
    except NotUniform as error:
        findings = error.findings or examine(
            values,
            where=where,
            first_row=first_row,
            is_sequence=isinstance(specification, Sequence),
        )
        raise BadRows(findings) from None
    except WrongType as error:
        raise _wrong_type(error, specification) from None


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
    values: Any = array
    if specification.transform is not None:
        values = _transformed(array, specification)
    try:
        _require(values, *_IMAGE_TYPES)
        return usable_images(values, specification, where=where, first_row=first_row)
    except NotUniform as error:
        assert error.findings is not None
        raise BadRows(error.findings) from None
    except WrongType as error:
        raise _wrong_type(error, specification) from None


def _wrong_type(error: WrongType, specification: Specification) -> DataError:
    return DataError(
        f'the transform of "{specification.name}" returned {error}, of which '
        f"{type(specification).__name__} cannot be made"
    )


def read_trained(array: pa.Array, column: Column, *, first_row: int = 0) -> Rows:
    """Convert a column for a module that was trained on ``column``.

    Raises:
        DataError: rows cannot be used, or have another shape than in training.
    """
    kind = column.kind
    if isinstance(kind, Image):  # decoded here and now, each once
        kind = replace(kind, decode="spool")
    try:
        rows = read(array, kind, first_row=first_row)
    except BadRows as error:
        raise DataError(error.findings.message(column.name)) from None
    return _as_trained(rows, column)


def read_trained_usable(
    array: pa.Array, column: Column, *, first_row: int = 0
) -> tuple[Rows, Array]:
    """Convert a column of images of which the bad ones are skipped; otherwise as `read_trained`.

    Returns:
        The good rows, and which these are, bool ``(rows,)``.

    Raises:
        DataError: images have another size than in training.
    """
    assert isinstance(column.kind, Image)
    kind = replace(column.kind, decode="spool")
    try:
        rows, kept, _ = read_usable(array, kind, first_row=first_row)
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
    if column.dtype in _WHOLE and values.dtype.kind == "f" and values.size:
        raise DataError(
            f'the transform of "{column.name}" returned {values.dtype}; the module was trained on '
            f"{column.dtype}"
        )
    if isinstance(rows, Ragged):
        last = values.astype(column.dtype, copy=False)
        return Ragged((*rows.parts[:-1], last), rows.offsets, column.shape)
    return values.reshape(len(values), *column.shape).astype(column.dtype, copy=False)


class WrongType(TypeError):
    """A transform's result has a type that its specification cannot use."""


def _require(values: Any, *is_type: Any) -> None:
    """Only a transform can give another type: columns were checked by the driver."""
    if not isinstance(values, pa.Array) or not any(check(values.type) for check in is_type):
        raise WrongType(str(getattr(values, "type", type(values).__name__)))


def _require_numbers(values: Array) -> None:
    if values.dtype.kind not in "biuf" and len(values):
        raise WrongType("values that are no numbers")


def _transformed(array: pa.StructArray, specification: Specification) -> Any:
    """What the user's function makes of the columns: an Arrow or numpy array."""
    assert specification.transform is not None
    batch = pa.RecordBatch.from_arrays(array.flatten(), names=list(specification.columns))
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


def _sequence(values: Any, specification: Sequence) -> Ragged:
    if isinstance(values, np.ndarray):
        if values.ndim < 2:
            raise WrongType(f"an array of shape {values.shape}")
        width = np.full(len(values), values.shape[1], dtype=np.int64)
        flat = values.reshape(-1, *values.shape[2:])
        return _cut(Ragged((flat,), offsets_of(width), flat.shape[1:]), specification)
    _require(values, pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if values.null_count:
        raise NotUniform
    if pa.types.is_fixed_size_list(values.type):
        values = values.cast(pa.list_(values.type.value_type))
    flat = uniform(values.flatten())
    bounds = offsets(values).astype(np.int64) if len(values) else np.zeros(1, dtype=np.int64)
    shape = flat.shape[1:] if len(flat) else None
    return _cut(Ragged((flat,), bounds - bounds[0], shape), specification)


def _cut(rows: Ragged, specification: Sequence) -> Ragged:
    """The first ``max_length`` values of each row."""
    longest, lengths = specification.max_length, rows.lengths
    if longest is None or not len(rows) or lengths.max() <= longest:
        return rows
    place = np.arange(len(rows.parts[0])) - np.repeat(rows.offsets[:-1], lengths)
    kept = tuple(part[place < longest] for part in rows.parts)
    return Ragged(kept, offsets_of(np.minimum(lengths, longest)), rows.shape)


def _sparse(array: pa.StructArray, *, where: str, first_row: int) -> Ragged:
    """Rows of Spark ML's vectors (``type`` 0 is sparse, 1 dense), or of the same without type."""
    if array.null_count:
        raise NotUniform
    fields = {array.type.field(i).name: column for i, column in enumerate(array.flatten())}
    if not {"size", "indices", "values"} <= fields.keys():
        raise WrongType(str(array.type))
    values = fields["values"]
    if values.null_count or values.flatten().null_count:
        raise NotUniform
    lengths = _lengths(values)
    is_dense = np.asarray(fields["indices"].is_null())
    sizes = np.asarray(fields["size"].fill_null(-1))
    sizes = np.where(is_dense, lengths, sizes)
    flat = np.asarray(values.flatten())
    index = np.arange(len(flat)) - np.repeat(offsets_of(lengths)[:-1], lengths)
    given = fields["indices"].fill_null([]) if is_dense.any() else fields["indices"]
    is_odd = _lengths(given) != np.where(is_dense, 0, lengths)
    if is_odd.any():
        findings = Findings()
        for row in np.flatnonzero(is_odd).tolist():
            findings.note_cause("not as many indices as values", f"row {first_row + row}{where}")
        raise NotUniform(findings)
    index[np.repeat(~is_dense, lengths)] = np.asarray(given.flatten())
    _check_sparse(sizes, lengths, index, where=where, first_row=first_row)
    shape = (int(sizes[0]),) if len(sizes) else None
    return Ragged((index.astype(np.int32), flat), offsets_of(lengths), shape)


def _check_sparse(
    sizes: Array, lengths: Array, index: Array, *, where: str, first_row: int
) -> None:
    """Refuse rows of different sizes, and indices outside of them or out of order."""
    findings = Findings()
    if len(sizes) and (sizes != sizes[0]).any():
        for row, size in enumerate(sizes.tolist()):
            findings.note_shape((size,), f"row {first_row + row}{where}")
    owner = np.repeat(np.arange(len(lengths)), lengths)
    is_wrong = (index < 0) | (index >= sizes[owner])
    is_wrong[1:] |= (np.diff(index) <= 0) & (np.diff(owner) == 0)
    for row in np.unique(owner[is_wrong]).tolist():
        cause = "indices out of order or outside of the size"
        findings.note_cause(cause, f"row {first_row + row}{where}")
    if findings:
        raise NotUniform(findings)


def _lengths(array: pa.Array) -> Array:
    if not len(array):
        return np.zeros(0, dtype=np.int64)
    return np.diff(offsets(array)).astype(np.int64)
