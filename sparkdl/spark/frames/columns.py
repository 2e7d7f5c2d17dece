"""The Spark columns that can be trained on, and how Catalyst prepares them.

Casts happen in the JVM, as part of the query: what reaches Python is already of the wanted dtype.
Integers, booleans and bytes stay what they are; floating columns take the module's dtype; Spark
ML vectors become arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column as SparkColumn
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.data.plan import Role
from sparkdl.errors import DataError
from sparkdl.inputs import Specification

_INTEGERS: dict[type[T.DataType], str] = {
    T.ByteType: "int8",
    T.ShortType: "int16",
    T.IntegerType: "int32",
    T.LongType: "int64",
}
FLOATS = (T.FloatType, T.DoubleType, T.DecimalType)
"""Types whose values take the module's dtype."""
_SQL_TYPES = {"float32": "float", "float64": "double", "int64": "bigint"}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A column as it shall reach Python."""

    name: str
    role: Role
    expression: SparkColumn
    """Casts included; not yet aliased."""
    dtype: str
    """numpy name of the dtype in the spool."""
    as_classes: bool = False
    """True if values must be whole, non-negative class indices."""
    argument: str | None = None
    """See `plan.Column`."""
    specification: Specification | None = None
    """See `plan.Column`."""


def prepare(
    schema: T.StructType,
    name: str,
    role: Role,
    *,
    float_dtype: str,
    as_classes: bool = False,
    is_case_sensitive: bool = False,
) -> Prepared:
    """Choose cast and dtype of one column.

    Args:
        schema: schema of the DataFrame.
        name: the column, or a field of a struct column; see `resolve`.
        role: what the model does with it.
        float_dtype: dtype of floating columns: ``float32`` or ``float64``.
        as_classes: the column holds class indices, whatever its numeric type.
        is_case_sensitive: see `find`.

    Raises:
        DataError: the column is missing, or no tensor can be made of its type.
    """
    field, column = resolve(schema, name, is_case_sensitive=is_case_sensitive)
    return prepare_field(field, column, role, float_dtype=float_dtype, as_classes=as_classes)


def prepare_field(
    field: T.StructField,
    column: SparkColumn,
    role: Role,
    *,
    float_dtype: str,
    as_classes: bool = False,
) -> Prepared:
    """Choose cast and dtype of what `resolve` has found; see `prepare`.

    Raises:
        DataError: no tensor can be made of its type.
    """
    name = field.name
    if isinstance(field.dataType, VectorUDT):
        if role != "feature":
            raise _wrong_type(field, role)
        # vector_to_array throws at a null, which would end the job without naming the column.
        expression = F.when(column.isNotNull(), vector_to_array(column, dtype=float_dtype))
        return Prepared(name=name, role=role, expression=expression, dtype=float_dtype)
    if isinstance(field.dataType, T.BinaryType) and role == "feature":
        return Prepared(name=name, role=role, expression=column, dtype="uint8")
    depth, element = _unnest(field.dataType)
    if as_classes:
        if depth or not is_number(element):
            raise _wrong_type(field, "class")
        sql = "double" if isinstance(element, FLOATS) else "bigint"
        return Prepared(
            name=name, role=role, expression=column.cast(sql), dtype="int64", as_classes=True
        )
    dtype = _dtype(element, role, float_dtype)
    if dtype is None or (role == "weight" and depth):
        raise _wrong_type(field, role)
    if dtype in _SQL_TYPES and not _is_exactly(element, dtype):
        column = column.cast("array<" * depth + _SQL_TYPES[dtype] + ">" * depth)
    return Prepared(name=name, role=role, expression=column, dtype=dtype)


def find(schema: T.StructType, name: str, *, is_case_sensitive: bool) -> list[T.StructField]:
    """The fields that Spark takes for ``name``, whatever their case unless the session minds it.

    ``is_case_sensitive`` is the session's ``spark.sql.caseSensitive``.
    """
    if is_case_sensitive:
        return [field for field in schema.fields if field.name == name]
    return [field for field in schema.fields if field.name.lower() == name.lower()]


def require(schema: T.StructType, name: str, *, is_case_sensitive: bool = False) -> T.StructField:
    """The field that Spark takes for ``name``; see `find`.

    Raises:
        DataError: there is none, and which there are; or there are several.
    """
    found = find(schema, name, is_case_sensitive=is_case_sensitive)
    if len(found) > 1:
        names = ", ".join(f'"{field.name}"' for field in found)
        raise DataError(
            f'column "{name}" is in the DataFrame {len(found)} times ({names}); rename or drop '
            "the others"
        )
    if found:
        return found[0]
    known = ", ".join(schema.names)
    raise DataError(f'column "{name}" is not in the DataFrame; its columns: {known}')


def resolve(
    schema: T.StructType, name: str, *, is_case_sensitive: bool = False
) -> tuple[T.StructField, SparkColumn]:
    """The column of that name, or else the field of a struct column: ``a.b`` is ``b`` in ``a``.

    Returns:
        Its type, under the whole name, and its expression.

    Raises:
        DataError: there is none, and which there are; or there are several.
    """
    parts = name.split(".")
    if len(parts) == 1 or find(schema, name, is_case_sensitive=is_case_sensitive):
        field = require(schema, name, is_case_sensitive=is_case_sensitive)
        return field, F.col(quoted(name))
    for length in range(len(parts) - 1, 0, -1):
        top = ".".join(parts[:length])
        found = find(schema, top, is_case_sensitive=is_case_sensitive)
        if found and isinstance(found[0].dataType, T.StructType):
            field = require(schema, top, is_case_sensitive=is_case_sensitive)
            column = F.col(quoted(top))
            for part in parts[length:]:
                field = _field_of(field, part, top, is_case_sensitive=is_case_sensitive)
                column, top = column.getField(field.name), f"{top}.{field.name}"
            return T.StructField(name, field.dataType), column
    require(schema, name, is_case_sensitive=is_case_sensitive)
    raise AssertionError("unreachable: require has raised")


def _field_of(
    field: T.StructField, name: str, path: str, *, is_case_sensitive: bool
) -> T.StructField:
    if isinstance(field.dataType, T.StructType):
        found = find(field.dataType, name, is_case_sensitive=is_case_sensitive)
        if len(found) == 1:
            return found[0]
    raise DataError(
        f'column "{path}" has no field "{name}"; its type is {field.dataType.simpleString()}'
    )


def validation_indicator(
    schema: T.StructType, name: str, *, is_case_sensitive: bool = False
) -> SparkColumn:
    """The boolean column that marks validation rows.

    Raises:
        DataError: it is missing or not boolean.
    """
    field, column = resolve(schema, name, is_case_sensitive=is_case_sensitive)
    if not isinstance(field.dataType, T.BooleanType):
        raise DataError(
            f'column "{name}" marks validation rows and must be boolean; '
            f"it is {field.dataType.simpleString()}"
        )
    return column


def _unnest(data_type: T.DataType) -> tuple[int, T.DataType]:
    depth = 0
    while isinstance(data_type, T.ArrayType):
        depth, data_type = depth + 1, data_type.elementType
    return depth, data_type


def is_number(element: T.DataType) -> bool:
    """True if tensors can hold such values."""
    return isinstance(element, (T.BooleanType, *_INTEGERS, *FLOATS))


def _dtype(element: T.DataType, role: Role, float_dtype: str) -> str | None:
    """Dtype of a column's elements; None if they are no numbers."""
    if not is_number(element):
        return None
    if role == "weight" or isinstance(element, FLOATS):
        return float_dtype
    if role == "label":
        return "int64"  # what torch's losses accept
    return "bool" if isinstance(element, T.BooleanType) else _INTEGERS[type(element)]


def _is_exactly(element: T.DataType, dtype: str) -> bool:
    types = {"float32": T.FloatType, "float64": T.DoubleType, "int64": T.LongType}
    return isinstance(element, types[dtype])


def _wrong_type(field: T.StructField, role: Role | Literal["class"]) -> DataError:
    advice = {
        "class": "a class is a whole number from 0 (index strings with StringIndexer)",
        "label": "a label is a number or an array of numbers (index strings with StringIndexer)",
        "weight": "a weight is a number",
        "feature": "a feature is a number, a boolean, an array of numbers, a Spark ML vector or "
        "binary; inputs={...} takes images (sparkdl.Image), rows of different lengths "
        "(sparkdl.Sequence) and, with a transform, whatever else, such as text",
    }[role]
    return DataError(
        f'column "{field.name}" has type {field.dataType.simpleString()}, '
        f"of which no tensor can be made; {advice}"
    )


def check_fits(name: str, dtype: str, trained: str) -> None:
    """Refuse a column whose numbers do not all fit into what the module was trained on.

    Raises:
        DataError: they do not.
    """
    if trained.startswith("float") or np.promote_types(dtype, trained) == np.dtype(trained):
        return
    raise DataError(
        f'column "{name}" becomes {dtype}, but the module was trained on {trained}; cast the '
        "column in Spark first"
    )


def hashable(schema: T.StructType) -> list[SparkColumn]:
    """The columns of which Spark can make a hash: those without maps and variants inside."""
    return [F.col(quoted(field.name)) for field in schema.fields if has_hash(field.dataType)]


def has_hash(data_type: T.DataType) -> bool:
    """True if Spark can make a hash of such values: not of maps and variants."""
    if isinstance(data_type, T.ArrayType):
        return has_hash(data_type.elementType)
    if isinstance(data_type, T.StructType):
        return all(has_hash(field.dataType) for field in data_type.fields)
    return not isinstance(data_type, (T.MapType, T.VariantType))


def quoted(name: str) -> str:
    """A column name in backticks, so that dots in it are part of the name."""
    return "`" + name.replace("`", "``") + "`"
