"""What people type first: tab, help, and the words of other packages."""

from __future__ import annotations

import copy
import functools
import inspect
import pathlib
import pydoc
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from IPython.core.completer import IPCompleter, provisionalcompleter
from torch import nn
from torch.optim import lr_scheduler

from sparkdl.config import EarlyStopping
from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError, ConfigErrors, ParamError
from sparkdl.estimator import TorchClassifier, TorchEstimator, TorchRegressor
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.model import TorchClassifierModel, TorchModel, TorchRegressorModel
from sparkdl.runner import TorchRunner
from sparkdl.spark.params.params import training_values
from sparkdl.train.callbacks import Callback

ESTIMATORS: list[Any] = [TorchClassifier, TorchRegressor, TorchEstimator]
MODELS: list[Any] = [TorchClassifierModel, TorchRegressorModel, TorchModel]


class PrintLoss(Callback):
    """A callback of a user's."""


def fitted() -> TorchClassifierModel:
    column = Column(name="features", role="feature", shape=(2,), dtype="float32")
    return TorchClassifierModel(nn.Linear(2, 2), [column], num_classes=2)


@pytest.mark.parametrize("cls", ESTIMATORS)
def test_the_signature_has_each_param_with_its_default_and_type(cls: Any) -> None:
    made = cls()
    parameters = inspect.signature(cls).parameters
    assert next(iter(parameters)) == "module"
    assert set(parameters) == {param.name for param in made.params}
    for name, parameter in parameters.items():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.annotation is not inspect.Parameter.empty
        param = made.getParam(name)
        if made.hasDefault(param):
            # As Params keep them: a strategy by name is an object there.
            kept = param.typeConverter(parameter.default) if parameter.default is not None else None
            assert repr(kept) == repr(
                param.typeConverter(made._defaultParamMap[param]) if kept is not None else None
            )
        else:
            assert repr(parameter.default) == "<not set>"
    assert inspect.signature(made.setParams).parameters.keys() == parameters.keys()


@pytest.mark.parametrize("cls", [*ESTIMATORS, *MODELS])
def test_help_begins_with_what_a_class_does_and_its_params(cls: Any) -> None:
    shown = pydoc.plain(pydoc.render_doc(cls))
    first = (inspect.getdoc(cls) or "").splitlines()[0]
    assert shown.index(first) < shown.index("Method resolution order")
    for name, option in cls._options.items():
        entry = f"{name}: {option.doc.split()[0]}"
        assert shown.index(entry) < shown.index("Method resolution order"), name
    assert "steps between checkpoints (>= 1)" in shown or cls in MODELS  # units and ranges
    assert max(map(len, (inspect.getdoc(cls) or "").splitlines())) <= 100


@pytest.mark.parametrize("method", ["fit", "fitMultiple", "explain", "save", "write", "load"])
@pytest.mark.parametrize("cls", ESTIMATORS)
def test_methods_of_estimators_have_words_of_their_own(cls: Any, method: str) -> None:
    check_doc(cls, method)


@pytest.mark.parametrize("method", ["transform", "evaluate", "scores", "save", "write", "load"])
@pytest.mark.parametrize("cls", MODELS)
def test_methods_of_models_have_words_of_their_own(cls: Any, method: str) -> None:
    check_doc(cls, method)


def check_doc(cls: Any, method: str) -> None:
    doc = inspect.getdoc(getattr(cls, method)) or ""
    assert ":py:" not in doc  # pyspark's
    if method == "write":
        assert "Return" in doc
        return
    parameters = list(inspect.signature(getattr(cls, method)).parameters)
    for name in parameters:
        assert name in ("self", "cls") or f"{name}:" in doc, name
    assert "Raises:" in doc or method == "fitMultiple"
    assert "Returns:" in doc or method == "save"


def test_the_runner_has_its_arguments_in_help() -> None:
    shown = pydoc.plain(pydoc.render_doc(TorchRunner))
    for name in inspect.signature(TorchRunner).parameters:
        assert f"{name}: " in shown


def test_ipython_offers_the_params() -> None:
    completer = IPCompleter(namespace={"TorchClassifier": TorchClassifier})
    line = "TorchClassifier(learn"
    with provisionalcompleter():
        found = {one.text for one in completer.completions(line, len(line))}
    assert "learningRate=" in found


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ParamError) as caught:
        TorchClassifier(model=1, features="x", batch_size=3, lr=4, epochs="3", seed=1.5)
    first, *others = str(caught.value).splitlines()
    for theirs, ours in (("model", "module"), ("features", "featuresCol"),
                         ("batch_size", "batchSize"), ("lr", "learningRate")):  # fmt: skip
        assert f"{theirs!r} (did you mean {ours!r}?)" in first
    assert len(others) == 2
    with pytest.raises(ConfigErrors) as several:
        training_values(
            TorchClassifier(inputCols=[], batchSize=2, gradientAccumulationSteps=3),
            CLASSIFICATION,
        )
    text = str(several.value)
    for part in ("module is not set", "inputCols is empty", "cannot exceed batchSize"):
        assert text.count(part) == 1, part
    again = copy.copy(several.value)
    assert str(again) == text


def test_a_module_without_a_name_is_told_where_it_goes() -> None:
    with pytest.raises(ParamError, match=r"name them: TorchClassifier\(module="):
        TorchClassifier(nn.Linear(2, 2))  # type: ignore[misc]


@pytest.mark.parametrize("name", ["learningRate", "learning_rate", "lr", "LearningRate"])
def test_a_param_is_not_assigned(name: str) -> None:
    estimator = TorchClassifier(learningRate=0.5)
    with pytest.raises(ParamError, match=r"use setLearningRate\(\.\.\.\)"):
        setattr(estimator, name, 0.1)
    assert estimator.getLearningRate() == 0.5
    assert estimator.copy({estimator.learningRate: 0.25}).getLearningRate() == 0.25


def test_classes_of_users_have_attributes_of_their_own() -> None:
    class Mine(TorchClassifier):
        def __init__(self, **params: Any) -> None:
            super().__init__(**params)
            self.lr = self.batch_size = 3

    made = Mine(epochs=2)
    assert made.lr == 3
    with pytest.raises(ParamError, match="setEpochs"):
        made.epochs = 3


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("predict", r"fit(df).transform(df)"),
        ("fit_transform", "use fit(df).transform(df)"),
        ("score", "use fit(df).evaluate(df)"),
        ("evaluate", "use fit(df).evaluate(df)"),
        ("partial_fit", "with initialState=model"),
        ("setLr", "did you mean 'setLearningRate'?"),
        ("setlearningrate", "did you mean 'setLearningRate'?"),
        ("set_batch_size", "did you mean 'setBatchSize'?"),
        ("getEpoch", "did you mean 'getEpochs'?"),
        ("setNothingAtAll", "explainParams()"),
        ("parameters", "the network has it: fit(df).module.parameters"),
    ],
)
def test_of_an_estimator_the_right_method_is_named(name: str, remedy: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(TorchClassifier(), name)
    assert remedy in str(caught.value)
    assert not hasattr(TorchClassifier(), name)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("predict", "use transform(df), which adds the column of predictions"),
        ("predict_proba", "use transform(df), which adds the column probabilityCol"),
        ("score", "use evaluate(df), or scores(df)"),
        ("eval", "use transform(df)"),
        ("cuda", "use setDevice('cuda')"),
        ("state_dict", "the network has it: module.state_dict"),
        ("fit", "use fit(df) of an estimator"),
    ],
)
def test_of_a_model_too(name: str, remedy: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(fitted(), name)
    assert remedy in str(caught.value)


def test_the_error_of_a_property_is_its_own() -> None:
    class Broken(TorchClassifier):
        @property
        def shown(self) -> Any:
            raise AttributeError("my own words")

    with pytest.raises(AttributeError, match="my own words"):
        _ = Broken().shown
    copy.deepcopy(TorchClassifier())  # which looks for methods that there are not


ADAM = torch.optim.Adam(nn.Linear(1, 1).parameters(), lr=0.02)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": ADAM}, "write optimizer='adam', learningRate=0.02"),
    ({"scheduler": lr_scheduler.StepLR}, "functools.partial(StepLR, step_size=...)"),
    ({"scheduler": lr_scheduler.StepLR(ADAM, 3)}, "functools.partial(StepLR, step_size=...)"),
    ({"scheduler": lambda optimizer, epoch: None}, "needs epoch besides the optimizer"),
    ({"scheduler": "cosine"}, "no names here: write what makes one of the optimizer, such as"),
    (
        {"trainingStep": lambda module, batch: 0.0},
        "trainingStep: <lambda>(module, batch) cannot be called with (module, inputs, target)",
    ),
    ({"loss": lambda output: 0.0}, "loss: <lambda>(output) cannot be called with (output, target)"),
    ({"loss": {"a": len}}, "len(obj) cannot be called with (output, target), as it is"),
    ({"optimizer": lambda: None}, "optimizer: <lambda>() cannot be called with (parameters)"),
    ({"augmentation": lambda x, y: x}, "<lambda>(x, y) cannot be called with (inputs)"),
    ({"callbacks": [PrintLoss]}, "pass an object of the class: PrintLoss()"),
    ({"callbacks": [print]}, "derive a class from sparkdl.Callback"),
    ({"earlyStopping": EarlyStopping}, "pass an object of the class: EarlyStopping()"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_objects_of_the_wrong_kind_come_with_what_to_write(number: int) -> None:
    given, remedy = REFUSED[number]
    with pytest.raises(ParamError) as caught:
        TorchClassifier(**given)
    assert remedy in str(caught.value)


def test_what_makes_a_schedule_or_a_loss_is_taken() -> None:
    @functools.wraps(nn.functional.mse_loss)
    def wrapped(*both: Any) -> Any:
        return nn.functional.mse_loss(*both)

    def three(output: Any, target: Any, factor: float) -> Any: ...

    @functools.wraps(three)
    def two(output: Any, target: Any) -> Any:
        return three(output, target, 2.0)

    losses: list[Any] = [nn.functional.huber_loss, wrapped, two, functools.lru_cache(two)]
    for loss in (*losses, {"a": "mse", "b": lambda *both: 0.0}):
        assert TorchEstimator(loss=loss).getLoss() == loss
    for scheduler in (lr_scheduler.ReduceLROnPlateau, partial(lr_scheduler.StepLR, step_size=3)):
        assert TorchClassifier(scheduler=scheduler).getScheduler() is scheduler
    for loss in (nn.MSELoss, nn.MSELoss(), nn.functional.mse_loss, "mse"):
        assert TorchClassifier(loss=loss).getLoss() is loss


ROWS = pd.DataFrame({"features": [[1.0]], "label": [0.0]})
HABITS: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((np.zeros((3, 2)), np.zeros(3)), {}, "put inputs and labels together"),
    ((ROWS, ROWS["label"]), {}, "put inputs and labels together"),
    (([[1.0]], [0.0]), {}, "put inputs and labels together"),
    ((ROWS,), {"epochs": 3}, "set Params of TorchClassifier by setEpochs(...)"),
    ((), {}, "TorchClassifier.fit needs the argument 'dataset'"),
]


@pytest.mark.parametrize("number", range(len(HABITS)))
def test_fit_says_how_to_give_it_the_data(number: int) -> None:
    args, kwargs, remedy = HABITS[number]
    with pytest.raises(ConfigError) as caught:
        TorchClassifier(module=nn.Identity).fit(*args, **kwargs)
    assert remedy in str(caught.value)


def test_params_take_numpys_numbers_and_paths_and_keep_plain_ones() -> None:
    made = TorchClassifier(
        epochs=np.int32(3),
        learningRate=np.float32(0.5),
        optimizerParams={"betas": (np.float32(0.5), np.float64(0.75))},
        deterministic=np.bool_(True),
        checkpointDir=pathlib.Path("/d"),
        inputShape=(np.int64(2), np.int64(3)),
    )
    values = [made.getEpochs(), made.getLearningRate(), made.getDeterministic(),
              made.getCheckpointDir(), made.getInputShape()]  # fmt: skip
    assert values == [3, 0.5, True, "/d", [2, 3]]
    assert [type(one) for one in values] == [int, float, bool, str, list]
    assert repr(made.getOptimizerParams()) == "{'betas': (0.5, 0.75)}"
    assert type(made.copy({made.epochs: np.int64(5)}).getEpochs()) is int


def test_a_tilde_is_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    made = TorchClassifier(module=nn.Identity, cacheDir="~/kept")
    assert training_values(made, CLASSIFICATION)[1]["cache_dir"] == "/home/me/kept"
