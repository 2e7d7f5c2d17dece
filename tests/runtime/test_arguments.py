"""Public functions and classes take plain values, and name what they do not know."""

from __future__ import annotations

import inspect
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import sparkdl
from sparkdl import (
    AllReduce,
    Around,
    Callback,
    CheckpointConfig,
    EarlyStopping,
    InitialWeights,
    LocalSGD,
    Looks,
    Mesh,
    ParameterAveraging,
    ParquetSource,
    Range,
    Sequence,
    Tensor,
    TopKCompression,
    TorchRunner,
    warmup,
)
from sparkdl.errors import ParamError, meant
from sparkdl.estimator import TorchEstimator
from sparkdl.familiar_names import METHODS, NAMES, plain
from sparkdl.model import TorchModel
from sparkdl.runtime.arguments import plain_value
from sparkdl.runtime.tracebacks import plainly
from sparkdl.spark.params.param_table import ClassifierArguments, LabelsArguments, options
from sparkdl.sync import STRATEGIES
from sparkdl.train.objective.loss import LOSSES
from sparkdl.train.objective.named_metrics import OF_CLASSES, OF_NUMBERS


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.int64, np.uint64])
def test_whole_numbers_of_numpy_are_pythons(kind: Callable[[int], Any]) -> None:
    found = plain_value([kind(3), {"a": (kind(4),)}])
    assert found == [3, {"a": (4,)}]
    assert type(found[0]) is int
    assert type(found[1]["a"][0]) is int


def test_real_numbers_truth_values_texts_and_paths_too() -> None:
    given = (np.float16(0.5), np.float32(0.25), np.bool_(True), np.str_("a"), pathlib.Path("b"))
    found = plain_value(given)
    assert found == (0.5, 0.25, True, "a", "b")
    assert [type(one) for one in found] == [float, float, bool, str, str]


def test_what_is_plain_already_stays_the_same_object() -> None:
    for value in ([1, {"a": (2.0,)}], {"a": [1]}, np.zeros(2), torch.ones(1), "a", None):
        assert plain_value(value) is value


MADE: list[tuple[Any, Any]] = [
    (lambda n, _: Mesh(shard=n(2)), Mesh(shard=2)),
    (lambda n, _: ParameterAveraging(averaging_period=n(2)),
     ParameterAveraging(averaging_period=2)),
    (lambda n, _: LocalSGD(averaging_period=(n(2), n(4))), LocalSGD(averaging_period=(2, 4))),
    (lambda n, f: EarlyStopping(patience=n(2), min_delta=f(0.5)),
     EarlyStopping(patience=2, min_delta=0.5)),
    (lambda n, _: CheckpointConfig(interval=n(7), directory=pathlib.Path("d")),
     CheckpointConfig(interval=7, directory="d")),
    (lambda n, _: AllReduce(bucket_bytes=n(1024)), AllReduce(bucket_bytes=1024)),
    (lambda _, f: AllReduce(compression=TopKCompression(density=f(0.25))),
     AllReduce(compression=TopKCompression(density=0.25))),
    (lambda n, _: Looks(every=n(2), images=n(1)), Looks(every=2, images=1)),
    (lambda n, _: Tensor("x", shape=(n(2), n(3))), Tensor("x", shape=(2, 3))),
    (lambda n, _: Sequence("x", max_length=n(9)), Sequence("x", max_length=9)),
    (lambda n, _: Range(n(1), n(9)), Range(1, 9)),
    (lambda _, f: Around(f(2.0)), Around(2.0)),
    (lambda _, __: InitialWeights(source=pathlib.Path("w")), InitialWeights(source="w")),
    (lambda _, __: ParquetSource(pathlib.Path("p")), ParquetSource("p")),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(MADE)))
def test_objects_of_numpys_numbers_are_those_of_pythons(number: int) -> None:
    make, expected = MADE[number]
    made = make(np.int64, np.float32)
    assert made == expected
    assert repr(made) == repr(expected)  # numpy's would show where they are
    assert pickle.dumps(made) == pickle.dumps(expected)


def test_a_schedule_takes_numpys_numbers() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    warmup(steps=np.int32(4), start_factor=np.float32(0.5))(optimizer)  # type: ignore[arg-type]
    assert optimizer.param_groups[0]["lr"] == 0.5


UNKNOWN: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (Mesh, {"shards": 2}, "Mesh has no argument 'shards'; did you mean 'shard'?"),
    (TorchRunner, {"numWorkers": 2}, "'numWorkers'; did you mean 'num_workers'?"),
    (TorchRunner, {"num_processes": 2, "use_gpu": True},
     "arguments 'num_processes' (did you mean 'num_workers'?), 'use_gpu' (did you mean 'device'?)"),
    (ParameterAveraging, {"averagingFrequency": 3}, "did you mean 'averaging_period'?"),
    (ParameterAveraging, {"averaging_perod": 3}, "did you mean 'averaging_period'?"),
    (EarlyStopping, {"patence": 3, "minDelta": 1},
     "'patence' (did you mean 'patience'?), 'minDelta' (did you mean 'min_delta'?)"),
    (AllReduce, {"bucketBytes": 3}, "did you mean 'bucket_bytes'?"),
    (EarlyStopping, {"qqqq": 1}, "no argument 'qqqq'; known: monitor, patience"),
    (warmup, {"step": 3}, "warmup has no argument 'step'; did you mean 'steps'?"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "given", "message"), UNKNOWN)
def test_all_unknown_arguments_are_named_with_what_is_meant(
    make: Callable[..., Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParamError) as caught:
        make(**given)
    assert message in str(caught.value)


def test_arguments_without_a_name_or_missing_ones_are_told() -> None:
    with pytest.raises(ParamError, match=r"name them: Mesh\(data=\.\.\., shard="):
        Mesh(2)  # type: ignore[misc]
    with pytest.raises(ParamError, match=r"Tensor needs the argument 'column'"):
        Tensor()  # type: ignore[call-arg]
    with pytest.raises(ParamError, match=r"1 argument without a name, and 8 are given"):
        Tensor("a", (1,), None, 1, 2, 3, 4, 5)  # type: ignore[call-arg]
    with pytest.raises(ParamError, match="'column' twice"):
        Tensor("a", column="b")  # type: ignore[misc]


def test_a_type_error_within_a_function_is_its_own() -> None:
    @plainly
    def broken(number: int) -> Any:
        return len(number)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len") as caught:
        broken(1)
    assert not isinstance(caught.value, ParamError)


def test_signatures_of_public_classes_are_as_they_were() -> None:
    assert list(inspect.signature(Mesh).parameters)[:2] == ["data", "shard"]
    assert inspect.signature(Tensor("x").__class__).parameters["column"].default is inspect._empty


def test_every_name_of_the_table_leads_to_one_that_there_is() -> None:
    from dataclasses import fields

    known = {plain(name) for table in (ClassifierArguments, LabelsArguments)
             for name in options(table)}  # fmt: skip
    known |= {plain(item.name) for cls in (Mesh, ParameterAveraging) for item in fields(cls)}
    values = {
        plain(one) for one in (*LOSSES, *OF_CLASSES, *OF_NUMBERS, *STRATEGIES, *vars(Callback))
    }
    found = {ours for several in NAMES.values() for ours in several}
    assert {ours for ours in found if plain(ours) not in known | values} == set()
    assert all(name == plain(name) for name in (*NAMES, *METHODS))
    assert not NAMES.keys() & known  # a name of ours means itself
    for call, _ in METHODS.values():
        method = call.partition("(")[0]
        assert hasattr(TorchEstimator, method) or hasattr(TorchModel, method), method


@pytest.mark.parametrize(
    ("name", "ours"),
    [("lr", "learningRate"), ("n_epochs", "epochs"), ("batch_size", "batchSize"),
     ("BATCHSIZE", "batchSize"), ("epoch", "epochs"), ("max_epochs", "epochs"),
     ("random_state", "seed"), ("qqqq", None)],
)  # fmt: skip
def test_names_of_other_packages_are_known(name: str, ours: str | None) -> None:
    assert meant(name, options(ClassifierArguments)) == ours


def test_a_public_name_that_is_misspelt_is_suggested_also_where_it_is_imported() -> None:
    with pytest.raises(ImportError, match="'TorchClasifier'; did you mean 'TorchClassifier'"):
        from sparkdl import TorchClasifier  # type: ignore[attr-defined] # noqa: F401
    with pytest.raises(AttributeError, match="did you mean 'TorchRunner'"):
        _ = sparkdl.TorchRuner
    assert not hasattr(sparkdl, "TorchRuner")
    for name, remedy in (
        ("fit", "use TorchClassifier(module=Net).fit(df)"),
        ("predict", "use TorchClassifier(module=Net).fit(df).transform(df), which adds the column "
         "of predictions"),
        ("load", "use TorchClassifierModel.load(path)"),
    ):  # fmt: skip
        with pytest.raises(AttributeError) as caught:
            getattr(sparkdl, name)
        assert str(caught.value) == f"module 'sparkdl' has no attribute {name!r}; {remedy}"
    from sparkdl import config  # a module, whatever name is like it

    assert config.TrainConfig
