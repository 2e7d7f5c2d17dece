"""The inputs, labels and weights of a DataFrame, and how Catalyst prepares them.

Casts happen in the JVM, as part of the query: what reaches Python is already of the wanted dtype.
Integers, booleans and bytes stay what they are; floating columns take the module's dtype; Spark
ML vectors become arrays. What a transform gets, it gets as Spark has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
from pyspark.errors import PySparkTypeError
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column as SparkColumn
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from sparkdl.config import Task
from sparkdl.data.images import require_pillow
from sparkdl.data.kinds import OwnKind
from sparkdl.data.plan import Column, Role, SpoolColumn
from sparkdl.errors import DataError
from sparkdl.inputs import Image, Named, Sequence, Sparse, Specification, Tensor
from sparkdl.spark.frames.columns import has_hash, resolve
from sparkdl.train.objective.label_losses import class_labels, ignored_class

_INTEGERS: dict[type[T.DataType], str] = {
    T.ByteType: "int8",
    T.ShortType: "int16",
    T.IntegerType: "int32",
    T.LongType: "int64",
}
_FLOATS = (T.FloatType, T.DoubleType, T.DecimalType)
"""Types whose values take the module's dtype."""
_SQL_TYPES = {
    "float32": ("float", T.FloatType),
    "float64": ("double", T.DoubleType),
    "int64": ("bigint", T.LongType),
}
_IMAGE_FIELDS = ("height", "width", "nChannels", "data")
_SPARSE_FIELDS = ("size", "indices", "values")

_NAMED_BY: dict[Role, str] = {
    "feature": "; name others by featuresCol, inputCols or inputs",
    "label": "; name another by labelCol",
    "weight": "; name another by weightCol",
}
"""Role of a column -> the remedy where it is not there."""

Found = tuple[T.StructField, SparkColumn]
"""The result of `columns.resolve`."""
Cast = tuple[SparkColumn, str]
"""The expression that makes a column's values, and their dtype in the spool."""


def prepare(
    schema: T.StructType,
    wanted: str | Named,
    role: Role,
    *,
    float_dtype: str,
    as_classes: bool = False,
) -> SpoolColumn:
    """Choose expression and dtype of one input, label or weight.

    ``wanted`` is a column, or a field of a struct column, see `columns.resolve`; or a specification
    and its name. With ``as_classes`` the values are class indices; where there is a specification
    only those of floating columns: whole numbers are class numbers already, and negative ones may
    be there to be ignored.

    Raises:
        DataError: a column is missing, or of a type of which nothing can be made.
        ConfigError: Pillow is needed and not installed.
    """
    entry = (
        Named(argument=None, specification=Tensor(wanted)) if isinstance(wanted, str) else wanted
    )
    kind = entry.specification
    found = [resolve(schema, c, _NAMED_BY[role]) for c in kind.columns]
    field = found[0][0]
    is_made = kind.transform is not None or kind.own_kind is not None
    if not isinstance(wanted, str) and (is_made or not isinstance(field.dataType, _FLOATS)):
        as_classes = False
    if kind.transform is not None:
        expression, dtype = _for_transform(found, kind, float_dtype)
    elif kind.own_kind is not None:
        expression, dtype = _as_it_is(found[0], kind, kind.own_kind)
    elif isinstance(kind, Image):
        expression, dtype = _image(found[0], kind)
    elif isinstance(kind, Sparse):
        expression, dtype = _sparse(found[0], kind, float_dtype)
    else:
        if isinstance(kind, Sequence) and not isinstance(field.dataType, T.ArrayType):
            advice = "it must be an array of numbers (make one of text by a transform)"
            raise _cannot_be_made(field, kind, advice)
        expression, dtype = _numbers(found[0], role, float_dtype, as_classes=as_classes)
    return SpoolColumn(
        name=", ".join(field.name for field, _ in found),
        role=role,
        dtype=dtype,
        as_classes=as_classes,
        argument=entry.argument,
        specification=None if isinstance(wanted, str) else kind,
        expression=expression,
    )


def prepare_trained(schema: T.StructType, entry: Named, column: Column) -> SpoolColumn:
    """Prepare an input for a module that was trained on ``column``; raises DataError."""
    trained = column.dtype
    float_dtype = trained if trained.startswith("float") else "float32"
    found = prepare(schema, entry, "feature", float_dtype=float_dtype)
    is_checked = isinstance(found.kind, (Tensor, Sequence)) and found.kind.transform is None
    fits = trained.startswith("float") or np.promote_types(found.dtype, trained) == trained
    if is_checked and not fits:
        raise DataError(
            f'column "{found.name}" becomes {found.dtype}, but the module was trained on '
            f"{trained}; cast the column in Spark first"
        )
    width = _width(resolve(schema, found.kind.columns[0])[0]) if is_checked else None
    if width is not None and isinstance(found.kind, Tensor) and width != math.prod(column.shape):
        raise DataError(
            f'column "{found.name}" has {width} value{"s" * (width != 1)} in a row; the module was '
            f"trained on rows of shape {tuple(column.shape)}"
        )
    return found


def _width(field: T.StructField) -> int | None:
    """Values of a row as far as the schema tells: of a number, and of what Spark ML has made."""
    if isinstance(field.dataType, VectorUDT):
        width = field.metadata.get("ml_attr", {}).get("num_attrs")
        return None if width is None else int(width)
    return 1 if _is_number(field.dataType) else None


def prepare_labels(
    schema: T.StructType,
    task: Task,
    loss: Any,
    *,
    labels: Items[Named],
    label_col: str | None,
    weight_col: str | None,
    float_dtype: str,
    weight_dtype: str,
) -> list[SpoolColumn]:
    """The labels, then the weight, as far as there are any; raises DataError."""
    prepare_label = partial(prepare, schema, role="label", float_dtype=float_dtype)
    classes = class_labels(loss) if labels else set()
    prepared = [prepare_label(entry, as_classes=entry.argument in classes) for entry in labels]
    if label_col is not None:
        label = prepare_label(label_col, as_classes=task.labels == "classes")
        if label.as_classes:
            label = replace(label, ignored=ignored_class(loss, task))
        if task.labels == "numbers" and label.dtype == "int64":
            depth = schema[label_col].dataType.simpleString().count("array<")
            kind = "array<" * depth + _SQL_TYPES[float_dtype][0] + ">" * depth
            label = replace(label, expression=label.expression.cast(kind), dtype=float_dtype)
        prepared.append(label)
    if weight_col is not None:
        prepared.append(prepare(schema, weight_col, "weight", float_dtype=weight_dtype))
    return prepared


def specification_of(columns: Iterable[Column]) -> Any:
    """The Param ``inputs`` that stands for these columns."""
    if any(column.argument is None for column in columns):
        return [column.kind for column in columns]
    return {column.argument: column.kind for column in columns}


def _is_number(element: T.DataType) -> bool:
    """True if tensors can hold such values."""
    return isinstance(element, (T.BooleanType, *_INTEGERS, *_FLOATS))


def _numbers(found: Found, role: Role, float_dtype: str, *, as_classes: bool) -> Cast:
    """Numbers, arrays of them, vectors and bytes."""
    field, column = found
    if isinstance(field.dataType, VectorUDT):
        if role != "feature":
            raise _wrong_type(field, "class" if as_classes else role)
        return _array(column, float_dtype), float_dtype
    if isinstance(field.dataType, T.BinaryType) and role != "weight" and not as_classes:
        return column, "uint8" if role == "feature" else "int64"  # as other labels
    depth, element = 0, field.dataType
    while isinstance(element, T.ArrayType):
        depth, element = depth + 1, element.elementType
    if not _is_number(element) or (depth and (as_classes or role == "weight")):
        raise _wrong_type(field, "class" if as_classes else role)
    if as_classes:
        return column.cast("double" if isinstance(element, _FLOATS) else "bigint"), "int64"
    dtype = _dtype(element, role, float_dtype)
    sql, exact = _SQL_TYPES.get(dtype, ("", type(element)))
    if not isinstance(element, exact):
        column = column.cast("array<" * depth + sql + ">" * depth)
    return column, dtype


def _dtype(element: T.DataType, role: Role, float_dtype: str) -> str:
    """Dtype of a column's elements, which are numbers."""
    if role == "weight" or isinstance(element, _FLOATS):
        return float_dtype
    if role == "label":
        return "int64"  # what torch's losses accept
    return "bool" if isinstance(element, T.BooleanType) else _INTEGERS[type(element)]


def _array(column: SparkColumn, dtype: str) -> SparkColumn:
    # vector_to_array throws at a null, which would end the job without naming the column.
    return F.when(column.isNotNull(), vector_to_array(column, dtype=dtype))


def _for_transform(found: Items[Found], kind: Specification, float_dtype: str) -> Cast:
    """The columns together, as one struct."""
    parts = []
    for number, (field, column) in enumerate(found):
        _require_hash(field, kind, "; use map_entries(column)")
        is_vector = isinstance(field.dataType, VectorUDT)
        values = _array(column, float_dtype) if is_vector else column
        parts.append(values.alias(f"c{number}"))
    if isinstance(kind, Image):
        require_pillow()
    return F.struct(*parts), "uint8" if isinstance(kind, Image) else float_dtype


def _image(found: Found, kind: Image) -> Cast:
    field, column = found
    names = field.dataType.names if isinstance(field.dataType, T.StructType) else []
    if isinstance(field.dataType, T.BinaryType):
        require_pillow()
    elif not set(_IMAGE_FIELDS) <= set(names):
        advice = "it must be binary (a file's bytes) or Spark's image struct"
        if isinstance(field.dataType, T.StringType):
            advice += '; spark.read.format("binaryFile").load(folder) reads files, as "content"'
        raise _cannot_be_made(field, kind, advice)
    elif kind.num_parts:
        advice = "such images are decoded already; use decode='spool'"
        raise _cannot_be_made(field, kind, advice)
    return column, "uint8"


def _sparse(found: Found, kind: Sparse, float_dtype: str) -> Cast:
    field, column = found
    if isinstance(field.dataType, VectorUDT):
        column = F.unwrap_udt(column)
    elif not _is_sparse_struct(field.dataType):
        advice = (
            "it must be a Spark ML vector, or a struct of size (int), indices (array of int) and "
            "values (array of numbers)"
        )
        raise _cannot_be_made(field, kind, advice)
    types = ("int", "array<int>", f"array<{_SQL_TYPES[float_dtype][0]}>")
    parts = [
        column[name].cast(sql).alias(name) for name, sql in zip(_SPARSE_FIELDS, types, strict=True)
    ]
    return F.when(column.isNotNull(), F.struct(*parts)), float_dtype


def _is_sparse_struct(data_type: T.DataType) -> bool:
    if not isinstance(data_type, T.StructType) or not set(_SPARSE_FIELDS) <= set(data_type.names):
        return False
    size, indices, values = (data_type[name].dataType for name in _SPARSE_FIELDS)
    return (
        isinstance(size, T.IntegralType)
        and isinstance(indices, T.ArrayType)
        and isinstance(indices.elementType, T.IntegralType)
        and isinstance(values, T.ArrayType)
        and _is_number(values.elementType)
    )


def _as_it_is(found: Found, kind: Specification, own: OwnKind) -> Cast:
    field, column = found
    _require_hash(field, kind)
    try:
        arrow = to_arrow_type(field.dataType)
    except PySparkTypeError as error:
        raise _cannot_be_made(field, kind, "Arrow has no such type") from error
    if not any(test(arrow) for test in own.types):
        tests = ", ".join(test.__name__ for test in own.types)
        raise _cannot_be_made(field, kind, f"in Arrow it is {arrow}, which is none of: {tests}")
    return column, own.dtype


def _require_hash(field: T.StructField, kind: Specification, remedy: str = "") -> None:
    if not has_hash(field.dataType):
        raise _cannot_be_made(field, kind, f"rows with it cannot be told apart{remedy}")


def _cannot_be_made(field: T.StructField, kind: Specification, advice: str) -> DataError:
    return DataError(
        f'column "{field.name}" has type {field.dataType.simpleString()}, of which '
        f"{type(kind).__name__} cannot be made; {advice}"
    )


def _wrong_type(field: T.StructField, role: Role | Literal["class"]) -> DataError:
    advice = {
        "class": "a class is a whole number from 0 (index strings with StringIndexer)",
        "label": "a label is a number, an array of numbers or binary (index strings with "
        "StringIndexer)",
        "weight": "a weight is a number",
        "feature": "a feature is a number, a boolean, an array of numbers, a Spark ML vector or "
        "binary; inputs={...} takes images (sparkdl.Image), rows of different lengths "
        "(sparkdl.Sequence) and, with a transform, whatever else, such as text",
    }[role]
    if role == "class" and isinstance(field.dataType, T.ArrayType):
        made = f"array_position({field.name}, array_max({field.name})) - 1"
        advice = f'a class is a whole number from 0; of a one-hot array it is F.expr("{made}")'
    if role == "class" and isinstance(field.dataType, VectorUDT):
        advice = "a class is a whole number from 0: leave OneHotEncoder out"
    if role == "feature" and (numbers := _as_numbers(field)):
        advice = f"{numbers}; {advice}"
    return DataError(
        f'column "{field.name}" has type {field.dataType.simpleString()} '
        f"and cannot become a tensor; {advice}"
    )


def _as_numbers(field: T.StructField) -> str:
    """Say how to make numbers of values of a common type that are none; empty: of another."""
    depth, element, name = 0, field.dataType, field.name
    while isinstance(element, T.ArrayType):
        depth, element = depth + 1, element.elementType
    if depth and isinstance(element, T.StringType):
        return f'cast the text: F.col("{name}").cast("{"array<" * depth}float{">" * depth}")'
    if depth:
        return ""
    if isinstance(element, T.StringType):
        return (
            "read numbers of a CSV file with inferSchema=True, or cast the text: "
            f'F.col("{name}").cast("float")'
        )
    if isinstance(element, T.StructType) and element.names:
        return f'name a field of it, such as "{name}.{element.names[0]}"'
    calls = {T.DateType: "unix_date", T.TimestampType: "unix_seconds", T.MapType: "map_values"}
    call = calls.get(type(element))
    return "" if call is None else f'make numbers of it, such as by F.{call}("{name}")'
