from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import sparkdl
from sparkdl.cli.job_files.job_file import PARAMS, EstimatorSection, ObjectRef, TrainJob, load_job
from sparkdl.cli.job_files.job_objects import (
    VALIDATION_COLUMN,
    check_training,
    in_file_words,
    make_estimator,
)
from sparkdl.cli.job_files.toml_values import build
from sparkdl.config import EarlyStopping
from sparkdl.errors import ConfigError
from sparkdl.estimator import TorchClassifier, TorchEstimator, TorchRegressor
from sparkdl.models.demo import DigitsNet
from sparkdl.serialization.initial_weights import InitialWeights

CONF = Path(__file__).parents[3] / "conf"


def job(**sections: Any) -> TrainJob:
    smallest = {
        "data": {"path": "d"},
        "model": {"factory": "sparkdl.models.demo:DigitsNet"},
        "output": {"path": "m"},
    }
    return build(TrainJob, smallest | sections)


def test_the_section_has_every_param_and_no_other() -> None:
    assert {item.name for item in fields(EstimatorSection)} == {"kind", *PARAMS}
    kinds = (TorchClassifier, TorchRegressor, TorchEstimator)
    params = {param.name for kind in kinds for param in kind().params} - {"module"}
    assert {option.name for option in PARAMS.values()} == params
    assert PARAMS["raw_prediction_col"].name == "rawPredictionCol"


def test_the_type_of_a_key_follows_from_the_type_of_its_param() -> None:
    hints = get_type_hints(EstimatorSection)
    expected = {
        "epochs": int | None,
        "gradient_clip_norm": float | None,
        "learning_rate": float | Literal["auto"] | None,
        "input_cols": tuple[str, ...] | None,
        "input_shape": tuple[int | tuple[int, ...], ...] | None,
        "optimizer_params": Mapping[str, Any] | None,
        "loss": str | ObjectRef | Mapping[str, str | ObjectRef] | None,
        "scheduler": str | ObjectRef | None,
        "inputs": Mapping[str, str | ObjectRef] | tuple[str | ObjectRef, ...] | None,
        "callbacks": tuple[ObjectRef, ...] | None,
        "initial_weights": str | InitialWeights | None,
        "early_stopping": EarlyStopping | None,
    }
    assert {key: hints[key] for key in expected} == expected


def test_every_given_key_reaches_its_param() -> None:
    estimator = make_estimator(
        job(
            estimator={
                "epochs": 3,
                "learning_rate": 0.5,
                "input_shape": [1, 8, 8],
                "optimizer": "sgd",
                "optimizer_params": {"momentum": 0.9},
                "parameter_groups": {"layers.0": {"lr": 0.1}},
                "frozen_layers": ["layers.1"],
                "initial_weights": {"source": "s3://m", "skip": ["layers.9"]},
                "early_stopping": {"patience": 2},
                "verbose": 0,
            }
        )
    )
    assert isinstance(estimator, TorchClassifier)
    values = {name: estimator.getOrDefault(name) for name in ("epochs", "verbose", "optimizer")}
    assert values == {"epochs": 3, "verbose": 0, "optimizer": "sgd"}
    assert estimator.getOrDefault("learningRate") == 0.5
    assert estimator.getOrDefault("inputShape") == [1, 8, 8]
    assert estimator.getOrDefault("optimizerParams") == {"momentum": 0.9}
    assert estimator.getOrDefault("parameterGroups") == {"layers.0": {"lr": 0.1}}
    assert estimator.getOrDefault("frozenLayers") == ["layers.1"]
    assert estimator.getOrDefault("initialWeights") == InitialWeights(
        source="s3://m", skip=("layers.9",)
    )
    assert estimator.getOrDefault("earlyStopping") == EarlyStopping(patience=2)
    assert not estimator.isSet("batchSize")


def test_the_kind_chooses_the_estimator() -> None:
    assert isinstance(make_estimator(job(estimator={"kind": "regressor"})), TorchRegressor)


def test_the_module_is_made_by_the_workers_with_its_arguments() -> None:
    model = {"factory": "sparkdl.models.demo:DigitsNet", "args": {"num_classes": 3}}
    factory = make_estimator(job(model=model)).getOrDefault("module")
    assert factory().layers[-1].out_features == 3
    assert make_estimator(job()).getOrDefault("module") is DigitsNet


def test_objects_are_imported_and_made() -> None:
    estimator = make_estimator(
        job(
            estimator={
                "loss": {"factory": "torch.nn:CrossEntropyLoss", "args": {"label_smoothing": 0.1}},
                "optimizer": "torch.optim:RMSprop",
                "scheduler": {
                    "factory": "torch.optim.lr_scheduler:StepLR",
                    "args": {"step_size": 5},
                },
                "metrics": {
                    "f1": {
                        "factory": "torchmetrics.classification:MulticlassF1Score",
                        "args": {"num_classes": 10},
                    }
                },
            }
        )
    )
    loss = estimator.getOrDefault("loss")
    assert isinstance(loss, nn.CrossEntropyLoss)
    assert loss.label_smoothing == 0.1
    assert estimator.getOrDefault("optimizer").__name__ == "RMSprop"
    scheduler = estimator.getOrDefault("scheduler")
    assert isinstance(scheduler, functools.partial)
    assert (scheduler.func, scheduler.keywords) == (StepLR, {"step_size": 5})
    assert estimator.getOrDefault("metrics")["f1"].num_classes == 10


def upper(rows: Any) -> Any:
    return rows


def test_inputs_labels_and_losses_are_made() -> None:
    estimator = make_estimator(
        job(
            estimator={
                "kind": "estimator",
                "inputs": {
                    "photo": {
                        "factory": "sparkdl:Image",
                        "args": {"column": "file", "size": [8, 8], "channels": 1},
                    },
                    "age": "age",
                    "words": {
                        "factory": "sparkdl:Sequence",
                        "args": {
                            "column": "text",
                            "transform": {"factory": "tests.cli.job_files.test_job_objects:upper"},
                        },
                    },
                },
                "augmentation": "tests.cli.job_files.test_job_objects:upper",
                "group_by_length": 4,
                "labels": {
                    "kind": "kind",
                    "size": {"factory": "sparkdl:Tensor", "args": {"column": "cm"}},
                },
                "loss": {
                    "kind": "cross_entropy",
                    "size": {"factory": "torch.nn:HuberLoss", "args": {"delta": 2.0}},
                },
                "loss_weights": {"size": 0.5},
            }
        )
    )
    value = estimator.getOrDefault
    assert value("inputs") == {
        "photo": sparkdl.Image("file", size=(8, 8), channels=1),
        "age": sparkdl.Tensor("age"),
        "words": sparkdl.Sequence("text", transform=upper),
    }
    assert value("augmentation") is upper
    assert (value("groupByLength"), value("lossWeights")) == (4, {"size": 0.5})
    assert value("labels") == {"kind": sparkdl.Tensor("kind"), "size": sparkdl.Tensor("cm")}
    assert value("loss")["kind"] == "cross_entropy"
    assert value("loss")["size"].delta == 2.0


def test_inputs_by_position() -> None:
    sparse = {"factory": "sparkdl:Sparse", "args": {"column": "words"}}
    estimator = make_estimator(job(estimator={"inputs": ["age", sparse]}))
    assert estimator.getOrDefault("inputs") == [sparkdl.Tensor("age"), sparkdl.Sparse("words")]


def test_an_augmentation_must_be_a_reference() -> None:
    with pytest.raises(
        ConfigError, match=r"estimator\.augmentation must be 'package\.module:name'"
    ):
        make_estimator(job(estimator={"augmentation": "flip"}))


def test_a_validation_section_draws_rows_or_marks_files() -> None:
    drawn = make_estimator(job(validation={"fraction": 0.1}))
    assert drawn.getOrDefault("validationFraction") == 0.1
    marked = make_estimator(job(validation={"path": "/validation"}))
    assert marked.getOrDefault("validationIndicatorCol") == VALIDATION_COLUMN
    assert marked.getOrDefault("validationFraction") is None
    for estimator in (drawn, make_estimator(job())):
        assert not estimator.isDefined("validationIndicatorCol")


@pytest.mark.parametrize("reference", ["no_such_module:Net", "sparkdl.models.demo:NoSuchNet"])
def test_what_cannot_be_imported_is_named_with_a_remedy(reference: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot import '{reference}'.*--py-files"):
        make_estimator(job(model={"factory": reference}))


def test_a_factory_must_be_callable() -> None:
    with pytest.raises(ConfigError, match="cannot be called"):
        make_estimator(job(model={"factory": "math:pi"}))


def test_a_scheduler_without_a_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"estimator\.scheduler must be 'package\.module:name'"):
        make_estimator(job(estimator={"scheduler": "StepLR"}))


def test_arguments_may_be_objects_too() -> None:
    following = {"factory": "torch.optim.lr_scheduler:StepLR", "args": {"step_size": 5}}
    scheduler = {"factory": "sparkdl:warmup", "args": {"steps": 3, "then": following}}
    made = make_estimator(job(estimator={"scheduler": scheduler})).getOrDefault("scheduler")
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    schedule = made(optimizer)
    rates = []
    for _ in range(9):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.1, 0.4, 0.7, 1, 1, 1, 1, 1, 0.1])


def test_a_wrong_key_of_an_object_among_arguments_is_named() -> None:
    scheduler = {"factory": "sparkdl:warmup", "args": {"then": {"factory": "a:b", "arg": {}}}}
    with pytest.raises(ConfigError, match=r"unknown key 'arg' in \[args\]"):
        make_estimator(job(estimator={"scheduler": scheduler}))


def test_objects_that_cannot_be_made_are_named() -> None:
    f1 = {"factory": "torchmetrics.classification:MulticlassF1Score", "args": {"dropout": 0.5}}
    with pytest.raises(ConfigError, match=r"cannot make '.*:MulticlassF1Score'.*dropout.*TypeErr"):
        make_estimator(job(estimator={"metrics": {"f1": f1}}))


def estimator_section(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    return text[text.find("[estimator]") : text.find("[output]")]


COMMENTED = [
    file
    for file in sorted(CONF.glob("*.toml"))
    if re.search(r"^\[estimator\]$(.|\n)*^# \w+ = ", estimator_section(file), re.MULTILINE)
]
"""Examples that show Params which they do not use."""


@pytest.mark.parametrize("file", COMMENTED, ids=lambda file: file.name)
def test_what_is_commented_out_in_the_examples_works(file: Path, tmp_path: Path) -> None:
    section = estimator_section(file)
    uncommented = re.sub(r"^# (?=\w+ = )", "", section, flags=re.MULTILINE)
    full = file.read_text(encoding="utf-8").replace(section, uncommented)
    (tmp_path / "full.toml").write_text(full, encoding="utf-8")
    make_estimator(load_job(TrainJob, tmp_path / "full.toml"))


def test_metrics_are_named_or_made() -> None:
    made = {"factory": "torchmetrics.classification:MulticlassF1Score", "args": {"num_classes": 10}}
    named = make_estimator(job(estimator={"metrics": ["accuracy", "F1"]}))
    assert named.getOrDefault("metrics") == {"accuracy": "accuracy", "f1": "F1"}
    mixed = make_estimator(job(estimator={"metrics": {"top": "accuracy", "f1": made}}))
    found = mixed.getOrDefault("metrics")
    assert found["top"] == "accuracy" and found["f1"].num_classes == 10
    by_label = {"kind": ["accuracy", made], "price": {"error": "mae"}}
    found = make_estimator(job(estimator={"metrics": by_label})).getOrDefault("metrics")
    assert list(found["kind"]) == ["accuracy", "MulticlassF1Score"]
    assert found["price"] == {"error": "mae"}
    assert make_estimator(job(estimator={"metrics": []})).getOrDefault("metrics") == {}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"learning_rate": -1.0}, "^estimator.learning_rate must be positive; received -1.0"),
        ({"batch_size": 2, "gradient_accumulation_steps": 3}, "_steps .3. cannot exceed batch_siz"),
        ({"optimizer": "adm"}, "unknown optimizer 'adm'; did you mean 'adam'"),
        ({"optimizer_params": {"momentums": 1}}, "optimizer Adam refused"),
        ({"loss": "mes"}, "unknown loss 'mes'; did you mean 'mse'"),
        ({"loss": "torch.nn:CrosEntropyLoss"}, "estimator.loss: .*did you mean 'CrossEntropyLoss'"),
        ({"sync_strategy": "alreduce"}, "estimator.sync_strategy: .*did you mean 'allreduce'"),
        ({"sync_strategy": {"factory": "sparkdl:LocalSGD", "args": {"averaging_perod": 4}}},
         "'averaging_perod' in estimator.sync_strategy.args; did you mean 'averaging_period'"),
        ({"sync_strategy": {"factory": "sparkdl:LocalSGD", "args": {"averaging_period": 0}}},
         "averaging_period must be a number of steps of at least 1"),
        ({"sync_strategy": "gossip", "execution_mode": "rounds"}, "execution_mode='gang'"),
        ({"metrics": {"f1": {"factory": "torchmetrics:F1Score"}}}, "estimator.metrics.f1: .*task"),
        ({"early_stopping": {"monitor": "val_loss"}}, "need validation rows"),
        ({"scheduler": {"factory": "sparkdl:warmup", "args": {"stepps": 3}}}, "mean 'steps'"),
        ({"frozen_layers": ["layer.0"]}, "no parameter of the module fits 'layer.0'; did you mea"),
        ({"shards": "partition"}, r"^estimator.shards must be one of .*'partitions'\); received"),
        ({"num_workers": 2, "min_workers": 5}, "min_workers=5 is more than num_workers=2; lower"),
        ({"cache_dir": "kept"}, "^cache_dir='kept' is relative, and executors have folders of"),
        ({"min_workers": 1, "sync_strategy": "local_sgd"}, "^min_workers=1: what this LocalSGD"),
        ({"num_workers": 2, "num_shards": 1}, "num_shards=1 is less than the 2 workers"),
        ({"num_workers": 2, "sync_strategy": {"factory": "sparkdl:AllReduce",
                                              "args": {"work_shares": {"gpu-*": 3}}}},
         "leave nothing to give; set num_shards, for example to 8"),
        ({"kind": "regressor", "probability_col": "p"}, "is not for kind = 'regressor'"),
    ],
)  # fmt: skip
def test_values_are_checked_without_spark_in_the_words_of_the_file(
    sections: dict[str, Any], message: str
) -> None:
    """They were found after the session had started, and told in the words of Python."""
    with pytest.raises(ConfigError, match=message):
        check_training(job(estimator=sections))


def test_the_module_is_checked_without_spark() -> None:
    misspelt = {"factory": "sparkdl.models.demo:DigitNet"}
    with pytest.raises(ConfigError, match=r"model: cannot import .*; did you mean 'DigitsNet'"):
        check_training(job(model=misspelt))
    options = {"factory": "sparkdl.models.demo:DigitsNet", "args": {"num_clases": 3}}
    with pytest.raises(
        ConfigError, match=r"'num_clases' in model.args; did you mean 'num_classes'"
    ):
        check_training(job(model=options))
    with pytest.raises(ConfigError, match="module cannot be made: Linear raised TypeError"):
        check_training(job(model={"factory": "torch.nn:Linear"}))


def test_what_is_right_passes_the_check() -> None:
    check_training(load_job(TrainJob, CONF / "digits.toml"))
    far = {"initial_weights": "hdfs://nowhere/model", "num_workers": 2}
    check_training(job(estimator=far))  # which only Spark reads
    check_training(job(estimator={"sync_strategy": "tournament", "metrics": ["accuracy"]}))


def test_no_name_of_ours_is_in_a_message() -> None:
    found = in_file_words(f'column "{VALIDATION_COLUMN}" has nulls; see inputShape and batchSize')
    assert found == "the column that marks [validation] has nulls; see input_shape and batch_size"
    misspelt = "--set estimator.minWorkers=2: unknown key 'minWorkers' in [estimator]"
    assert in_file_words(misspelt) == misspelt


def test_params_of_a_job_may_be_auto() -> None:
    keys = ("num_workers", "batch_size", "sync_strategy", "learning_rate")
    estimator = make_estimator(job(estimator=dict.fromkeys(keys, "auto")))
    names = ("numWorkers", "batchSize", "syncStrategy", "learningRate")
    assert {estimator.getOrDefault(name) for name in names} == {"auto"}
    with pytest.raises(ConfigError, match=r"estimator.batch_size must be an integer or 'auto'"):
        job(estimator={"batch_size": "many"})
