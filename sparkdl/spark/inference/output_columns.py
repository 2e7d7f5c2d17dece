"""The tensors that a module computes become columns of a DataFrame.

The executors give flat Arrow columns (`predict.Leaf`); Catalyst makes structs and vectors of them.
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
from pyspark.sql.pandas.types import from_arrow_type
from torch import nn

from sparkdl.data.collate import Arguments
from sparkdl.errors import ConfigError
from sparkdl.inference.outputs import Forward, Output, check_rows, children, pick
from sparkdl.inference.predict import Leaf, Make
from sparkdl.serialization.program.program_state import program_kept
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


@dataclass(frozen=True, kw_only=True)
class WantedColumn:
    """One output column that a model shall add."""

    column: str
    output: Output
    make: Make | None = None
    """Kind of value made of the tensor, where that is no matter of its form: a class, logits ..."""


Making = Callable[[SparkColumn], SparkColumn]
"""Makes an output column of the struct of the flat ones."""


@dataclass(frozen=True, kw_only=True)
class OutputPlan:
    """All output columns of a model, as found by running it on two rows."""

    leaves: tuple[Leaf, ...]
    columns: Mapping[str, Making]
    found: Mapping[str | None, Any]
    """Outputs of the module; see `Forward.outputs`."""

    @property
    def spark_type(self) -> T.StructType:
        """The type that the UDF returns: a struct of the flat columns."""
        return T.StructType(
            [T.StructField(leaf.name, spark_type(leaf.arrow_type)) for leaf in self.leaves]
        )


def plan_outputs(
    module: nn.Module, inputs: Arguments, forward: Forward, wanted: Sequence[WantedColumn]
) -> OutputPlan:
    """See what the module gives for two rows, and choose types; raises ConfigError."""
    module.eval()
    try:
        with torch.no_grad(), program_kept(module):
            found = forward.outputs(module, inputs)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's module and functions raise
        raise ConfigError(
            f"the module fails on two rows, by which its outputs are found: "
            f"{type(error).__name__}: {error}"
        ) from error
    leaves: list[Leaf] = []
    columns = {}
    for item in wanted:
        value = pick(found[item.output.layer], item.output.path, item.output)
        columns[item.column] = _making(value, item.output, item, inputs.num_rows, leaves)
    return OutputPlan(leaves=tuple(leaves), columns=columns, found=found)


def _making(
    value: Any, part: Output, item: WantedColumn, num_rows: int, leaves: list[Leaf]
) -> Making:
    """Return how to make a column or its ``part`` ``value``; add its flat columns to ``leaves``."""
    parts = children(value)
    if parts is None:
        return _flat(check_rows(value, num_rows, part), part, item, leaves)
    if item.make is not None:
        raise ConfigError(
            f"{item.column!r} is made of one tensor, but {part} is a {type(value).__name__} "
            f"of {list(parts)}; choose one with predictionOutput"
        )
    if not parts:
        raise ConfigError(f"{part} is an empty {type(value).__name__}")
    fields = {}
    for key, inner in parts.items():
        name = f"_{key}" if isinstance(key, int) else str(key)
        what = dataclasses.replace(part, key=(*part.path, key))
        fields[name] = _making(inner, what, item, num_rows, leaves)
    return lambda packed: F.struct(*(make(packed).alias(name) for name, make in fields.items()))


def _flat(tensor: torch.Tensor, part: Output, item: WantedColumn, leaves: list[Leaf]) -> Making:
    form = part.form
    if form == "auto":
        form = "value" if tensor.numel() == len(tensor) else "array"
    make: Make = item.make or ("array" if form == "vector" else form)
    if make in ("value", "number") and tensor.numel() != len(tensor):
        raise ConfigError(
            f"{item.column!r} is one number per row, but {part} has shape "
            f"{tuple(tensor.shape)}; it must be (rows,) or (rows, 1)"
        )
    name = f"_{len(leaves)}"
    is_vector = form == "vector" or make in ("logits", "probability")
    arrow_type = _arrow_type(tensor, make, is_double=is_vector, what=part)
    output = dataclasses.replace(part, form="auto")
    leaves.append(Leaf(name=name, output=output, make=make, arrow_type=arrow_type))
    if not is_vector:
        return lambda packed: packed[name]
    # A Python UDF cannot return vectors: over columnar input (Parquet), Spark 4.3 fails with
    # UNSUPPORTED_DATATYPE when it returns a user-defined type. And array_to_vector throws at a
    # null, which stands for a row that is skipped.
    return lambda packed: F.when(packed[name].isNotNull(), array_to_vector(packed[name]))


def _arrow_type(tensor: torch.Tensor, make: Make, *, is_double: bool, what: Output) -> pa.DataType:
    if tensor.dtype not in _ARROW_TYPES:
        raise ConfigError(f"{what} is of {tensor.dtype}, for which Spark has no type")
    if make in ("class", "number"):
        return pa.float64()
    element = pa.float64() if is_double else _ARROW_TYPES[tensor.dtype]
    depth = {"value": 0, "nested": tensor.ndim - 1}.get(make, 1)
    for _ in range(depth):
        element = pa.list_(element)
    return element


def spark_type(arrow_type: pa.DataType) -> T.DataType:
    """The Spark type of numbers, or of arrays of them."""
    if pa.types.is_list(arrow_type):
        return T.ArrayType(spark_type(arrow_type.value_type), containsNull=False)
    return from_arrow_type(arrow_type)


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
