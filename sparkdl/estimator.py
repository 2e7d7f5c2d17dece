"""The Spark ML estimators, which train a module on a DataFrame.

They differ in their default loss, in what they make of the label column and in their model.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, Unpack

from pyspark.ml import Estimator
from pyspark.ml.param.shared import HasLabelCol
from pyspark.ml.util import MLReadable, MLReader, MLWriter
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.config import CUSTOM, ExplainOptions, Task
from sparkdl.data.source import Source
from sparkdl.errors import TrainingFailed
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.inference.regression import REGRESSION
from sparkdl.model import TorchClassifierModel, TorchModel, TorchRegressorModel
from sparkdl.runtime.arguments import plain_arguments
from sparkdl.runtime.tracebacks import plainly
from sparkdl.serialization.program.imported_values import values_of_main
from sparkdl.spark.fit.fit import fit
from sparkdl.spark.frames.shared_spools import Spools
from sparkdl.spark.frames.user_data import check_params, spark_frame
from sparkdl.spark.params import accessors, param_table
from sparkdl.spark.params.params import (
    ClassOutputParams,
    Saved,
    TrainParams,
    training_values,
    with_params,
)
from sparkdl.spark.run.run import FitRequest, FitResult
from sparkdl.spark.run.run_facts import shown_params
from sparkdl.spark.session import interrupts, termination

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap

    from sparkdl.explain.explanation import Explanation

logger = logging.getLogger(__name__)
E = TypeVar("E", bound="_TorchEstimator")
_TOLD: set[str] = set()
"""Estimators of which a search has told that they cannot be saved, by ``uid``."""


class _TorchEstimator(Estimator[TorchModel], TrainParams, Saved, MLReadable["_TorchEstimator"]):
    """Base class of the three estimators."""

    _task: ClassVar[Task]
    _model_class: ClassVar[type[TorchModel]]

    if not TYPE_CHECKING:

        @plainly
        def fit(
            self,
            dataset: DataFrame | Source,
            params: ParamMap | Sequence[ParamMap] | None = None,
        ) -> TorchModel | list[TorchModel]:
            """Train, and return the model.

            Args:
                dataset: a DataFrame of Spark or pandas, which has inputs and labels in columns, or
                    a source that workers read by themselves, such as `ParquetSource`.
                params: Params in place of the estimator's, for this fit: a dict such as
                    ``{estimator.epochs: 5}``, or a list of dicts, each of which is a fit of its
                    own.

            Returns:
                A `TorchClassifierModel`, `TorchRegressorModel` or `TorchModel`; for a list of
                dicts a list of them.

            Raises:
                ConfigError: a Param is wrong, or two contradict each other.
                DataError: the rows cannot be trained on.
                ClusterError: the cluster cannot run the workers.
                StorageError: ``checkpointDir`` cannot be written or read.
                WorkerError: the user's code failed on a worker; the message has its traceback.
                TrainingDiverged: the loss is infinite or NaN, or has grown by
                    ``divergenceFactor``.
                TrainingFailed: workers were lost more than ``maxRestarts`` times.
            """
            check_params(self, params)
            return super().fit(dataset, params)

    def _fit(self, dataset: DataFrame | Source) -> TorchModel:
        return self.fit_sharing(dataset)

    @plainly
    def fitMultiple(
        self, dataset: DataFrame | Source, paramMaps: Sequence[ParamMap]
    ) -> Fits[TorchModel]:
        """Train once for each Param map; those that need the same columns share one spool.

        Args:
            dataset: a DataFrame, or a source such as `ParquetSource`.
            paramMaps: Params that differ from the estimator's.

        Returns:
            An iterator of ``(index of the map, model)``, in the order in which they are ready. It
            may be used by several threads; each fit waits until the others leave it slots.

        Raises:
            ConfigError: a map has a wrong value, or a Param of another estimator.
        """
        from sparkdl.spark.params.save_stage import why_not_saved  # slow: torch.export

        check_params(self, paramMaps)
        if self.uid not in _TOLD and (obstacle := why_not_saved(self)) is not None:
            _TOLD.add(self.uid)
            logger.warning(
                "this estimator cannot be saved, and so neither a CrossValidatorModel nor a "
                "TrainValidationSplitModel, which hold it: %s; save their bestModel",
                obstacle,
            )
        dataset, copies = spark_frame(dataset), [self.copy(values) for values in paramMaps]
        for one in copies:
            one._request()  # what is wrong in the last map is told before the first fit
        return Fits([partial(one.fit_sharing, dataset) for one in copies])

    @plainly
    def fit_sharing(
        self,
        dataset: DataFrame | Source,
        spools: Spools | None = None,
        on_epoch: Callable[[Mapping[str, float]], None] | None = None,
    ) -> TorchModel:
        """Train with the spools of other fits on the same rows; who made them closes them.

        Args:
            dataset: as for ``fit``.
            spools: what the fits share; None: this fit is alone.
            on_epoch: is given each epoch's history record, on the driver; what it raises ends
                the fit.
        """
        request = replace(self._request(), on_epoch=on_epoch)
        if not request.automatic:
            return self._model(fit(dataset, request, spools))
        from sparkdl.spark.explain.choose_values import choose

        return self._model(fit(dataset, request, spools, choose))

    @plain_arguments
    @plainly
    def explain(
        self,
        dataset: DataFrame | Source,
        *,
        calibrate: bool = True,
        num_rows: int | None = None,
        num_workers: Sequence[int] = (),
        count_seconds: float = 60.0,
        measure_seconds: float = 0.6,
    ) -> Explanation:
        """Return what ``fit`` would do, how long that would take, and what would be better.

        Nothing is trained and the data is not spooled: a sample is looked at, the rows are
        counted, and some real steps and exchanges are measured on the executors. See
        docs/explain.md for the cost model.

        Args:
            dataset: as for ``fit``.
            calibrate: whether to measure; without it there is a plan, but no times.
            num_rows: number of rows, those for validation included, where counting takes too long.
            num_workers: numbers of workers to predict besides those that there are slots for.
            count_seconds: longest that looking at some rows may take, and that counting may.
            measure_seconds: about how long each of some ten measurements may take.

        Returns:
            A value that prints as text, shows as HTML in notebooks, and has ``to_dict()``.

        Raises:
            ConfigError: what ``fit`` would raise, or an option is wrong.
            DataError: what ``fit`` would raise, as far as a sample shows it; or counting took too
                long.
            ClusterError: what ``fit`` would raise.
            StorageError: what ``fit`` would raise.
            WorkerError: the module, loss or optimizer failed on a worker.
        """
        from sparkdl.spark.explain.explain_fit import explain

        options = ExplainOptions(
            calibrate=calibrate,
            num_rows=num_rows,
            num_workers=tuple(num_workers),
            count_seconds=count_seconds,
            measure_seconds=measure_seconds,
        )
        return explain(dataset, self._request(), options, self._with)

    def _with(self, params: Mapping[str, Any]) -> Self:
        return self.copy({self.getParam(name): value for name, value in params.items()})

    def _request(self) -> FitRequest:
        """The Params as the value that `fit` takes; all checks that need no data happen here."""
        config, others = training_values(self, self._task)
        name, params = type(self).__name__, shown_params(self)
        outputs = param_table.output_columns(self)
        return FitRequest(config=config, name=name, params=params, output_cols=outputs, **others)

    def _model(self, result: FitResult) -> TorchModel:
        model = self._model_class(
            result.module,
            result.columns,
            num_classes=result.num_classes,
            summary=result.summary,
        )
        module = self.getOrDefault("module")
        model._training_state = result.training_state
        model._read_when_fitted = values_of_main(model._blank)
        model.module_factory = None if isinstance(module, nn.Module) else module
        model._resetUid(self.uid)
        for name in ("featuresCol", "inputCols", "inputs"):
            model.clear(model.getParam(name))  # as the estimator has them, set or not
        # A training batch is sized for learning, a prediction batch for speed.
        self._copyValues(model, {self.getParam("batchSize"): param_table.INFERENCE_BATCH_SIZE})
        if result.prediction_key is not None:
            model._set(predictionOutput=result.prediction_key)
        # What a model is trained along is for tasks that predict only where it has to be.
        for name in ("batchSize", "parallelism"):
            model.clear(model.getParam(name))
        model._setDefault(batchSize=param_table.INFERENCE_BATCH_SIZE, parallelism=param_table.AUTO)
        return model

    def write(self) -> MLWriter:
        """Return a writer that saves the Params without pickle.

        Its ``overwrite()`` lets ``save(path)`` replace what is there.
        """
        from sparkdl.spark.params.save_stage import ParamsWriter  # slow: torch.export

        return ParamsWriter(self)

    @classmethod
    def read(cls: type[E]) -> MLReader[E]:
        """Return a reader for what `write` saved; its ``trusting`` names packages to trust."""
        from sparkdl.spark.params.save_stage import ParamsReader

        return ParamsReader(cls)

    if TYPE_CHECKING:

        @classmethod
        def load(cls, path: str | os.PathLike[str]) -> Self: ...


@with_params(param_table.LabelsArguments, loss="mse")
class TorchEstimator(_TorchEstimator, accessors.LabelsAccessors):
    """Trains any module with any loss; the label column is optional, and there may be several.

    Without ``labelCol`` and ``labels`` the loss is called with the inputs as target, as an
    autoencoder needs it.

    Example::

        autoencoder = TorchEstimator(module=make_autoencoder, loss="mse", epochs=5)
        model = autoencoder.fit(df)
    """

    _task = CUSTOM
    _model_class = TorchModel

    @plainly
    def __init__(self, **params: Unpack[param_table.LabelsArguments]) -> None:
        super().__init__()
        self.setParams(**params)

    @plainly
    def setParams(self, **params: Unpack[param_table.LabelsArguments]) -> TorchEstimator:
        """Set several Params at once."""
        return self._set(**params)


@with_params(param_table.RegressorArguments, loss="mse")
class TorchRegressor(_TorchEstimator, HasLabelCol, accessors.RegressorAccessors):
    """Trains a module that predicts one number per row; the default loss is the squared error.

    Example::

        model = TorchRegressor(module=lambda: nn.Linear(3, 1), epochs=10).fit(df)
    """

    _task = REGRESSION
    _model_class = TorchRegressorModel

    @plainly
    def __init__(self, **params: Unpack[param_table.RegressorArguments]) -> None:
        super().__init__()
        self.setParams(**params)

    @plainly
    def setParams(self, **params: Unpack[param_table.RegressorArguments]) -> TorchRegressor:
        """Set several Params at once."""
        return self._set(**params)


@with_params(param_table.ClassifierArguments, loss="cross_entropy")
class TorchClassifier(
    _TorchEstimator, HasLabelCol, ClassOutputParams, accessors.ClassifierAccessors
):
    """Trains a module that tells classes apart; the default loss is the cross entropy.

    Labels are class indices from 0, in a column of any numeric type, or what the loss ignores, such
    as -100 (``ignore_index``). The module's outputs are logits: one per class, or one for two
    classes with ``loss="bce_with_logits"``.

    Example::

        classifier = TorchClassifier(module=make_cnn, inputShape=(1, 28, 28), epochs=3)
        predictions = classifier.fit(train).transform(test)
    """

    _task = CLASSIFICATION
    _model_class = TorchClassifierModel

    @plainly
    def __init__(self, **params: Unpack[param_table.ClassifierArguments]) -> None:
        super().__init__()
        self.setParams(**params)

    @plainly
    def setParams(self, **params: Unpack[param_table.ClassifierArguments]) -> TorchClassifier:
        """Set several Params at once."""
        return self._set(**params)


M = TypeVar("M")


class Fits(Iterator[tuple[int, M]]):
    """Gives ``(index, model)`` for each Param map. Thread-safe.

    The spools stay until the last model is there, or nobody can ask for one any more. Once the
    user has interrupted the search, which goes on in the threads that pyspark has made for it,
    there are no more models.
    """

    def __init__(self, fits: Sequence[Callable[[Spools], M]]) -> None:
        self._waiting = deque(enumerate(fits))
        self._unfinished = set(range(len(fits)))
        interrupts.listen()
        termination.listen()
        self._presses = interrupts.presses()
        spools = Spools()
        self._spools = spools
        self._close = weakref.finalize(self, spools.close)

    def __next__(self) -> tuple[int, M]:
        """Train the next one; raises TrainingFailed if the user has interrupted the search."""
        try:
            index, fit = self._waiting.popleft()
        except IndexError:
            raise StopIteration from None
        try:
            if interrupts.presses() > self._presses:
                raise TrainingFailed("the search that this fit belongs to was interrupted")
            return index, fit(self._spools)
        finally:
            self._unfinished.discard(index)
            if not self._unfinished:
                self._close()
