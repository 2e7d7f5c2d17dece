"""The conversion of columns that workers read by themselves, and the checks of their rows.

What Catalyst does for the spool is done here with Arrow and numpy, and the checks are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.data.arrow_arrays import is_list
from sparkdl.data.column_readers import BadRows, read
from sparkdl.data.column_rules import refuse_bad, remedy_of_shapes, stored_dtype
from sparkdl.data.kinds import Rows
from sparkdl.data.plan import Column, SpoolColumn
from sparkdl.data.ragged import Array, Ragged
from sparkdl.errors import DataError
from sparkdl.inputs import Sparse, Tensor

if TYPE_CHECKING:
    import torch

_UNSIGNED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(),
    pa.large_binary(): pa.binary(),
}
"""Types that Spark reads as others, which ``transform`` will get."""
_VIEWS = {
    getattr(pa, name)(): plain
    for name, plain in (("binary_view", pa.binary()), ("string_view", pa.string()))
    if hasattr(pa, name)  # since pyarrow 16
}
"""The same bytes, laid out in another way, of which Parquet and Spark know nothing."""
_VECTOR = ("type", "size", "indices", "values")


def as_spark(kind: pa.DataType) -> pa.DataType:
    """The type as which Spark reads such a column of Parquet."""
    if pa.types.is_dictionary(kind):
        return as_spark(kind.value_type)
    if is_list(kind):
        return pa.list_(as_spark(kind.value_type))
    if pa.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return pa.struct([pa.field(field.name, as_spark(field.type)) for field in fields])
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz=kind.tz)
    return _plain(_UNSIGNED.get(kind, kind))


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type of binary and strings whose rows may have any length."""
    return pa.binary() if pa.types.is_fixed_size_binary(kind) else _VIEWS.get(kind, kind)


def path_of(schema: pa.Schema, name: str) -> tuple[str, ...]:
    """Column ``name``, or a field of a struct column: ``("user", "age")`` for ``user.age``.

    Spark has found it already, by its own rules for upper and lower case.
    """
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        top = _like(schema.names, ".".join(parts[:length]))
        if top is None:
            continue
        path, kind = [top], schema.field(top).type
        for part in parts[length:]:
            found = _like([kind.field(i).name for i in range(kind.num_fields)], part)
            if found is None:
                break
            path.append(found)
            kind = kind.field(found).type
        else:
            return tuple(path)
    raise DataError(f'column "{name}" is not in the files; their columns: {schema.names}')


def _like(names: list[str], name: str) -> str | None:
    same = [known for known in names if known == name]
    return next(iter(same or [known for known in names if known.lower() == name.lower()]), None)


def column_at(table: pa.Table, path: tuple[str, ...]) -> pa.Array:
    """The column, or the field of a struct column, as one array."""
    column = table.column(path[0])
    is_one = column.num_chunks == 1
    array = column.chunk(0) if is_one else column.cast(_roomy(column.type)).combine_chunks()
    for name in path[1:]:
        array = pc.struct_field(array, name)
    return array


def _roomy(kind: pa.DataType) -> pa.DataType:
    """The same with 64-bit offsets: the reader gives chunks where more than 2 GiB lie in one."""
    if pa.types.is_binary(kind):
        return pa.large_binary()
    if pa.types.is_string(kind):
        return pa.large_string()
    if pa.types.is_list(kind):
        return pa.large_list(_roomy(kind.value_type))
    if pa.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return pa.struct([field.with_type(_roomy(field.type)) for field in fields])
    return kind


def found_rows(
    arrays: list[pa.Array], column: SpoolColumn, *, where: str = "", first_row: int = 0
) -> Rows:
    """Return the rows that the column's specification makes of arrays, in their own dtype.

    Raises:
        BadRows: rows are null, have different shapes, or hold no image.
        DataError: the transform failed.
    """
    kind = column.kind
    if kind.transform is not None:
        parts = [_for_transform(array, column.dtype) for array in arrays]
        names = [f"c{number}" for number in range(len(parts))]
        return read(
            pa.StructArray.from_arrays(parts, names), kind, where=where, first_row=first_row
        )
    (array,) = arrays
    if isinstance(kind, Tensor) and _is_vector(array.type):
        return _dense(read(array, Sparse(kind.columns[0]), where=where, first_row=first_row))
    numbers = _numbers(array.type)
    if numbers != array.type:
        array = array.cast(numbers)
    return read(array, kind, where=where, first_row=first_row)


def checked_rows(
    arrays: list[pa.Array],
    wanted: SpoolColumn,
    column: Column,
    *,
    where: str = "",
    first_row: int = 0,
) -> Rows:
    """A column's rows as the plan has them, in numpy.

    Args:
        arrays: the columns that its specification names.
        wanted: how it was asked for.
        column: how the plan has it.
        where: suffix of a row's description, such as `` of row group 2 of a.parquet``.
        first_row: number of the first row.

    Raises:
        DataError: rows cannot be used: with column, count and an example.
    """
    try:
        rows = found_rows(arrays, wanted, where=where, first_row=first_row)
    except BadRows as error:
        raise DataError(error.findings.message(column.name, remedy_of_shapes(column))) from None
    _check_shape(rows, column, wanted.shape, f"row {first_row}{where}")
    if isinstance(rows, Ragged):
        last = _typed(rows.parts[-1], wanted, column)
        if wanted.kind.has_length and not len(last):  # which do not tell their shape
            last = last.reshape(0, *column.shape)
        return Ragged((*rows.parts[:-1], last), rows.offsets, column.shape)
    refuse_bad(rows, wanted, lambda row: f"row {first_row + row}{where}")
    return _typed(rows, wanted, column).reshape(len(rows), *column.shape)


def owned(rows: Rows) -> torch.Tensor | Ragged:
    """The rows for batches, in memory of their own: Arrow's is not to be written to."""
    import torch

    from sparkdl.data.gather import empty

    if isinstance(rows, Ragged):
        return rows
    own = empty(rows.shape, rows.dtype)
    own[...] = rows
    return torch.from_numpy(own)


def _check_shape(rows: Rows, column: Column, known: tuple[int, ...] | None, first: str) -> None:
    """Refuse rows in another shape than the source has found; `column` may have been reshaped."""
    shape = rows.shape if isinstance(rows, Ragged) else rows.shape[1:]
    known = tuple(column.shape) if known is None else known
    if shape is None or not len(rows) or tuple(shape) == known:
        return
    raise DataError(
        f'column "{column.name}" is ragged: {len(rows)} rows have shape {tuple(shape)} (first: '
        f"{first}), others {known}; {remedy_of_shapes(column)}"
    )


def _typed(values: Array, wanted: SpoolColumn, column: Column) -> Array:
    """Values of the plan's dtype."""
    dtype = np.dtype(column.dtype)
    if wanted.kind.transform is not None and not wanted.kind.keeps_dtype and len(values):
        made = stored_dtype(wanted, values.dtype)
        if made != dtype:
            raise DataError(
                f'the transform of "{column.name}" gave {made} where others have {dtype}: let it '
                "cast them"
            )
    return values.astype(dtype, copy=False)


def _for_transform(array: pa.Array, float_dtype: str) -> pa.Array:
    """As Spark passes it: vectors as arrays, no types that it has not."""
    if _is_vector(array.type):
        rows = _dense(read(array, Sparse("vector")))
        flat = pa.array(rows.reshape(-1).astype(float_dtype))
        return pa.FixedSizeListArray.from_arrays(flat, rows.shape[1]).cast(pa.list_(flat.type))
    kind = as_spark(array.type)
    return array if kind == array.type else array.cast(kind)


def _numbers(kind: pa.DataType) -> pa.DataType:
    """The type without dictionaries, decimals, and binary of fixed size."""
    if pa.types.is_dictionary(kind):
        return _numbers(kind.value_type)
    if pa.types.is_decimal(kind):
        return pa.float64()
    if is_list(kind):
        inner = _numbers(kind.value_type)
        return kind if inner == kind.value_type else pa.list_(inner)
    return _plain(kind)


def _is_vector(kind: pa.DataType) -> bool:
    """Return True if a column of Spark ML's vectors is stored as this type."""
    if not pa.types.is_struct(kind):
        return False
    return {kind.field(i).name for i in range(kind.num_fields)} == set(_VECTOR)


def _dense(rows: Any) -> Array:
    """``(rows, size)``."""
    index, values = rows.own()
    dense = np.zeros((len(rows), *(rows.shape or (0,))), dtype=values.dtype)
    dense[np.repeat(np.arange(len(rows)), rows.lengths), index] = values
    return dense
