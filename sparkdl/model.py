"""Trained modules as Spark ML models, which add columns by one UDF; see `inference.predict`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLReader, MLWriter
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from torch import nn

from sparkdl.config import CUSTOM, Task
from sparkdl.data.collate import Arguments, example_arguments
from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError, DataError, SparkDLError
from sparkdl.inference import predict
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.inference.evaluate_rows import Measures, chosen_curves
from sparkdl.inference.outputs import Forward, Output
from sparkdl.inference.regression import REGRESSION
from sparkdl.inference.scores import Evaluation
from sparkdl.inputs import Named, Tensor
from sparkdl.mesh import Mesh
from sparkdl.report.summary import TrainingSummary
from sparkdl.runtime.arguments import plain_arguments
from sparkdl.runtime.tracebacks import plainly
from sparkdl.serialization.stored_module import StoredModule, seen
from sparkdl.serialization.travel.packed_module import travelled
from sparkdl.spark.fit.begin_module import floating_dtype
from sparkdl.spark.frames.columns import (
    find,
    quoted,
    refuse_outputs,
    require,
    schema_of,
)
from sparkdl.spark.frames.frame_sample import take_look
from sparkdl.spark.frames.prepare_columns import prepare_labels, prepare_trained, specification_of
from sparkdl.spark.frames.row_table import spool_columns
from sparkdl.spark.frames.user_data import check_params, rows_of
from sparkdl.spark.inference import evaluate_model, evaluate_task, gang_transform
from sparkdl.spark.inference.arrow_udf import with_columns
from sparkdl.spark.inference.output_columns import WantedColumn, plan_outputs
from sparkdl.spark.inference.send_module import Sender
from sparkdl.spark.params import param_table
from sparkdl.spark.params.accessors import ClassifierModelAccessors, ModelAccessors
from sparkdl.spark.params.converters import to_metrics
from sparkdl.spark.params.params import CheckedParams, ClassOutputParams, Saved, with_params
from sparkdl.sync.frozen_layers import evaluating
from sparkdl.train.training_state import TrainingState

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap

logger = logging.getLogger(__name__)
M = TypeVar("M", bound="TorchModel")
T = TypeVar("T")


@with_params(param_table.ModelArguments)
class TorchModel(Model, CheckedParams, Saved, MLReadable["TorchModel"], ModelAccessors):
    """A trained module as a Spark ML model.

    ``transform`` adds ``predictionCol``: a number for a module that gives ``(rows,)`` or
    ``(rows, 1)``, else an array, flattened in row-major order if it has more dimensions. Float
    and integer outputs keep their dtype.
    """

    _task: ClassVar[Task] = CUSTOM
    _loss: ClassVar[str] = "mse"

    module_factory: Any = None
    """The callable that made the module, if there is one; see `serialization.saved_module`."""

    _training_state: TrainingState | None = None
    _read_when_fitted: Mapping[str, str] = MappingProxyType({})
    """What the module's code read in a script or notebook then; see `values_of_main`."""

    def __init__(
        self,
        module: nn.Module | StoredModule,
        columns: Sequence[Column],
        *,
        num_classes: int | None = None,
        summary: TrainingSummary | None = None,
    ) -> None:
        super().__init__()
        self._module = module if isinstance(module, StoredModule) else evaluating(module)
        self._columns = tuple(columns)
        self._num_classes = num_classes
        self._summary = summary
        self._sender = Sender()
        self._setDefault(loss=self._loss)
        if self._task.has_one_label:
            self._setDefault(labelCol="label")
        names = [column.name for column in self._columns]
        if any(column.specification for column in self._columns):
            self._set(inputs=specification_of(self._columns))
        elif len(names) == 1:
            self._set(featuresCol=names[0])
        else:
            self._set(inputCols=names)

    @property
    def _blank(self) -> nn.Module:
        """The module, where its weights are stored without them."""
        return self._module.blank if isinstance(self._module, StoredModule) else self._module

    @property
    def module(self) -> nn.Module:
        """The trained module, on the CPU, in eval mode.

        If its weights lie in a storage they are read now, all of them. What is changed in them then
        does not reach ``transform``, which reads them itself.
        """
        return self._module.module if isinstance(self._module, StoredModule) else self._module

    @property
    def columns(self) -> tuple[Column, ...]:
        """The inputs as the module was trained on them."""
        return self._columns

    @property
    def trainingState(self) -> TrainingState | None:
        """The state from which ``initialState`` goes on; None without ``keepTrainingState``."""
        return self._training_state

    @property
    def hasSummary(self) -> bool:
        """True if the model knows how it was trained."""
        return self._summary is not None

    @property
    def summary(self) -> TrainingSummary:
        """The summary of how the model was trained.

        Raises:
            SparkDLError: there is no summary.
        """
        if self._summary is None:
            raise SparkDLError(f"No training summary available for this {type(self).__name__}")
        return self._summary

    if not TYPE_CHECKING:

        @plainly
        def transform(self, dataset: DataFrame, params: ParamMap | None = None) -> DataFrame:
            """Add the output columns to a DataFrame.

            Args:
                dataset: rows with the inputs, of Spark or pandas, or a stream.
                params: Params in place of the model's, for this call: a dict such as
                    ``{model.batchSize: 64}``.

            Returns:
                A DataFrame with all columns of ``dataset`` and the predictions; nothing is computed
                before an action.

            Raises:
                DataError: a column is missing, or of a type of which no tensor can be made; or an
                    output column is there already.
                ConfigError: a Param is wrong.
            """
            check_params(self, params)
            return super().transform(dataset, params)

    @plainly
    def _transform(self, dataset: DataFrame) -> DataFrame:
        dataset = rows_of(dataset)
        wanted = self._wanted()
        if not wanted:
            logger.warning("%s: all output columns are off; transform does nothing", self.uid)
            return dataset
        self._check_outputs(dataset, [item.column for item in wanted])
        forward = self._forward(item.output.layer for item in wanted)
        common, inputs = self._module_task(dataset, forward)
        plan = self._looked_at(
            dataset, inputs, lambda module, rows: plan_outputs(module, rows, forward, wanted)
        )
        task = predict.PredictTask(**common, leaves=plan.leaves)
        mesh = self._checked_mesh(dataset.sparkSession, task)
        if mesh is not None:
            return gang_transform.transform(dataset, self.uid, inputs, task, mesh, plan)
        function = partial(predict.predict, task=task)
        return with_columns(dataset, self.uid, inputs, function, plan.spark_type, plan.columns)

    def _looked_at(
        self,
        dataset: DataFrame,
        inputs: Sequence[SparkColumn],
        look: Callable[[nn.Module, Arguments], T],
    ) -> T:
        """Return what ``look`` finds in a copy of the module on zeros.

        If it fails there, it looks on the first rows.
        """
        zeros, known = example_arguments(self._columns), self._module
        # What is shown of a module that lies in a storage is a copy already.
        module = travelled(known, copies=True) if isinstance(known, nn.Module) else known
        try:
            return seen(module, lambda shown: look(shown, zeros))
        except ConfigError as error:
            if error.__cause__ is None or dataset.isStreaming:  # no error of the module's, or none
                raise
            columns = [column.alias(f"c{number}") for number, column in enumerate(inputs)]
            rows = take_look(dataset.select(*columns), 2).rows.combine_chunks()
            arrays = [rows.column(number).combine_chunks() for number in range(len(columns))]
            runs = predict.runs(arrays, self._columns, 2, torch.device("cpu"))
            found = next((run.arguments for run in runs if run.arguments is not None), None)
            if found is None:
                raise
            module = travelled(known, copies=True) if isinstance(known, nn.Module) else known
            return seen(module, lambda shown: look(shown, found))

    def _checked_mesh(self, spark: SparkSession, task: predict.PredictTask) -> Mesh | None:
        """The mesh along which tasks divide the model; None: each has all of it."""
        module = self._module if task.weights is not None else None
        wanted = self.getOrDefault("parallelism")
        mesh: Mesh | None = None if wanted == param_table.AUTO else wanted
        if wanted == param_table.AUTO and isinstance(module, StoredModule):
            mesh = gang_transform.chosen_mesh(spark, module)
        if mesh is None or not mesh.divides_model:
            return None
        if not isinstance(module, StoredModule):
            raise ConfigError(
                f"{self.uid}: parallelism=Mesh({mesh}) needs weights in a storage from which each "
                "worker reads its part; fit with a Mesh and a checkpointDir that executors open "
                "by themselves, or setParallelism(None)"
            )
        gang_transform.check_mesh(spark, module, mesh, task)
        return mesh

    def _wanted(self) -> list[WantedColumn]:
        others: dict[str, Output] = self.getOrDefault("outputs")
        columns = [
            *self._predictions(),
            *(WantedColumn(column=n, output=o) for n, o in others.items()),
        ]
        return [item for item in columns if item.column]

    def _predictions(self) -> list[WantedColumn]:
        return [WantedColumn(column=self.getOrDefault("predictionCol"), output=self._predicted())]

    def _predicted(self) -> Output:
        return self.getOrDefault("predictionOutput") or Output()

    def _forward(self, layers: Iterable[str | None]) -> Forward:
        return Forward(
            preprocessing=self.getOrDefault("preprocessing"),
            postprocessing=self.getOrDefault("postprocessing"),
            layers=tuple(dict.fromkeys(name for name in layers if name is not None)),
        )

    def _check_outputs(self, dataset: DataFrame, names: list[str]) -> None:
        refuse_outputs(schema_of(dataset), names, self.uid)

    def _inputs(self) -> list[tuple[Named, Column]]:
        """Each input as the Params name it now, with the column of training; raises ConfigError."""
        specified = list(param_table.specified_inputs(self))
        trained = [column.argument for column in self._columns]
        if not specified:
            names = param_table.feature_columns(self)
            if len(names) != len(trained):
                raise ConfigError(
                    f"the module was trained on {len(trained)} column(s); received {list(names)}"
                )
            return [
                (Named(argument=None, specification=Tensor(name)), replace(column, name=name))
                for name, column in zip(names, self._columns, strict=True)
            ]
        if None not in trained and {entry.argument for entry in specified} == set(trained):
            specified.sort(key=lambda entry: trained.index(entry.argument))
        if [entry.argument for entry in specified] != trained:
            raise ConfigError(
                f"the module was trained on the inputs {trained}; received "
                f"{[entry.argument for entry in specified]}"
            )
        return [
            (e, replace(c, name=e.specification.name, specification=e.specification))
            for e, c in zip(specified, self._columns, strict=True)
        ]

    def _module_task(
        self, dataset: DataFrame, forward: Forward, others: Any = None
    ) -> tuple[dict[str, Any], list[SparkColumn]]:
        """The fields of a `predict.ModuleTask`, and its inputs, as it was trained on them.

        ``others`` are what the tasks get besides.
        """
        spark, schema, inputs = dataset.sparkSession, schema_of(dataset), self._inputs()
        prepared = [prepare_trained(schema, *one) for one in inputs]
        sent = self._sender.sent_module(spark, self._module, (forward, others))
        fields = {
            "values": sent.values,
            "digest": sent.digest,
            "fetch": sent.fetch,
            "weights": sent.weights,
            "columns": tuple(column for _, column in inputs),
            "batch_size": self.getOrDefault("batchSize"),
            "device": self.getOrDefault("device"),
            "forward": forward,
        }
        return fields, [entry.expression for entry in prepared]

    @plain_arguments
    @plainly
    def evaluate(
        self,
        dataset: DataFrame,
        *,
        metrics: Mapping[str, Any] | Sequence[Any] | None = None,
        curves: bool | Sequence[int] | None = None,
        **params: Any,
    ) -> Evaluation:
        """Measure how good the model is on the rows of a DataFrame, in one pass over them.

        The driver gets sums, never rows. The result does not depend on partitions and batches:
        counts are exact, other values the same to about 1e-12. torchmetrics are computed in
        float64 and united by the rules of their states.

        The loss, with the weights of ``weightCol``, is that of training unless ``loss`` is set;
        like torchmetrics it sees what the module returns. What classifiers and regressors are
        measured by (accuracy, confusion matrix, curves; rmse, r2 ...) sees predictions as
        ``transform`` gives them.

        Args:
            dataset: rows with the inputs, the label and, if it is set, the weight.
            metrics: names such as ``"f1"``, torchmetrics, or callables that make these, in a list
                or in a dict by name. Names count rows by ``weightCol``; torchmetrics know no
                weights. Those that keep something of every row, such as ``"auroc"``, and curves
                without ``thresholds``, are gathered on the driver, up to 64 MiB.
            curves: classes whose ROC and precision-recall curves are made; True: all, False: none,
                None: class 1 where there are two. They are exact up to 100,000 different scores of
                all curves together, and say how far off they may be beyond.
            params: Params of this call, such as ``labelCol``, ``weightCol``, ``loss`` or
                ``batchSize``.

        Returns:
            An `Evaluation`, which has the values by name, and shows them in notebooks.

        Raises:
            DataError: a column is missing, or its values cannot be used.
            ConfigError: loss, metrics or curves do not fit the model.
        """
        model = self.copy()._set(**params)
        dataset = rows_of(dataset, needs_table="evaluate")
        task, columns = model._evaluate_task(dataset, to_metrics(metrics or {}), curves)
        return evaluate_model.evaluate(task, dataset, columns)

    @plain_arguments
    @plainly
    def scores(
        self, dataset: DataFrame, *keys: str, scoreCol: str = "loss", **params: Any
    ) -> DataFrame:
        """Return the loss of each row, next to the columns that tell which row it is.

        It is the loss of a batch of that row alone, without ``weightCol``; null where the row
        counts for nothing, as with a class that the loss ignores (of several labels such a one
        adds 0). The worst rows come first by ``.orderBy(F.desc(scoreCol))``.

        Args:
            dataset: rows with the inputs and the label.
            keys: columns to keep; none keeps all.
            scoreCol: the column for the loss.
            params: Params of this call, such as ``labelCol`` or ``loss``.

        Returns:
            A DataFrame with the ``keys`` and ``scoreCol``.

        Raises:
            DataError: a column is missing.
            ConfigError: the loss does not fit the model.
        """
        model, dataset = self.copy()._set(**params), rows_of(dataset)
        model.clear(model.getParam("weightCol"))
        schema = schema_of(dataset)
        fields = [require(schema, key) for key in keys] or schema.fields
        if find(type(schema)(fields), scoreCol):
            raise DataError(f'column "{scoreCol}" is in the DataFrame already; choose a scoreCol')
        task, columns = model._evaluate_task(dataset, {}, False)
        scored = evaluate_model.row_scores(task, dataset, columns, scoreCol)
        # A join may leave two columns of one name, which nothing can select.
        return scored.select(*map(quoted, (*keys, scoreCol))) if keys else scored

    def _evaluate_task(
        self, dataset: DataFrame, metrics: Mapping[str, Any], curves: bool | Sequence[int] | None
    ) -> tuple[evaluate_task.EvaluateTask, list[SparkColumn]]:
        """Return the task of an evaluation, and the columns that it gets."""
        if self.getOrDefault("loss") == param_table.UNKNOWN_LOSS:
            raise ConfigError(f"the loss of {self.uid} could not be saved with it; pass loss=...")
        labels, label_col, loss = (
            param_table.labels_of(self),
            self.value("labelCol"),
            param_table.loss_of_labels(self),
        )
        if labels and self._task.has_one_label:
            raise ConfigError(
                f"a model for {self._task.name} has one label; set labelCol, not labels"
            )
        if label_col is None and self._task.has_one_label:
            raise ConfigError("labelCol is not set; name the column to compare predictions with")
        module = self._blank
        prepared = prepare_labels(
            schema_of(dataset),
            self._task,
            loss,
            labels=labels,
            label_col=label_col,
            weight_col=self.value("weightCol"),
            float_dtype="float64" if floating_dtype(module) == "float64" else "float32",
            weight_dtype="float64",
        )
        others = spool_columns(prepared)
        forward, predicted = self._forward(()), self._predictions()[0]
        measures = Measures(
            task=self._task, loss=loss, loss_weights=param_table.loss_weights(self), metrics=metrics
        )
        common, inputs = self._module_task(dataset, forward, measures)
        names = [str(label.argument) for label in labels]
        num_classes, metrics = self._looked_at(
            dataset,
            inputs,
            lambda module, rows: evaluate_model.classes_and_metrics(
                module, rows, forward, predicted, measures, names
            ),
        )
        curved = chosen_curves(curves, num_classes)
        task = evaluate_task.EvaluateTask(
            **common,
            measures=replace(measures, metrics=metrics, num_classes=num_classes, curves=curved),
            predicted=predicted.output,
            labels=tuple(column for column in others if column.role == "label"),
            weight=next((column for column in others if column.role == "weight"), None),
        )
        return task, [*inputs, *(entry.expression for entry in prepared)]

    def write(self) -> MLWriter:
        """Return a writer that saves Params, module and summary without pickle.

        Its ``overwrite()`` lets ``save(path)`` replace what is there.
        """
        from sparkdl.spark.params.save_stage import ModelWriter  # slow: torch.export

        return ModelWriter(self)

    @classmethod
    def read(cls: type[M]) -> MLReader[M]:
        """Return a reader for what `write` saved; its ``trusting`` names packages to trust."""
        from sparkdl.spark.params.save_stage import ModelReader

        return ModelReader(cls)

    if TYPE_CHECKING:

        @classmethod
        def load(cls, path: str | os.PathLike[str]) -> Self: ...


@with_params(param_table.ModelArguments)
class TorchRegressorModel(TorchModel):
    """A trained module that predicts one number per row; ``predictionCol`` is a double."""

    _task = REGRESSION

    def _predictions(self) -> list[WantedColumn]:
        column = self.getOrDefault("predictionCol")
        return [WantedColumn(column=column, output=self._predicted(), make="number")]


@with_params(param_table.ClassifierModelArguments)
class TorchClassifierModel(TorchModel, ClassOutputParams, ClassifierModelAccessors):
    """A trained module that tells classes apart.

    ``transform`` adds the index of the likeliest class (``predictionCol``, a double), the
    module's outputs, taken as logits (``rawPredictionCol``, a vector), and their softmax
    (``probabilityCol``, a vector). A module with one output per row is taken as the logit of
    class 1: the raw prediction is ``[-z, z]`` and the probabilities come from the sigmoid. An
    empty name turns a column off.
    """

    _task = CLASSIFICATION
    _loss = "cross_entropy"

    @property
    def numClasses(self) -> int:
        """Number of classes that the labels of the training rows have."""
        if self._num_classes is None:
            raise SparkDLError(f"{self.uid} was made without a number of classes")
        return self._num_classes

    def _predictions(self) -> list[WantedColumn]:
        made: dict[str, predict.Make] = {
            "predictionCol": "class",
            "rawPredictionCol": "logits",
            "probabilityCol": "probability",
        }
        return [
            WantedColumn(column=self.getOrDefault(param), output=self._predicted(), make=make)
            for param, make in made.items()
        ]
