"""How does a trained module become a Spark ML model?

A model adds columns to a DataFrame. Only the input columns travel to Python, as Arrow, through
one UDF whose struct holds all that the model computes; see `sparkdl.predict` for what happens
there.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pyarrow as pa
import torch
from pyspark.ml import Model
from pyspark.ml.functions import array_to_vector
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.functions import arrow_udf
from torch import nn

from sparkdl import packing, predict
from sparkdl.errors import ConfigError, DataError, SparkDLError
from sparkdl.parambase import with_accessors
from sparkdl.params import ClassOutputParams, PredictParams
from sparkdl.plan import Column
from sparkdl.spark.columns import Prepared, find, prepare
from sparkdl.spark.session import is_case_sensitive, is_connect
from sparkdl.summary import TrainingSummary

logger = logging.getLogger(__name__)
M = TypeVar("M", bound="TorchModel")

BROADCAST_BYTES = 1 << 20
"""Larger modules travel in a broadcast variable, smaller ones inside the UDF."""
ARTIFACT_BYTES = 4 << 20
"""The same for Spark Connect, where messages are limited and a file costs a round trip."""

_SPARK_TYPES: dict[torch.dtype, tuple[T.DataType, pa.DataType]] = {
    torch.float16: (T.FloatType(), pa.float32()),
    torch.bfloat16: (T.FloatType(), pa.float32()),
    torch.float32: (T.FloatType(), pa.float32()),
    torch.float64: (T.DoubleType(), pa.float64()),
    torch.bool: (T.BooleanType(), pa.bool_()),
    torch.int8: (T.ByteType(), pa.int8()),
    torch.uint8: (T.ShortType(), pa.int16()),
    torch.int16: (T.ShortType(), pa.int16()),
    torch.int32: (T.IntegerType(), pa.int32()),
    torch.int64: (T.LongType(), pa.int64()),
}
_DOUBLE = _SPARK_TYPES[torch.float64]
_DOUBLES = (T.ArrayType(T.DoubleType(), containsNull=False), pa.list_(pa.float64()))


@with_accessors
class TorchModel(Model, PredictParams, MLWritable, MLReadable["TorchModel"]):
    """A trained module as a Spark ML model.

    ``transform`` adds ``predictionCol``: a number for a module that gives ``(rows,)`` or
    ``(rows, 1)``, else an array, flattened in row-major order if it has more dimensions. Float
    and integer outputs keep their dtype.
    """

    module_factory: Any = None
    """The callable that made the module, if there is one; see `sparkdl.modulefile`."""

    def __init__(
        self,
        module: nn.Module,
        columns: Sequence[Column],
        *,
        num_classes: int | None = None,
        summary: TrainingSummary | None = None,
    ) -> None:
        super().__init__()
        self._module = module.eval()
        self._columns = tuple(columns)
        self._num_classes = num_classes
        self._summary = summary
        self._sent: dict[str, tuple[Any, Callable[[], packing.PackedModule]]] = {}
        names = [column.name for column in self._columns]
        if len(names) == 1:
            self._set(featuresCol=names[0])
        else:
            self._set(inputCols=names)

    @property
    def module(self) -> nn.Module:
        """The trained module, on the CPU, in eval mode."""
        return self._module

    @property
    def columns(self) -> tuple[Column, ...]:
        """The inputs as the module was trained on them."""
        return self._columns

    @property
    def hasSummary(self) -> bool:
        """Whether the model knows how it was trained."""
        return self._summary is not None

    @property
    def summary(self) -> TrainingSummary:
        """How the model was trained.

        Raises:
            SparkDLError: there is no summary.
        """
        if self._summary is None:
            raise SparkDLError(f"No training summary available for this {type(self).__name__}")
        return self._summary

    def _transform(self, dataset: DataFrame) -> DataFrame:
        schema = dataset.schema
        outputs = self._outputs()
        if not outputs:
            logger.warning("%s: all output columns are off; transform does nothing", self.uid)
            return dataset
        case = is_case_sensitive(dataset.sparkSession)
        self._check_outputs(schema, list(outputs.values()), is_case_sensitive=case)
        inputs = self._inputs(schema, is_case_sensitive=case)
        kind, types = self._types()
        task = self._task(dataset.sparkSession, kind, [(name, types[name]) for name in outputs])
        struct = T.StructType([T.StructField(name, types[name][0]) for name in outputs])
        udf: Any = arrow_udf(predict.udf_function(task), struct)  # type: ignore[call-overload]
        packed = f"{self.uid}_output"
        marker = f"{self.uid}_partition"
        rows, seal = _by_rows(dataset, schema, marker)
        struct_column = udf(*(entry.expression for entry in inputs))
        projected = {
            column: seal(self._column(field, F.col(packed)[field]))
            for field, column in outputs.items()
        }
        return rows.withColumn(packed, struct_column).withColumns(projected).drop(packed, marker)

    def _outputs(self) -> dict[str, str]:
        """Field of the UDF's struct -> output column, without the columns that are off."""
        columns = {"prediction": self.value("predictionCol")}
        return {field: column for field, column in columns.items() if column}

    def _column(self, field: str, value: SparkColumn) -> SparkColumn:
        """The output column made of a field of the UDF's struct."""
        return value

    def _types(self) -> tuple[predict.Kind, dict[str, tuple[T.DataType, pa.DataType]]]:
        """What becomes of the module's output; here found by running it on zeros."""
        with torch.inference_mode():
            output = self._module.eval()(*example_inputs(self._columns))
        predict.check_output(output, 2)
        if output.dtype not in _SPARK_TYPES:
            raise ConfigError(f"the module returns {output.dtype}, for which Spark has no type")
        spark_type, arrow_type = _SPARK_TYPES[output.dtype]
        if output.numel() == len(output):
            return "value", {"prediction": (spark_type, arrow_type)}
        lists = (T.ArrayType(spark_type, containsNull=False), pa.list_(arrow_type))
        return "array", {"prediction": lists}

    def _check_outputs(
        self, schema: T.StructType, names: list[str], *, is_case_sensitive: bool
    ) -> None:
        for name in names:
            found = find(schema, name, is_case_sensitive=is_case_sensitive)
            if found:
                raise DataError(
                    f'column "{found[0].name}" is in the DataFrame already; drop it, or choose '
                    f"another name for the output of {self.uid}"
                )
        if len({name if is_case_sensitive else name.lower() for name in names}) < len(names):
            raise ConfigError(f"the output columns of {self.uid} must differ; received {names}")

    def _inputs(self, schema: T.StructType, *, is_case_sensitive: bool) -> list[Prepared]:
        """The input columns, cast by Spark to what the module was trained on."""
        names = self.feature_columns()
        if len(names) != len(self._columns):
            raise ConfigError(
                f"the module was trained on {len(self._columns)} column(s); received {list(names)}"
            )
        return [
            _trained_input(schema, name, column, is_case_sensitive=is_case_sensitive)
            for name, column in zip(names, self._columns, strict=True)
        ]

    def _task(
        self,
        spark: SparkSession,
        kind: predict.Kind,
        fields: list[tuple[str, tuple[T.DataType, pa.DataType]]],
    ) -> predict.PredictTask:
        batch_size = self.getOrDefault("batchSize")
        if batch_size < 1:
            raise ConfigError(f"batchSize must be at least 1; received {batch_size}")
        packed = packing.pack(self._module)
        columns = tuple(
            Column(name=name, role="feature", dtype=column.dtype, shape=column.shape)
            for name, column in zip(self.feature_columns(), self._columns, strict=True)
        )
        return predict.PredictTask(
            digest=packed.digest,
            fetch=self._fetch(spark, packed),
            columns=columns,
            batch_size=batch_size,
            device=predict.checked_device(self.getOrDefault("device")),
            kind=kind,
            fields=tuple((name, arrow_type) for name, (_, arrow_type) in fields),
        )

    def _fetch(
        self, spark: SparkSession, packed: packing.PackedModule
    ) -> Callable[[], packing.PackedModule]:
        """How workers get the packed module. A large one is sent once per session and content."""
        connect = is_connect(spark)
        if packed.num_bytes <= (ARTIFACT_BYTES if connect else BROADCAST_BYTES):
            return packing.SentByValue(packed)
        owner = spark if connect else spark.sparkContext
        sent = self._sent.get(packed.digest)
        if sent is None or sent[0] is not owner:
            fetch = _as_artifact(spark, packed) if connect else _as_broadcast(spark, packed)
            self._sent.clear()
            self._sent[packed.digest] = sent = (owner, fetch)
        return sent[1]

    def write(self) -> MLWriter:
        """A writer that saves Params, module and summary without pickle."""
        from sparkdl.persist import ModelWriter

        return ModelWriter(self)

    @classmethod
    def read(cls: type[M]) -> MLReader[M]:
        """A reader for what `write` saved."""
        from sparkdl.persist import ModelReader

        return ModelReader(cls)


@with_accessors
class TorchRegressorModel(TorchModel):
    """A trained module that predicts one number per row; ``predictionCol`` is a double."""

    def _types(self) -> tuple[predict.Kind, dict[str, tuple[T.DataType, pa.DataType]]]:
        return "value", {"prediction": _DOUBLE}


@with_accessors
class TorchClassifierModel(TorchModel, ClassOutputParams):
    """A trained module that tells classes apart.

    ``transform`` adds the index of the likeliest class (``predictionCol``, a double), the
    module's outputs, taken as logits (``rawPredictionCol``, a vector), and their softmax
    (``probabilityCol``, a vector). A module with one output per row is taken as the logit of
    class 1: the raw prediction is ``[-z, z]`` and the probabilities come from the sigmoid. An
    empty name turns a column off.
    """

    _columns_of: ClassVar[dict[str, str]] = {
        "prediction": "predictionCol",
        "rawPrediction": "rawPredictionCol",
        "probability": "probabilityCol",
    }

    @property
    def numClasses(self) -> int:
        """Number of classes that the labels of the training rows have."""
        if self._num_classes is None:
            raise SparkDLError(f"{self.uid} was made without a number of classes")
        return self._num_classes

    def _outputs(self) -> dict[str, str]:
        columns = {field: self.value(param) for field, param in self._columns_of.items()}
        return {field: column for field, column in columns.items() if column}

    def _column(self, field: str, value: SparkColumn) -> SparkColumn:
        # The UDF itself cannot return vectors: over columnar input (Parquet), Spark 4.3 fails
        # with UNSUPPORTED_DATATYPE when a Python UDF returns a user-defined type.
        return value if field == "prediction" else array_to_vector(value)

    def _types(self) -> tuple[predict.Kind, dict[str, tuple[T.DataType, pa.DataType]]]:
        return "classes", {
            "prediction": _DOUBLE,
            "rawPrediction": _DOUBLES,
            "probability": _DOUBLES,
        }


def example_inputs(columns: Sequence[Column], num_rows: int = 2) -> tuple[torch.Tensor, ...]:
    """Inputs of zeros, shaped like the module's; to see what it returns, or to export it."""
    return tuple(
        torch.zeros(num_rows, *column.shape, dtype=getattr(torch, column.dtype))
        for column in columns
    )


def _by_rows(
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


def _trained_input(
    schema: T.StructType, name: str, column: Column, *, is_case_sensitive: bool
) -> Prepared:
    """Prepare a column for a module that was trained on ``column``.

    Raises:
        DataError: it is missing, or its numbers do not fit into the trained dtype.
    """
    trained = torch.zeros((), dtype=getattr(torch, column.dtype))
    float_dtype = column.dtype if trained.is_floating_point() else "float32"
    prepared = prepare(
        schema, name, "feature", float_dtype=float_dtype, is_case_sensitive=is_case_sensitive
    )
    at_hand = getattr(torch, prepared.dtype)
    fits = (
        trained.is_floating_point() or torch.promote_types(at_hand, trained.dtype) is trained.dtype
    )
    if not fits:
        raise DataError(
            f'column "{name}" becomes {prepared.dtype}, but the module was trained on '
            f"{column.dtype}; cast the column in Spark first"
        )
    return prepared


def _as_broadcast(spark: SparkSession, packed: packing.PackedModule) -> packing.SentByBroadcast:
    return packing.SentByBroadcast(spark.sparkContext.broadcast(packed))


def _as_artifact(spark: SparkSession, packed: packing.PackedModule) -> packing.SentAsArtifact:
    name = f"sparkdl-{packed.digest[:32]}.module"
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
        path = Path(folder) / name
        packing.write_packed(packed, path)
        spark.addArtifacts(str(path), file=True)
    return packing.SentAsArtifact(name)
