from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import Any

import pytest
import torchmetrics
from pyspark.ml.param import Param
from torch import nn

from sparkdl.config import CheckpointConfig, EarlyStopping, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.estimator import TorchClassifier, TorchEstimator, TorchRegressor
from sparkdl.inputs import Named, Sequence, Specification, Tensor
from sparkdl.model import TorchClassifierModel, TorchModel, TorchRegressorModel
from sparkdl.report.listeners.tensorboard import TensorBoard
from sparkdl.serialization.initial_weights import InitialWeights
from sparkdl.spark.params.arguments import ClassifierArguments, EstimatorArguments, LabelsArguments
from sparkdl.spark.params.params import (
    FACE_ONLY,
    FIELDS,
    OBJECT_PARAMS,
    training_values,
)
from sparkdl.sync.gradients.allreduce import AllReduce

ESTIMATORS = [TorchEstimator, TorchClassifier, TorchRegressor]
MODELS = [TorchModel, TorchClassifierModel, TorchRegressorModel]

SAMPLES: dict[str, tuple[Any, Any]] = {
    "module": (nn.Identity, nn.Identity),
    "loss": ("l1", "l1"),
    "trainingStep": (len, len),
    "optimizer": ("adamw", "adamw"),
    "optimizerParams": ({"weight_decay": 0.1}, {"weight_decay": 0.1}),
    "learningRate": (0.5, 0.5),
    "parameterGroups": ({"head": {"lr": 0.1}}, {"head": {"lr": 0.1}}),
    "frozenLayers": (["body"], ("body",)),
    "initialWeights": ({"w": 1}, InitialWeights(source={"w": 1})),
    "scheduler": (len, len),
    "featuresCol": ("f", ("f",)),
    "inputCols": (["a", "b"], ("a", "b")),
    "inputShape": ((1, 28, 28), ((1, 28, 28),)),
    "inputs": ({"x": "a"}, (Named(argument="x", specification=Tensor("a")),)),
    "labels": ({"l": Sequence("b")}, (Named(argument="l", specification=Sequence("b")),)),
    "lossWeights": ({"l": 2}, {"l": 2.0}),
    "augmentation": (len, len),
    "groupByLength": (8, 8),
    "shuffleWindowBytes": (1 << 20, 1 << 20),
    "labelCol": ("y", "y"),
    "weightCol": ("w", "w"),
    "validationIndicatorCol": ("v", "v"),
    "epochs": (3, 3),
    "maxSteps": (7, 7),
    "batchSize": (5, 5),
    "numWorkers": (2, 2),
    "seed": (11, 11),
    "syncStrategy": (AllReduce(), AllReduce()),
    "syncBatchNorm": (True, True),
    "executionMode": ("rounds", "rounds"),
    "precision": ("bf16", "bf16"),
    "memoryFormat": ("channels_last", "channels_last"),
    "gradientAccumulationSteps": (4, 4),
    "gradientClipNorm": (1.5, 1.5),
    "divergenceFactor": (9.0, 9.0),
    "device": ("cpu", "cpu"),
    "deterministic": (True, True),
    "checkpointDir": ("/c", "/c"),
    "checkpointInterval": (9, 9),
    "maxRestarts": (1, 1),
    "earlyStopping": (EarlyStopping(), EarlyStopping()),
    "callbacks": ([len], (len,)),
    "metrics": ({"size": len}, {"size": len}),
    "listeners": ([TensorBoard()], (TensorBoard(),)),
    "reportDir": ("/r", "/r"),
    "verbose": (2, 2),
    "cpusPerWorker": (3, 3),
    "gpusPerWorker": (0.5, 0.5),
}
"""Param -> (a value, what must arrive in the field of the table)."""


def param_names(cls: type) -> set[str]:
    return {name for name in dir(cls) if isinstance(getattr(cls, name), Param)}


def field_value(estimator: Any, name: str) -> Any:
    config, request = training_values(estimator, "custom")
    owners = {"config": config, "checkpoint": config.checkpoint}
    field = FIELDS[name]
    if field.owner == "request":
        return request[field.name]
    return getattr(owners[field.owner], field.name)


@pytest.mark.parametrize("cls", ESTIMATORS)
def test_every_param_is_in_the_table_or_face_only(cls: type) -> None:
    names = param_names(cls)
    assert names <= set(FIELDS) | set(FACE_ONLY)
    assert not set(FIELDS) & set(FACE_ONLY)


def test_the_table_has_nothing_but_params_and_fields() -> None:
    assert set(FIELDS) | set(FACE_ONLY) == param_names(TorchClassifier) | param_names(
        TorchEstimator
    )
    assert set(FIELDS) == set(SAMPLES)
    assert param_names(TorchEstimator) | param_names(TorchModel) >= OBJECT_PARAMS
    known = {
        "config": {field.name for field in dataclasses.fields(TrainConfig)},
        "checkpoint": {field.name for field in dataclasses.fields(CheckpointConfig)},
    }
    for name, field in FIELDS.items():
        assert field.owner == "request" or field.name in known[field.owner], name


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_every_param_reaches_its_field(name: str) -> None:
    value, expected = SAMPLES[name]
    cls: Any = TorchClassifier if name in param_names(TorchClassifier) else TorchEstimator
    others = {"labels": {"l": "b"}} if name == "lossWeights" else {}
    bare = cls(module=nn.Identity)
    estimator = cls(**{"module": nn.Identity, name: value, **others})
    assert field_value(estimator, name) == expected
    if name not in ("module", "syncStrategy"):
        assert field_value(bare, name) != expected, "the sample must differ from the default"


@pytest.mark.parametrize("cls", [*ESTIMATORS, *MODELS])
def test_every_param_has_doc_setter_and_getter(cls: type) -> None:
    for name in param_names(cls):
        suffix = name[0].upper() + name[1:]
        assert getattr(cls, name).doc[-1] in ".)", name
        for accessor in (f"set{suffix}", f"get{suffix}"):
            assert inspect.getdoc(getattr(cls, accessor)), accessor


def test_setters_return_self_and_getters_the_value() -> None:
    estimator = TorchRegressor(module=nn.Identity)
    assert estimator.setEpochs(4).setFeaturesCol("x") is estimator
    assert (estimator.getEpochs(), estimator.getFeaturesCol()) == (4, "x")
    assert estimator.getLearningRate() is None


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (TorchEstimator, LabelsArguments),
        (TorchRegressor, EstimatorArguments),
        (TorchClassifier, ClassifierArguments),
    ],
)
def test_constructor_arguments_are_the_params(cls: type, arguments: type) -> None:
    assert set(typing.get_type_hints(arguments)) == param_names(cls)


def test_defaults() -> None:
    classifier, regressor, custom = TorchClassifier(), TorchRegressor(), TorchEstimator()
    assert classifier.getLoss() == "cross_entropy"
    assert regressor.getLoss() == custom.getLoss() == "mse"
    assert classifier.getLabelCol() == regressor.getLabelCol() == "label"
    assert not custom.isDefined("labelCol")
    assert classifier.getFeaturesCol() == "features"
    assert classifier.getPredictionCol() == "prediction"
    assert classifier.getProbabilityCol() == "probability"
    assert classifier.getRawPredictionCol() == "rawPrediction"
    assert classifier.getSyncStrategy() == AllReduce()
    assert classifier.getSeed() == TrainConfig().seed
    assert classifier.getBatchSize() == TrainConfig().batch_size


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", "many"),
        ("epochs", None),
        ("learningRate", "fast"),
        ("module", "resnet"),
        ("optimizerParams", [1]),
        ("inputShape", "28x28"),
        ("inputShape", (0, 3)),
        ("syncStrategy", "alreduce"),
        ("syncStrategy", "no.such.module:Class"),
        ("syncStrategy", "collections:OrderedDict"),
        ("earlyStopping", 3),
        ("callbacks", len),
        ("inputs", "x"),
        ("inputs", {"x": 3}),
        ("inputs", [Specification("x")]),
        ("augmentation", "flip"),
        ("loss", {"a": 3}),
        ("metrics", "accuracy"),
        ("metrics", {"accuracy": 3}),
        ("metrics", [torchmetrics.MeanSquaredError(), torchmetrics.MeanSquaredError()]),
        ("deterministic", "yes"),
    ],
)
def test_wrong_types_are_refused_when_set(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        TorchClassifier(**{name: value})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1; received 0"),
        ({"maxSteps": 0}, "maxSteps"),
        ({"batchSize": 0}, "batchSize"),
        ({"learningRate": -1.0}, "learningRate must be positive"),
        ({"precision": "fp8"}, "precision must be one of"),
        ({"memoryFormat": "channels_first"}, "memoryFormat must be one of"),
        ({"device": "tpu"}, "device must be one of"),
        ({"checkpointInterval": 0}, "checkpointInterval"),
        ({"gradientClipNorm": 0.0}, "gradientClipNorm"),
        ({"gradientAccumulationSteps": 64}, "cannot exceed"),
        ({"numWorkers": 0}, "numWorkers"),
        ({"maxRestarts": -1}, "maxRestarts"),
        ({"cpusPerWorker": 0}, "cpusPerWorker"),
        ({"gpusPerWorker": -1.0}, "gpusPerWorker"),
        ({"verbose": -1}, "verbose"),
        ({"groupByLength": 1}, "groupByLength must be at least 2"),
        ({"shuffleWindowBytes": 0}, "shuffleWindowBytes must be at least 1"),
        ({"inputs": {"x": "a"}, "inputCols": ["b"]}, "either inputs or inputCols"),
        ({"featuresCol": "a", "inputCols": ["b"]}, "either featuresCol or inputCols"),
        ({"inputCols": []}, "inputCols is empty"),
        ({"inputCols": ["a", "b"], "inputShape": (3,)}, "1 shape"),
    ],
)
def test_wrong_values_are_refused_at_fit(params: dict[str, Any], message: str) -> None:
    estimator = TorchClassifier(module=nn.Identity, **params)  # type: ignore[misc]
    with pytest.raises(ConfigError, match=message):
        training_values(estimator, "classification")


def test_module_is_needed() -> None:
    with pytest.raises(ConfigError, match="module is not set"):
        training_values(TorchRegressor(), "regression")


def test_unknown_params_are_refused_with_a_hint() -> None:
    with pytest.raises(TypeError, match="no Param 'epoch'; did you mean 'epochs'"):
        TorchClassifier(epoch=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no Param 'probabilityCol'"):
        TorchRegressor(probabilityCol="p")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="keyword"):
        TorchClassifier(nn.Identity)  # type: ignore[call-arg]


def test_shapes_per_input_column() -> None:
    two = TorchEstimator(module=nn.Identity, inputCols=["a", "b"], inputShape=[(2, 3), None])
    assert field_value(two, "inputShape") == ((2, 3), None)
    assert two.getInputShape() == [[2, 3], None]
    assert field_value(two.copy({two.inputShape: [None, (4,)]}), "inputShape") == (None, (4,))
    assert field_value(TorchEstimator(module=nn.Identity), "inputShape") == (None,)


def test_empty_column_names_count_as_unset() -> None:
    estimator = TorchEstimator(module=nn.Identity, labelCol="", weightCol="")
    assert field_value(estimator, "labelCol") is None
    assert field_value(estimator, "weightCol") is None


def test_metrics_of_a_list_are_named_by_class() -> None:
    metric = torchmetrics.MeanSquaredError()
    estimator = TorchRegressor(metrics=[metric, torchmetrics.R2Score])
    assert estimator.getMetrics() == {"MeanSquaredError": metric, "R2Score": torchmetrics.R2Score}


@pytest.mark.parametrize(
    "strategy", ["allreduce", "AllReduce", "sparkdl.sync.gradients.allreduce:AllReduce", AllReduce]
)
def test_strategies_by_name(strategy: Any) -> None:
    assert TorchClassifier(syncStrategy=strategy).getSyncStrategy() == AllReduce()


def test_explain_params_lists_all() -> None:
    text = TorchClassifier(epochs=7).explainParams()
    assert "epochs: passes over the training rows (>= 1). (default: 1, current: 7)" in text
    assert len(text.splitlines()) >= len(param_names(TorchClassifier))


def test_copies_are_independent() -> None:
    estimator = TorchClassifier(epochs=1)
    other = estimator.copy({estimator.epochs: 2})
    other.setBatchSize(8)
    assert (estimator.getEpochs(), other.getEpochs()) == (1, 2)
    assert estimator.getBatchSize() != 8
    assert other.uid == estimator.uid
