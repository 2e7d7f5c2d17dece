from __future__ import annotations

import dataclasses
import inspect
import pickle
import re
import traceback
from typing import Any

import pytest
import torch
import torchmetrics
from pyspark.ml.param import Param
from pyspark.ml.tuning import ParamGridBuilder
from torch import nn

from sparkdl.config import CUSTOM, CheckpointConfig, EarlyStopping, TrainConfig
from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError, ParamError
from sparkdl.estimator import TorchClassifier, TorchEstimator, TorchRegressor
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.inference.regression import REGRESSION
from sparkdl.inputs import Named, Sequence, Specification, Tensor
from sparkdl.mesh import Mesh
from sparkdl.model import TorchClassifierModel, TorchModel, TorchRegressorModel
from sparkdl.report.listeners.tensorboard import TensorBoard
from sparkdl.serialization.initial_state import InitialState
from sparkdl.serialization.initial_weights import InitialWeights
from sparkdl.spark.params.param_table import (
    ClassifierArguments,
    ClassifierModelArguments,
    LabelsArguments,
    ModelArguments,
    Option,
    RegressorArguments,
    options,
)
from sparkdl.spark.params.params import training_values
from sparkdl.spark.run.run import FitRequest
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.train.callbacks import Callback

ARGUMENTS: dict[type, type] = {
    TorchEstimator: LabelsArguments,
    TorchRegressor: RegressorArguments,
    TorchClassifier: ClassifierArguments,
    TorchModel: ModelArguments,
    TorchRegressorModel: ModelArguments,
    TorchClassifierModel: ClassifierModelArguments,
}
ROWS: dict[str, Option] = {**options(LabelsArguments), **options(ClassifierArguments)}

CALLBACK = Callback()
SAMPLES: dict[str, tuple[Any, Any]] = {
    "module": (nn.Identity, nn.Identity),
    "loss": ("l1", "l1"),
    "trainingStep": (pow, pow),
    "optimizer": ("adamw", "adamw"),
    "optimizerParams": ({"weight_decay": 0.1}, {"weight_decay": 0.1}),
    "learningRate": (0.5, 0.5),
    "parameterGroups": ({"head": {"lr": 0.1}}, {"head": {"lr": 0.1}}),
    "frozenLayers": (["body"], ("body",)),
    "cacheDir": ("/d/kept", "/d/kept"),
    "initialState": ("s3://m/1", InitialState(source="s3://m/1")),
    "keepTrainingState": (True, True),
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
    "validationFraction": (0.1, 0.1),
    "validationInterval": (50, 50),
    "trainingMetrics": (True, True),
    "epochs": (3, 3),
    "maxSteps": (7, 7),
    "batchSize": (5, 5),
    "numWorkers": (2, 2),
    "minWorkers": (1, 1),
    "numShards": (4, 4),
    "seed": (11, 11),
    "syncStrategy": (AllReduce(), AllReduce()),
    "syncBatchNorm": (True, True),
    "elasticity": ("bits", "bits"),
    "parallelism": (Mesh(shard=2), Mesh(shard=2)),
    "shards": ("auto", "auto"),
    "executionMode": ("rounds", "rounds"),
    "precision": ("bf16", "bf16"),
    "memoryFormat": ("channels_last", "channels_last"),
    "compile": (True, True),
    "gradientAccumulationSteps": (4, 4),
    "gradientClipNorm": (1.5, 1.5),
    "divergenceFactor": (9.0, 9.0),
    "device": ("cpu", "cpu"),
    "deterministic": (True, True),
    "checkpointDir": ("/c", "/c"),
    "checkpointInterval": (9, 9),
    "maxRestarts": (1, 1),
    "earlyStopping": (EarlyStopping(), EarlyStopping()),
    "callbacks": ([CALLBACK], (CALLBACK,)),
    "metrics": ({"size": len}, {"size": len}),
    "listeners": ([TensorBoard()], (TensorBoard(),)),
    "reportDir": ("/r", "/r"),
    "runName": ("digits, wide", "digits, wide"),
    "verbose": (2, 2),
    "cpusPerWorker": (3, 3),
    "gpusPerWorker": (0.5, 0.5),
}
"""Param -> (a value, what must arrive in the field of the table)."""


def param_names(cls: type) -> set[str]:
    return {name for name in dir(cls) if isinstance(getattr(cls, name), Param)}


def field_value(estimator: Any, name: str) -> Any:
    config, request = training_values(estimator, CUSTOM)
    owners = {"config": config, "checkpoint": config.checkpoint}
    row = ROWS[name]
    if row.fills == "request":
        return request[row.field]
    return getattr(owners[row.fills], row.field)


def test_every_class_has_the_params_of_its_rows_with_doc_setter_and_getter() -> None:
    for cls, arguments in ARGUMENTS.items():
        assert param_names(cls) == set(options(arguments)), cls
        for name in param_names(cls):
            suffix = name[0].upper() + name[1:]
            assert getattr(cls, name).doc[-1] in ".)", name
            for accessor in (f"set{suffix}", f"get{suffix}"):
                assert inspect.getdoc(getattr(cls, accessor)), accessor


def test_every_row_fills_a_field_that_there_is() -> None:
    kinds = {"config": TrainConfig, "checkpoint": CheckpointConfig, "request": FitRequest}
    filled = {name: row for name, row in ROWS.items() if row.fills != "nothing"}
    assert set(filled) == set(SAMPLES)
    for name, row in filled.items():
        known = {field.name for field in dataclasses.fields(kinds[row.fills])}
        assert row.field in known, name
    assert set(ROWS) - set(filled) == {"predictionCol", "probabilityCol", "rawPredictionCol"}


def test_every_param_reaches_its_field() -> None:
    for name, (value, expected) in SAMPLES.items():
        cls: Any = TorchClassifier if name in param_names(TorchClassifier) else TorchEstimator
        others = {"labels": {"l": "b"}} if name == "lossWeights" else {}
        bare = cls(module=nn.Identity)
        estimator = cls(**{"module": nn.Identity, name: value, **others})
        assert field_value(estimator, name) == expected, name
        if name not in ("module", "syncStrategy"):
            assert field_value(bare, name) != expected, f"{name}: the sample is the default"


def test_plain_values_are_saved_as_they_are() -> None:
    plain = ("epochs", "learningRate", "frozenLayers", "inputShape", "lossWeights", "inputCols")
    described = ("loss", "optimizerParams", "parameterGroups", "inputs", "metrics", "syncStrategy")
    assert all(ROWS[name].is_plain for name in plain)
    assert not any(ROWS[name].is_plain for name in described)


def test_setters_return_self_and_getters_the_value() -> None:
    estimator = TorchRegressor(module=nn.Identity)
    assert estimator.setEpochs(4).setFeaturesCol("x") is estimator
    assert (estimator.getEpochs(), estimator.getFeaturesCol()) == (4, "x")
    assert estimator.getLearningRate() is None


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


def test_wrong_types_are_refused_when_set() -> None:
    wrong: list[tuple[str, Any]] = [
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
        ("metrics", 3),
        ("metrics", {"accuracy": 3}),
        ("metrics", [torchmetrics.MeanSquaredError(), torchmetrics.MeanSquaredError()]),
        ("metrics", ["f1", "F1"]),
        ("deterministic", "yes"),
        ("runName", " "),
        ("runName", "two\nlines"),
    ]
    for name, value in wrong:
        with pytest.raises(TypeError, match=name):
            TorchClassifier(**{name: value})  # type: ignore[arg-type]


def test_none_is_a_value_where_the_type_has_it() -> None:
    estimator = TorchClassifier(module=nn.Identity, divergenceFactor=None)
    assert estimator.getDivergenceFactor() is None
    assert training_values(estimator, CLASSIFICATION)[0].divergence_factor is None
    assert estimator.copy().getDivergenceFactor() is None


def test_wrong_types_are_named() -> None:
    for name, value, kind in (("numWorkers", (1, 2), "an integer or 'auto'"),
                              ("epochs", "3", "an integer"),
                              ("learningRate", (1.0, 2.0), "a number or 'auto'"),
                              ("epochs", 10**400, "an integer"),
                              ("predictionCol", (1, 2), "a string")):  # fmt: skip
        message = f"^{name} must be {kind}; received {re.escape(repr(value))}$"
        with pytest.raises(TypeError, match=message):
            TorchClassifier(**{name: value})  # type: ignore[arg-type]


BREAKING: dict[str, tuple[Any, str]] = {
    "epochs": (0, "must be at least 1"),
    "maxSteps": (-2, "must be at least 1, or -1 for no limit"),
    "batchSize": (0, "must be at least 1"),
    "gradientAccumulationSteps": (0, "must be at least 1"),
    "learningRate": (-1.0, "must be positive"),
    "gradientClipNorm": (0.0, "must be positive"),
    "divergenceFactor": (1.0, "must be more than 1"),
    "precision": ("fp8", "must be one of ('fp32', 'bf16', 'fp16')"),
    "memoryFormat": ("nhwc", "must be one of ('contiguous', 'channels_last')"),
    "device": ("mps", "must be one of ('auto', 'cpu', 'cuda')"),
    "elasticity": ("all", "must be one of ('rounding', 'bits')"),
    "executionMode": ("both", "must be one of ('auto', 'gang', 'rounds')"),
    "shards": ("columns", "must be one of ('auto', 'rows', 'partitions')"),
    "checkpointInterval": (0, "must be a number of steps of at least 1, or -1 to disable"),
    "validationInterval": (0, "must be at least 1"),
    "validationFraction": (1.0, "must be more than 0 and less than 1"),
    "groupByLength": (1, "must be at least 2"),
    "shuffleWindowBytes": (0, "must be at least 1"),
    "numWorkers": (0, "must be at least 1"),
    "minWorkers": (0, "must be at least 1"),
    "numShards": (0, "must be at least 1"),
    "maxRestarts": (-1, "must be at least 0"),
    "verbose": (-1, "must be at least 0"),
    "cpusPerWorker": (0, "must be at least 1"),
    "gpusPerWorker": (-0.5, "must be at least 0"),
    "lossWeights": ({"a": -1.0}, "must not be negative"),
    "seed": (2**64, "must be at least -2**63 and less than 2**64"),
}
"""Param -> a value that breaks its rule, and the rule in words."""


def test_a_value_that_breaks_its_rule_is_refused_when_it_is_set() -> None:
    """By the constructor, which tells all at once, by setters, `set`, `copy`, and models."""
    assert {name for name, row in ROWS.items() if row.rule} == set(BREAKING)
    lines = {}
    for name, (value, rule) in BREAKING.items():
        line = f"{name} {rule}; received {value!r}"
        made = TorchEstimator()
        for refused in (
            lambda: getattr(made, f"set{name[0].upper()}{name[1:]}")(value),  # noqa: B023
            lambda: made.copy({made.getParam(name): value}),  # noqa: B023
        ):
            with pytest.raises(ParamError) as caught:
                refused()
            assert str(caught.value) == line
        grid = ParamGridBuilder().addGrid(made.getParam(name), [value])
        for refused in (
            lambda: made.set(made.getParam(name), value),  # noqa: B023
            grid.build,
        ):
            with pytest.raises(ValueError, match=re.escape(line)):
                refused()
        assert not made.isSet(name)
        lines[name] = line
    with pytest.raises(ParamError) as caught:
        TorchEstimator(**{name: value for name, (value, _) in BREAKING.items()})
    assert str(caught.value).splitlines() == list(lines.values())
    column = Column(name="features", role="feature", shape=(2,), dtype="float32")
    model = TorchModel(nn.Linear(2, 2), [column])
    for name in ("batchSize", "device"):
        with pytest.raises(ParamError) as caught:
            getattr(model, f"set{name[0].upper()}{name[1:]}")(BREAKING[name][0])
        assert str(caught.value) == lines[name]


def test_what_only_several_values_show_is_refused_at_fit() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"gradientAccumulationSteps": 64}, "cannot exceed"),
        ({"inputs": {"x": "a"}, "inputCols": ["b"]}, "either inputs or inputCols"),
        ({"featuresCol": "a", "inputCols": ["b"]}, "either featuresCol or inputCols"),
        ({"inputCols": []}, "inputCols is empty"),
        ({"featuresCol": ""}, "featuresCol has an empty name; name the column"),
        ({"inputCols": ["a", ""]}, r"inputCols has an empty name.*withColumnRenamed"),
        ({"inputCols": ["a", "b"], "inputShape": (3,)}, "1 shape"),
    ]
    for params, message in wrong:
        estimator = TorchClassifier(module=nn.Identity, **params)  # type: ignore[typeddict-item]
        with pytest.raises(ConfigError, match=message):
            training_values(estimator, CLASSIFICATION)


def test_module_is_needed() -> None:
    with pytest.raises(ConfigError, match="module is not set"):
        training_values(TorchRegressor(), REGRESSION)


def test_unknown_params_are_refused_with_a_hint() -> None:
    with pytest.raises(TypeError, match="no Param 'epoch'; did you mean 'epochs'"):
        TorchClassifier(epoch=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no Param 'lr'; did you mean 'learningRate'"):
        TorchClassifier(lr=0.1)  # type: ignore[call-arg]
    adam = torch.optim.Adam(nn.Linear(1, 1).parameters())
    with pytest.raises(TypeError, match=r"write optimizer=.adam., learningRate=0.001"):
        TorchClassifier(optimizer=adam)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no Param 'probabilityCol'"):
        TorchRegressor(probabilityCol="p")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"name them: TorchClassifier\(module="):
        TorchClassifier(nn.Identity)  # type: ignore[call-arg]


def test_a_refused_value_ends_in_the_users_line_and_one_sentence() -> None:
    for refused in (
        lambda: TorchClassifier(epoch=3),  # type: ignore[call-arg]
        lambda: TorchClassifier(epochs="3"),  # type: ignore[typeddict-item]
        lambda: TorchClassifier().setParams(epoch=3),  # type: ignore[call-arg]
        lambda: TorchClassifier().setEpochs("3"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ParamError) as caught:
            refused()
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert {frame.name for frame in frames[2:]} == {"call"}  # of what wraps public functions


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


def test_metrics_of_a_list_are_named_by_class_or_by_their_name() -> None:
    metric = torchmetrics.MeanSquaredError()
    estimator = TorchRegressor(metrics=[metric, torchmetrics.R2Score, "MAE"])
    assert estimator.getMetrics() == {
        "MeanSquaredError": metric, "R2Score": torchmetrics.R2Score, "mae": "MAE",
    }  # fmt: skip
    assert TorchRegressor().getMetrics() is None
    assert TorchRegressor(metrics=[]).getMetrics() == {}
    assert TorchRegressor(metrics="MAE").getMetrics() == {"mae": "MAE"}


def test_strategies_by_name() -> None:
    path = "sparkdl.sync.gradients.allreduce:AllReduce"
    for strategy in ("allreduce", "AllReduce", path, AllReduce):
        assert TorchClassifier(syncStrategy=strategy).getSyncStrategy() == AllReduce()  # type: ignore[arg-type]


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
    assert pickle.loads(pickle.dumps(estimator)).getEpochs() == 1
