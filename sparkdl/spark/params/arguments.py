"""Which keyword arguments do the estimators take, and of which types? For editors and mypy.

They are the Params of `sparkdl.spark.params.params`, name by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from sparkdl.config import EarlyStopping
from sparkdl.inputs import Specification
from sparkdl.report.listeners.listener import Listener
from sparkdl.sync.strategy import SyncStrategy


class EstimatorArguments(TypedDict, total=False):
    """Keyword arguments of `TorchRegressor`; each sets one Param."""

    module: Any
    loss: Any
    trainingStep: Any
    optimizer: Any
    optimizerParams: Mapping[str, Any]
    learningRate: float | None
    parameterGroups: Mapping[str, Mapping[str, Any]]
    frozenLayers: list[str]
    initialWeights: Any
    scheduler: Any
    featuresCol: str
    inputCols: list[str]
    inputShape: Any
    inputs: Mapping[str, Specification | str] | Sequence[Specification | str] | None
    augmentation: Any
    groupByLength: int | None
    shuffleWindowBytes: int | None
    labelCol: str
    weightCol: str
    validationIndicatorCol: str
    predictionCol: str
    epochs: int
    maxSteps: int
    batchSize: int
    numWorkers: int | None
    seed: int
    syncStrategy: SyncStrategy | str
    executionMode: str
    syncBatchNorm: bool
    precision: str
    memoryFormat: str
    gradientAccumulationSteps: int
    gradientClipNorm: float | None
    divergenceFactor: float | None
    device: str
    deterministic: bool
    checkpointDir: str | None
    checkpointInterval: int
    maxRestarts: int
    earlyStopping: EarlyStopping | None
    callbacks: list[Any]
    metrics: Any
    listeners: list[Listener]
    reportDir: str | None
    verbose: int
    cpusPerWorker: int | None
    gpusPerWorker: float | None


class LabelsArguments(EstimatorArguments, total=False):
    """Keyword arguments of `TorchEstimator`; each sets one Param."""

    labels: Mapping[str, Specification | str] | None
    lossWeights: Mapping[str, float]


class ClassifierArguments(EstimatorArguments, total=False):
    """Keyword arguments of `TorchClassifier`; each sets one Param."""

    probabilityCol: str
    rawPredictionCol: str
