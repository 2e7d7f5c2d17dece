"""The tensors that a module computes become columns of a DataFrame.

The executors give flat Arrow columns, one for each tensor (`predict.Leaf`); Catalyst puts structs
and vectors together. The module is run once on zeros, on the driver, to see what there is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from torch import nn

from sparkdl.data.collate import Arguments
from sparkdl.errors import ConfigError
from sparkdl.inference.outputs import Forward, Key, Output, Source, check_rows, children, pick
from sparkdl.inference.predict import Leaf, Make
from sparkdl.spark.frames.columns import quoted

_ARROW_TYPES: dict[torch.dtype, pa.DataType] = {
    torch.float16: pa.float32(),
    torch.bfloat16: pa.float32(),
    torch.float32: pa.float32(),
    torch.float64: pa.float64(),
    torch.bool: pa.bool_(),
    torch.int8: pa.int8(),
    torch.uint8: pa.int16(),
    torch.int16: pa.int16(),
    torch.int32: pa.int32(),
    torch.int64: pa.int64(),
}
_SPARK_TYPES: dict[pa.DataType, T.DataType] = {
    pa.float32(): T.FloatType(),
    pa.float64(): T.DoubleType(),
    pa.bool_(): T.BooleanType(),
    pa.int8(): T.ByteType(),
    pa.int16(): T.ShortType(),
    pa.int32(): T.IntegerType(),
    pa.int64(): T.LongType(),
}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One output column that a model shall add."""

    column: str
    output: Output
    make: Make | None = None
    """What is made of the tensor, where that is no matter of its form: a class, logits ..."""


@dataclass(frozen=True)
class Assembly:
    """How an output column is put together of the flat columns."""

    leaf: int = -1
    """Number of the flat column; -1 for a struct."""
    as_vector: bool = False
    fields: tuple[tuple[str, Assembly], ...] = ()

    def expression(self, flat: Callable[[int], SparkColumn]) -> SparkColumn:
        """The column as Spark computes it; ``flat`` gives the flat ones."""
        if self.fields:
            return F.struct(*(part.expression(flat).alias(name) for name, part in self.fields))
        # A Python UDF cannot return vectors: over columnar input (Parquet), Spark 4.3 fails with
        # UNSUPPORTED_DATATYPE when it returns a user-defined type.
        values = flat(self.leaf)
        # array_to_vector throws at a null, which stands for a row that is skipped.
        return F.when(values.isNotNull(), array_to_vector(values)) if self.as_vector else values


@dataclass(frozen=True, kw_only=True)
class OutputPlan:
    """All output columns of a model, as found by running it on zeros."""

    leaves: tuple[Leaf, ...]
    columns: Mapping[str, Assembly]

    @property
    def spark_type(self) -> T.StructType:
        """What the UDF returns: a struct of the flat columns."""
        return T.StructType(
            [T.StructField(leaf.name, spark_type(leaf.arrow_type)) for leaf in self.leaves]
        )


def plan_outputs(
    module: nn.Module, inputs: Arguments, forward: Forward, wanted: Sequence[Wanted]
) -> OutputPlan:
    """See what the module gives for ``inputs``, two rows of zeros, and choose the columns' types.

    Raises:
        ConfigError: a wanted output is not there, or is nothing that a column can hold.
    """
    module.eval()
    try:
        with torch.inference_mode():
            found = forward.outputs(module, inputs)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's module and functions raise
        raise ConfigError(
            f"the module fails on two rows of zeros, by which its outputs are found: "
            f"{type(error).__name__}: {error}"
        ) from error
    planner = _Planner(num_rows=inputs.num_rows)
    columns = {}
    for item in wanted:
        path = item.output.path
        value = pick(found[item.output.layer], path, item.output)
        columns[item.column] = planner.assemble(value, path, item)
    return OutputPlan(leaves=tuple(planner.leaves), columns=columns)


class _Planner:
    """Numbers the tensors as they are met."""

    def __init__(self, num_rows: int) -> None:
        self.leaves: list[Leaf] = []
        self._num_rows = num_rows

    def assemble(self, value: Any, path: tuple[Key, ...], item: Wanted) -> Assembly:
        """A struct for several tensors, a flat column for one."""
        what = dataclasses.replace(item.output, key=path)
        parts = children(value)
        if parts is None:
            return self._flat(check_rows(value, self._num_rows, what), path, item)
        if item.make is not None:
            raise ConfigError(
                f"{item.column!r} is made of one tensor, but {what} is a {type(value).__name__} "
                f"of {list(parts)}; choose one with predictionOutput"
            )
        if not parts:
            raise ConfigError(f"{what} is an empty {type(value).__name__}")
        names = {key: f"_{key}" if isinstance(key, int) else str(key) for key in parts}
        fields = tuple(
            (names[key], self.assemble(part, (*path, key), item)) for key, part in parts.items()
        )
        return Assembly(fields=fields)

    def _flat(self, tensor: torch.Tensor, path: tuple[Key, ...], item: Wanted) -> Assembly:
        source = Source(item.output.layer, path)
        form = item.output.form
        if form == "auto":
            form = "value" if tensor.numel() == len(tensor) else "array"
        make: Make = item.make or ("array" if form == "vector" else form)
        if make in ("value", "number") and tensor.numel() != len(tensor):
            raise ConfigError(
                f"{item.column!r} is one number per row, but {source} has shape "
                f"{tuple(tensor.shape)}; it must be (rows,) or (rows, 1)"
            )
        leaf = Leaf(
            name=f"_{len(self.leaves)}",
            source=source,
            make=make,
            arrow_type=_arrow_type(tensor, make, is_double=form == "vector", source=source),
        )
        self.leaves.append(leaf)
        is_vector = form == "vector" or make in ("logits", "probability")
        return Assembly(leaf=len(self.leaves) - 1, as_vector=is_vector)


def _arrow_type(
    tensor: torch.Tensor, make: Make, *, is_double: bool, source: Source
) -> pa.DataType:
    if tensor.dtype not in _ARROW_TYPES:
        raise ConfigError(f"{source} is of {tensor.dtype}, for which Spark has no type")
    if make in ("class", "number"):
        return pa.float64()
    element = _ARROW_TYPES[tensor.dtype]
    if make in ("logits", "probability") or is_double:
        element = pa.float64()
    depth = {"value": 0, "nested": tensor.ndim - 1}.get(make, 1)
    for _ in range(depth):
        element = pa.list_(element)
    return element


def spark_type(arrow_type: pa.DataType) -> T.DataType:
    """The Spark type of numbers, or of arrays of them."""
    if pa.types.is_list(arrow_type):
        return T.ArrayType(spark_type(arrow_type.value_type), containsNull=False)
    return _SPARK_TYPES[arrow_type]


def by_rows(
    dataset: DataFrame, schema: T.StructType, marker: str
) -> tuple[DataFrame, Callable[[SparkColumn], SparkColumn]]:
    """Keep Spark from running the UDF over columnar batches that it cannot handle.

    Over columnar files, Spark 4.3 passes all columns through a converter that fails with
    UNSUPPORTED_DATATYPE on user-defined types, such as the vectors of Spark ML. An expression
    that the optimizer must not move makes the plan go row by row below the UDF; it stays in the
    plan because the outputs depend on it.

    Returns:
        The DataFrame to apply the UDF to, and what to wrap each output column in.
    """
    if all(_is_convertible(field.dataType) for field in schema.fields):
        return dataset, lambda column: column
    rows = dataset.withColumn(marker, F.spark_partition_id())
    return rows, lambda column: F.when(F.col(marker) >= 0, column)


def _is_convertible(data_type: T.DataType) -> bool:
    if isinstance(data_type, T.ArrayType):
        return _is_convertible(data_type.elementType)
    if isinstance(data_type, T.MapType):
        return _is_convertible(data_type.keyType) and _is_convertible(data_type.valueType)
    if isinstance(data_type, T.StructType):
        return all(_is_convertible(field.dataType) for field in data_type.fields)
    known = (T.NumericType, T.StringType, T.BinaryType, T.BooleanType, T.DateType)
    return isinstance(data_type, (*known, T.TimestampType, T.TimestampNTZType))


def vectors_to_arrays(rows: DataFrame) -> DataFrame:
    """``rows`` with Spark ML vectors, also nested ones, as arrays, which every reader knows."""
    changed = {
        item.name: _without_vectors(F.col(quoted(item.name)), item.dataType)
        for item in rows.schema.fields
        if _holds_vectors(item.dataType)
    }
    return rows.withColumns(changed)


def _holds_vectors(kind: T.DataType) -> bool:
    if isinstance(kind, T.StructType):
        return any(_holds_vectors(item.dataType) for item in kind.fields)
    if isinstance(kind, T.ArrayType):
        return _holds_vectors(kind.elementType)
    return isinstance(kind, VectorUDT)


def _without_vectors(column: SparkColumn, kind: T.DataType) -> SparkColumn:
    if not _holds_vectors(kind):
        return column
    if isinstance(kind, T.ArrayType):
        element = kind.elementType
        return F.transform(column, lambda item: _without_vectors(item, element))
    if isinstance(kind, T.StructType):
        fields = [
            _without_vectors(column.getField(item.name), item.dataType).alias(item.name)
            for item in kind.fields
        ]
        return F.when(column.isNotNull(), F.struct(*fields))
    return F.when(column.isNotNull(), vector_to_array(column))  # which refuses null
