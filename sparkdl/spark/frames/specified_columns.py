"""The columns that a specification names, and how Catalyst prepares them.

What a transform gets, it gets as Spark has it; of all else the type is checked here, and numbers
are cast, so that what reaches Python is already of the wanted dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pyspark.errors import PySparkTypeError
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column as SparkColumn
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from sparkdl.data.images import require_pillow
from sparkdl.data.kinds import OwnKind
from sparkdl.data.plan import Column, Role
from sparkdl.errors import DataError
from sparkdl.inputs import Image, Named, Sequence, Sparse, Specification, Tensor
from sparkdl.spark.frames.columns import (
    FLOATS,
    Prepared,
    check_fits,
    has_hash,
    is_number,
    prepare_field,
    resolve,
)

_IMAGE_FIELDS = ("height", "width", "nChannels", "data")
_SPARSE_FIELDS = ("size", "indices", "values")


def prepare_named(
    schema: T.StructType,
    entry: Named,
    role: Role,
    *,
    float_dtype: str,
    as_classes: bool = False,
    is_case_sensitive: bool = False,
) -> Prepared:
    """Choose expression and dtype of one input or label.

    Args:
        schema: schema of the DataFrame.
        entry: the specification and its name.
        role: ``feature`` or ``label``.
        float_dtype: dtype of floating values: ``float32`` or ``float64``.
        as_classes: floating numbers are class indices.
        is_case_sensitive: see `columns.find`.

    Raises:
        DataError: a column is missing, or of a type that the specification cannot use.
        ConfigError: Pillow is needed and not installed.
    """
    kind = entry.specification
    found = [resolve(schema, c, is_case_sensitive=is_case_sensitive) for c in kind.columns]
    field, column = found[0]
    if kind.transform is not None:
        prepared = _for_transform(found, kind, role, float_dtype)
    else:
        asked = _Asked(field, column, kind, role, float_dtype, as_classes)
        if kind.own_kind is not None:
            prepared = _as_it_is(asked, kind.own_kind)
        else:
            prepared = next(p for known, p in _PREPARE.items() if isinstance(kind, known))(asked)
    return replace(prepared, argument=entry.argument, specification=kind)


def trained_entry(
    schema: T.StructType, entry: Named, column: Column, *, is_case_sensitive: bool
) -> Prepared:
    """Prepare an input for a module that was trained on ``column``.

    Raises:
        DataError: it is missing, or its numbers do not fit into the trained dtype.
    """
    float_dtype = column.dtype if column.dtype.startswith("float") else "float32"
    prepared = prepare_named(
        schema, entry, "feature", float_dtype=float_dtype, is_case_sensitive=is_case_sensitive
    )
    is_checked = isinstance(entry.specification, (Tensor, Sequence))
    if is_checked and entry.specification.transform is None:
        check_fits(prepared.name, prepared.dtype, column.dtype)
    return prepared


def specification_of(columns: Iterable[Column]) -> Any:
    """The Param ``inputs`` that stands for these columns."""
    if any(column.argument is None for column in columns):
        return [column.kind for column in columns]
    return {column.argument: column.kind for column in columns}


def _for_transform(
    found: list[tuple[T.StructField, SparkColumn]],
    kind: Specification,
    role: Role,
    float_dtype: str,
) -> Prepared:
    """The columns together, as one struct."""
    parts = []
    for number, (field, column) in enumerate(found):
        if not has_hash(field.dataType):
            raise _wrong(field, kind, "rows with it cannot be told apart; use map_entries(column)")
        if isinstance(field.dataType, VectorUDT):
            column = F.when(column.isNotNull(), vector_to_array(column, dtype=float_dtype))
        parts.append(column.alias(f"c{number}"))
    if isinstance(kind, Image):
        require_pillow()
    return Prepared(
        name=kind.name,
        role=role,
        expression=F.struct(*parts),
        dtype="uint8" if isinstance(kind, Image) else float_dtype,
    )


@dataclass(frozen=True)
class _Asked:
    """An input or label that names one column without a transform."""

    field: T.StructField
    column: SparkColumn
    kind: Specification
    role: Role
    float_dtype: str
    as_classes: bool


def _numbers(asked: _Asked) -> Prepared:
    # Whole numbers are class numbers already, and negative ones may be there to be ignored.
    return prepare_field(
        asked.field,
        asked.column,
        asked.role,
        float_dtype=asked.float_dtype,
        as_classes=asked.as_classes and isinstance(asked.field.dataType, FLOATS),
    )


def _sequence(asked: _Asked) -> Prepared:
    if not isinstance(asked.field.dataType, T.ArrayType):
        advice = "it must be an array of numbers (make one of text by a transform)"
        raise _wrong(asked.field, asked.kind, advice)
    return _numbers(asked)


def _image(asked: _Asked) -> Prepared:
    data_type = asked.field.dataType
    prepared = Prepared(
        name=asked.kind.name, role=asked.role, expression=asked.column, dtype="uint8"
    )
    if isinstance(data_type, T.BinaryType):
        require_pillow()
        return prepared
    names = data_type.names if isinstance(data_type, T.StructType) else []
    if not set(_IMAGE_FIELDS) <= set(names):
        raise _wrong(
            asked.field, asked.kind, "it must be binary (a file's bytes) or Spark's image struct"
        )
    if asked.kind.num_parts:
        raise _wrong(asked.field, asked.kind, "such images are decoded already; use decode='spool'")
    return prepared


def _sparse(asked: _Asked) -> Prepared:
    data_type = asked.field.dataType
    column = asked.column
    sql = "float" if asked.float_dtype == "float32" else "double"
    if isinstance(data_type, VectorUDT):
        column = F.unwrap_udt(column)
    elif not _is_sparse_struct(data_type):
        advice = (
            "it must be a Spark ML vector, or a struct of size (int), indices (array of int) and "
            "values (array of numbers)"
        )
        raise _wrong(asked.field, asked.kind, advice)
    parts = {
        "size": column["size"].cast("int"),
        "indices": column["indices"].cast("array<int>"),
        "values": column["values"].cast(f"array<{sql}>"),
    }
    struct = F.struct(*(part.alias(name) for name, part in parts.items()))
    expression = F.when(column.isNotNull(), struct)
    return Prepared(
        name=asked.kind.name, role=asked.role, expression=expression, dtype=asked.float_dtype
    )


_PREPARE: Mapping[type[Specification], Callable[[_Asked], Prepared]] = {
    Tensor: _numbers,
    Sequence: _sequence,
    Image: _image,
    Sparse: _sparse,
}
"""What Catalyst does for each kind of input that `data.kinds.KINDS` has."""


def _as_it_is(asked: _Asked, own: OwnKind) -> Prepared:
    if not has_hash(asked.field.dataType):
        raise _wrong(asked.field, asked.kind, "rows with it cannot be told apart")
    try:
        arrow = to_arrow_type(asked.field.dataType)
    except PySparkTypeError as error:
        raise _wrong(asked.field, asked.kind, "Arrow has no such type") from error
    if not any(test(arrow) for test in own.types):
        tests = ", ".join(test.__name__ for test in own.types)
        raise _wrong(asked.field, asked.kind, f"in Arrow it is {arrow}, which is none of: {tests}")
    return Prepared(name=asked.kind.name, role=asked.role, expression=asked.column, dtype=own.dtype)


def _is_sparse_struct(data_type: T.DataType) -> bool:
    if not isinstance(data_type, T.StructType) or not set(_SPARSE_FIELDS) <= set(data_type.names):
        return False
    size, indices, values = (data_type[name].dataType for name in _SPARSE_FIELDS)
    return (
        isinstance(size, T.IntegralType)
        and isinstance(indices, T.ArrayType)
        and isinstance(indices.elementType, T.IntegralType)
        and isinstance(values, T.ArrayType)
        and is_number(values.elementType)
    )


def _wrong(field: T.StructField, kind: Specification, advice: str) -> DataError:
    return DataError(
        f'column "{field.name}" has type {field.dataType.simpleString()}, of which '
        f"{type(kind).__name__} cannot be made; {advice}"
    )
