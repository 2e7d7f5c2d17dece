"""How does a trained module become a Spark ML model?

A model adds columns to a DataFrame. Only the input columns travel to Python, as Arrow, through
one UDF whose struct holds all that the model computes; see `sparkdl.predict` for what happens
there.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.functions import arrow_udf
from torch import nn

from sparkdl import packing, predict
from sparkdl.data.assemble import example_arguments
from sparkdl.errors import ConfigError, DataError, SparkDLError
from sparkdl.inputs import Named
from sparkdl.outputs import Forward, Output
from sparkdl.parambase import with_accessors
from sparkdl.params import ClassOutputParams, PredictParams
from sparkdl.plan import Column
from sparkdl.spark.columns import Prepared, check_fits, find, prepare
from sparkdl.spark.outputs import Wanted, by_rows, plan_outputs
from sparkdl.spark.session import is_case_sensitive, is_connect
from sparkdl.spark.specified import trained_entry
from sparkdl.summary import TrainingSummary

logger = logging.getLogger(__name__)
M = TypeVar("M", bound="TorchModel")

BROADCAST_BYTES = 1 << 20
"""Larger modules travel in a broadcast variable, smaller ones inside the UDF."""
ARTIFACT_BYTES = 4 << 20
"""The same for Spark Connect, where messages are limited and a file costs a round trip."""


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
        if any(column.specification for column in self._columns):
            self._set(inputs=_specified(self._columns))
        elif len(names) == 1:
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
        wanted = self._wanted()
        if not wanted:
            logger.warning("%s: all output columns are off; transform does nothing", self.uid)
            return dataset
        case = is_case_sensitive(dataset.sparkSession)
        self._check_outputs(schema, [item.column for item in wanted], is_case_sensitive=case)
        inputs = self._inputs(schema, is_case_sensitive=case)
        forward = self._forward(item.output.layer for item in wanted)
        plan = plan_outputs(self._module, example_arguments(self._columns), forward, wanted)
        common = self._module_task(dataset.sparkSession, forward)
        task = predict.PredictTask(**common, leaves=plan.leaves)
        udf: Any = arrow_udf(  # type: ignore[call-overload]
            predict.udf_function(task), plan.spark_type
        )
        packed = f"{self.uid}_output"
        marker = f"{self.uid}_partition"
        rows, seal = by_rows(dataset, schema, marker)

        def flat(leaf: int) -> SparkColumn:
            return F.col(packed)[plan.leaves[leaf].name]

        struct_column = udf(*(entry.expression for entry in inputs))
        projected = {name: seal(how.expression(flat)) for name, how in plan.columns.items()}
        return rows.withColumn(packed, struct_column).withColumns(projected).drop(packed, marker)

    def _wanted(self) -> list[Wanted]:
        """The output columns, without those that are off."""
        others: dict[str, Output] = self.getOrDefault("outputs")
        columns = [*self._predictions(), *(Wanted(column=n, output=o) for n, o in others.items())]
        return [item for item in columns if item.column]

    def _predictions(self) -> list[Wanted]:
        """The columns that are made of the module's prediction."""
        return [Wanted(column=self.getOrDefault("predictionCol"), output=self._predicted())]

    def _predicted(self) -> Output:
        """Which of the module's outputs is the prediction."""
        return self.getOrDefault("predictionOutput") or Output()

    def _forward(self, layers: Iterable[str | None]) -> Forward:
        return Forward(
            preprocessing=self.getOrDefault("preprocessing"),
            postprocessing=self.getOrDefault("postprocessing"),
            layers=tuple(dict.fromkeys(name for name in layers if name is not None)),
        )

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
        specified = self._specified_inputs()
        if specified:
            return [
                trained_entry(schema, entry, column, is_case_sensitive=is_case_sensitive)
                for entry, column in zip(specified, self._inputs_now(), strict=True)
            ]
        names = self.feature_columns()
        if len(names) != len(self._columns):
            raise ConfigError(
                f"the module was trained on {len(self._columns)} column(s); received {list(names)}"
            )
        return [
            _trained_input(schema, name, column, is_case_sensitive=is_case_sensitive)
            for name, column in zip(names, self._columns, strict=True)
        ]

    def _specified_inputs(self) -> tuple[Named, ...]:
        """What the Param ``inputs`` names, in the order of training; empty if it is not set.

        Raises:
            ConfigError: it names other inputs than those of training.
        """
        specified = self.specified()
        trained = [column.argument for column in self._columns]
        by_argument = {entry.argument: entry for entry in specified}
        if specified and set(by_argument) == set(trained) and None not in by_argument:
            return tuple(by_argument[argument] for argument in trained)
        if specified and [entry.argument for entry in specified] != trained:
            raise ConfigError(
                f"the module was trained on the inputs {trained}; received "
                f"{[entry.argument for entry in specified]}"
            )
        return specified

    def _inputs_now(self) -> tuple[Column, ...]:
        """The trained inputs with the columns that the Params name now."""
        specified = self._specified_inputs()
        if specified:
            return tuple(
                replace(column, name=entry.specification.name, specification=entry.specification)
                for entry, column in zip(specified, self._columns, strict=True)
            )
        return tuple(
            replace(column, name=name)
            for name, column in zip(self.feature_columns(), self._columns, strict=True)
        )

    def _module_task(self, spark: SparkSession, forward: Forward) -> dict[str, Any]:
        """The fields of a `predict.ModuleTask`."""
        batch_size = self.getOrDefault("batchSize")
        if batch_size < 1:
            raise ConfigError(f"batchSize must be at least 1; received {batch_size}")
        packed = packing.pack(self._module)
        return {
            "digest": packed.digest,
            "fetch": self._fetch(spark, packed),
            "columns": self._inputs_now(),
            "batch_size": batch_size,
            "device": predict.checked_device(self.getOrDefault("device")),
            "forward": forward,
        }

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

    def _predictions(self) -> list[Wanted]:
        column = self.getOrDefault("predictionCol")
        return [Wanted(column=column, output=self._predicted(), make="number")]


@with_accessors
class TorchClassifierModel(TorchModel, ClassOutputParams):
    """A trained module that tells classes apart.

    ``transform`` adds the index of the likeliest class (``predictionCol``, a double), the
    module's outputs, taken as logits (``rawPredictionCol``, a vector), and their softmax
    (``probabilityCol``, a vector). A module with one output per row is taken as the logit of
    class 1: the raw prediction is ``[-z, z]`` and the probabilities come from the sigmoid. An
    empty name turns a column off.
    """

    @property
    def numClasses(self) -> int:
        """Number of classes that the labels of the training rows have."""
        if self._num_classes is None:
            raise SparkDLError(f"{self.uid} was made without a number of classes")
        return self._num_classes

    def _predictions(self) -> list[Wanted]:
        made: dict[str, predict.Make] = {
            "predictionCol": "class",
            "rawPredictionCol": "logits",
            "probabilityCol": "probability",
        }
        return [
            Wanted(column=self.getOrDefault(param), output=self._predicted(), make=make)
            for param, make in made.items()
        ]


def _specified(columns: Sequence[Column]) -> Any:
    """The Param ``inputs`` that stands for these columns."""
    if any(column.argument is None for column in columns):
        return [column.kind for column in columns]
    return {column.argument: column.kind for column in columns}


def example_inputs(columns: Sequence[Column], num_rows: int = 2) -> tuple[torch.Tensor, ...] | None:
    """Inputs of zeros, shaped like the module's, to export it; None if some go by name."""
    example = example_arguments(columns, num_rows)
    return None if any(example.names) else example.values


def _trained_input(
    schema: T.StructType, name: str, column: Column, *, is_case_sensitive: bool
) -> Prepared:
    """Prepare a column for a module that was trained on ``column``.

    Raises:
        DataError: it is missing, or its numbers do not fit into the trained dtype.
    """
    float_dtype = column.dtype if column.dtype.startswith("float") else "float32"
    prepared = prepare(
        schema, name, "feature", float_dtype=float_dtype, is_case_sensitive=is_case_sensitive
    )
    check_fits(name, prepared.dtype, column.dtype)
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
