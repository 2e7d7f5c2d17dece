"""Mistakes of the first day: the whole of what is said of each, which names its own remedy."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pyspark.ml.tuning import ParamGridBuilder
from pyspark.sql.types import StructType
from sklearn.metrics import mean_squared_error
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from sparkdl import Callback, EarlyStopping, ParquetSource, TorchClassifier, TorchRunner
from sparkdl.config import CUSTOM
from sparkdl.data.plan import Column, Shard, make_plan
from sparkdl.errors import ConfigError, DataError
from sparkdl.inference.regression import REGRESSION
from sparkdl.serialization.travel.pickling import sent_along
from sparkdl.spark.cluster.probe import Needs
from sparkdl.spark.fit.begin_module import make_module
from sparkdl.spark.fit.check_training import check_training
from sparkdl.spark.fit.check_travels import foreign_names
from sparkdl.spark.frames.columns import refuse_outputs, validation_indicator
from sparkdl.spark.frames.user_data import require_data
from sparkdl.train.objective.loss import CallableLoss, match_shapes
from tests.spark.fit.requests import request
from tests.spark.fit.test_check_rows import X, Y, num_classes
from tests.spark.fit.test_trial_step import step

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Z = Column(name="z", role="feature", dtype="float32", shape=(4,))
GIVEN = 'the module cannot take the features ("x" float32 (batch, 4)): '


class Width(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width)


class Energy(Width):
    """Computes a force, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.layer(x).sum(), x, create_graph=True)
        return force


class NoSuper(nn.Module):
    def __init__(self) -> None:
        self.layer = nn.Linear(4, 2)


class Misspelt(Width):
    def foward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


class InAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 2)]


class TakesLabels(nn.Linear):
    def forward(self, x: torch.Tensor, label: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x)


class Gives(nn.Linear):
    def __init__(self, what: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(4, 3)
        self.what = what

    def forward(self, x: torch.Tensor) -> Any:
        return self.what(super().forward(x))


def raises() -> Any:
    raise RuntimeError("a mistake of mine")


def keras_loss(y_true: torch.Tensor, y_pred: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y_pred, y_true)


def keras_error(y_true: torch.Tensor, y_pred: torch.Tensor) -> torch.Tensor:
    return (y_true[:, None] - y_pred).square().mean()


def unlike(target: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(output, target[:, None].expand(-1, 3).float())


class Epochs(Callback):
    def on_epoch_finished(self, state: Any, record: Any) -> None: ...


class Batches(Callback):
    def on_train_batch_end(self, state: Any) -> None: ...


class Records(Callback):
    def on_epoch_end(self, record: Any) -> None: ...  # type: ignore[override]


class Steps(Callback):
    def on_step_end(self, state: Any, *others: Any) -> None: ...

    def on_improvement(self) -> None:
        """A helper of its own."""


class Untold:
    """What has no name, as an object of a class of the user's."""

    def __call__(self, label: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, label)


def made(module: Any) -> None:
    make_module(request(module))


def shown(module: nn.Module, columns: tuple[Column, ...] = (X, Y), **options: Any) -> Any:
    return num_classes(module, list(columns), request(**options))


def keras_table(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square()


class Beyond(nn.Module):
    """Asks for an embedding that there is not."""

    def __init__(self) -> None:
        super().__init__()
        self.names = nn.Embedding(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.names(x + 2)
        return found


NOTHING = Callback()
SHARD = Shard(shard_id=0, num_rows=1, num_validation_rows=0, fingerprint="of a test")

MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a class that needs arguments": (
        partial(made, Width),
        "module cannot be made: Width raised TypeError: Width.__init__() missing 1 required "
        "positional argument: 'width'; pass Width(...) or functools.partial(Width, ...) (in a job "
        "file model.args)",
    ),
    "a class that fails by itself": (
        partial(made, NoSuper),
        "module cannot be made: NoSuper raised AttributeError: cannot assign module before "
        "Module.__init__() call; begin its __init__ with super().__init__()",
    ),
    "a function that needs arguments": (
        partial(made, lambda width: nn.Linear(4, width)),
        "module cannot be made: <lambda> raised TypeError: <lambda>() missing 1 required "
        "positional argument: 'width'; it is called without arguments: give it these by "
        "functools.partial",
    ),
    "an exported program": (
        lambda: made(torch.export.export(nn.Linear(4, 3), (torch.ones(2, 4),))),
        "module cannot be made: ExportedProgram raised RuntimeError: Unable to call "
        "ExportedProgram directly. You should use `exported_program.module()` instead.; give the "
        "module that was exported, which can train",
    ),
    "a layer of another width": (
        lambda: shown(nn.Sequential(nn.Linear(5, 3))),
        'the module cannot take the features ("x" float32 (batch, 4)): layer 0, Linear('
        "in_features=5, out_features=3, bias=True), got float32 (batch, 4): mat1 and mat2 shapes "
        "cannot be multiplied (batchx4 and 5x3); let 0 have in_features=4, or adapt the module",
    ),
    "a function that gives the class": (
        partial(made, lambda: Misspelt),
        "module must be a torch.nn.Module or a callable that returns one; it returned the class "
        "Misspelt; pass module=Misspelt, or let it return Misspelt()",
    ),
    "a function that gives something else": (
        partial(made, lambda: 3),
        "module must be a torch.nn.Module or a callable that returns one; it returned int",
    ),
    "layers in a list": (
        lambda: check_training(InAList(), request()),
        "the module has no parameters, so that nothing trains; layers in a list or dict count "
        "only if that is an nn.ModuleList or nn.ModuleDict",
    ),
    "forward is misspelt": (
        lambda: shown(Misspelt(2)),
        "the module Misspelt has no method forward, which gets the features; rename 'foward', if "
        "that is it",
    ),
    "a list of layers": (
        lambda: shown(nn.ModuleList([nn.Linear(4, 2)])),
        "the module ModuleList has no method forward, which gets the features; write one",
    ),
    "forward takes the label": (
        lambda: shown(TakesLabels(4, 3)),
        f"{GIVEN}TakesLabels.forward() missing 1 required positional argument: 'label'; forward "
        "takes (x: 'torch.Tensor', label: 'torch.Tensor'): name a column for each argument, "
        "inputs={argument: column}",
    ),
    "two columns for one argument": (
        lambda: shown(nn.Linear(4, 3), (X, Z, Y)),
        'the module cannot take the features ("x" float32 (batch, 4), "z" float32 (batch, 4)): '
        "Linear.forward() takes 2 positional arguments but 3 were given; forward takes (input: "
        "torch.Tensor), and each input column is an argument of forward; to have one vector, put "
        "the columns together with VectorAssembler, or F.array",
    ),
    "one number and a layer that takes vectors": (
        lambda: shown(nn.Linear(1, 3), (replace(X, shape=()), Y)),
        'the module cannot take the features ("x" float32 (batch,)): Linear(in_features=1, '
        "out_features=3, bias=True), got float32 (batch,): mat1 and mat2 shapes cannot be "
        "multiplied (1x2 and 1x3); set inputShape=[1], or adapt the module",
    ),
    "an image without channels": (
        lambda: shown(nn.Conv2d(1, 3, 3), (replace(X, shape=(8, 8)), Y)),
        'the module cannot take the features ("x" float32 (batch, 8, 8)): Conv2d(1, 3, '
        "kernel_size=(3, 3), stride=(1, 1)), got float32 (batch, 8, 8): Given groups=1, weight of "
        "size [3, 1, 3, 3], expected input[1, 2, 8, 8] to have 1 channels, but got 2 channels "
        "instead; set inputShape=[1, 8, 8], or adapt the module",
    ),
    "numbers that have no embedding": (
        lambda: shown(Beyond(), (replace(X, dtype="int64"), Y)),
        'the module cannot take the features ("x" int64 (batch, 4)): layer names, Embedding(2, 3), '
        "got int64 (batch, 4): index out of range in self; it has embeddings of 0 to 1: raise "
        "num_embeddings above the largest number, or make numbers from 0 on of the values, as "
        "StringIndexer does",
    ),
    "an output too few": (
        lambda: match_shapes(torch.zeros(5, 1), torch.zeros(5, 2)),
        "the module's output has shape (batch, 1) but the target has shape (batch, 2); give its "
        "last layer 2 outputs, one for each number of the label",
    ),
    "a loss of scikit-learn": (
        lambda: step(task=REGRESSION, loss=lambda o, t: mean_squared_error(t, o)),
        "the first step of training fails in 'return np.array(obj, copy=copy, dtype=dtype, "
        "**kwargs)' (asarray): RuntimeError: Can't call numpy() on Tensor that requires grad. Use "
        "tensor.detach().numpy() instead.; the same would happen on every worker: numpy and "
        "scikit-learn compute no gradients; write it with functions of torch",
    ),
    "an argument of another name": (
        lambda: shown(
            nn.Linear(4, 3),
            (Column(name="x", role="feature", dtype="float32", shape=(4,), argument="x"), Y),
        ),
        'the module cannot take the features (x="x" float32 (batch, 4)): Linear.forward() got an '
        "unexpected keyword argument 'x'; forward takes (input: torch.Tensor): name a column for "
        "each argument, inputs={argument: column}",
    ),
    "forward without return": (
        lambda: shown(Gives(lambda logits: None)),
        "a classifier's module must return a tensor (batch, classes); it returned NoneType; let "
        "forward return the logits",
    ),
    "an array": (
        lambda: shown(Gives(lambda logits: logits.numpy())),
        "a classifier's module must return a tensor (batch, classes); it returned ndarray; let "
        "forward return the tensor itself, without numpy()",
    ),
    "a tuple": (
        lambda: shown(Gives(lambda logits: (logits, 3))),
        "a classifier's module must return a tensor (batch, classes); it returned tuple; return "
        "the logits alone, or use TorchEstimator for other outputs",
    ),
    "the class": (
        lambda: shown(Gives(lambda logits: logits.argmax(1))),
        "a classifier's module must return logits (batch, classes), of which a gradient can be "
        "taken; it returned int64; leave argmax out: transform adds the class",
    ),
    "no gradient": (
        lambda: step(module=Gives(torch.Tensor.detach)),
        "the first step of training fails: RuntimeError: element 0 of tensors does not require "
        "grad and does not have a grad_fn; the same would happen on every worker: the loss hangs "
        "together with no parameter that trains; look in forward and loss for detach, no_grad, "
        "argmax, item, or a new tensor made of values",
    ),
    "a loss of Keras": (
        lambda: shown(nn.Linear(4, 3), loss=keras_loss),
        "the loss function takes (y_true, y_pred), and is called with the module's output "
        "first, then the label; change the order of its parameters, or pass lambda output, label: "
        "function(label, output)",
    ),
    "a loss that gives another value": (
        lambda: shown(nn.Linear(4, 3), task=CUSTOM, loss=unlike),
        "the loss function takes (target, output), and is called with the module's output "
        "first, then the label; change the order of its parameters, or pass lambda output, label: "
        "function(label, output)",
    ),
    "an object as loss": (
        lambda: shown(nn.Linear(4, 3), loss=Untold()),
        "the loss function takes (label, logits), and is called with the module's output "
        "first, then the label; change the order of its parameters, or pass lambda output, label: "
        "function(label, output)",
    ),
    "a loss without a graph": (
        lambda: CallableLoss(lambda o, t: 0.5)(torch.zeros(2, 3), torch.zeros(2), None),
        "the loss of a batch of 2 samples must be a tensor without dimensions or of shape (2, "
        "...), or a pair (sum of losses, sum of weights); received float; let it return what "
        "torch computes, without item()",
    ),
    "a loss of Keras by name": (
        lambda: shown(nn.Linear(4, 1), loss="binary_crossentropy"),
        "unknown loss 'binary_crossentropy'; did you mean 'bce_with_logits'? known: bce, "
        "bce_with_logits, cross_entropy, hinge_embedding, huber, kl_div, l1, mse, nll, "
        "poisson_nll, smooth_l1, soft_margin",
    ),
    "a metric of Keras": (
        lambda: check_training(nn.Linear(4, 3), request(metrics={"acc": "acc"})),
        "unknown metric 'acc'; did you mean 'accuracy'? known: accuracy, auroc, "
        "average_precision, cohen_kappa, f1, mcc, precision, recall, specificity; for others pass "
        "a torchmetrics.Metric",
    ),
    "a class of metrics": (
        lambda: check_training(nn.Linear(4, 3), request(metrics={"a": MulticlassAccuracy})),
        "metric 'a' cannot be made: MulticlassAccuracy() raised ValueError: Argument `num_classes` "
        "can only be `None` for `average='micro'`, but got `average=macro`.; pass an object of it, "
        "MulticlassAccuracy(...), or the name of a metric, such as 'accuracy'",
    ),
    "a schedule of nothing": (
        lambda: check_training(nn.Linear(4, 3), request(scheduler=raises)),
        "the schedule cannot be made: TypeError: raises() takes 0 positional arguments but 1 was "
        "given; scheduler is called with the optimizer alone, and returns its schedule",
    ),
    "a callback's method that nobody calls": (
        lambda: check_training(nn.Linear(4, 3), request(callbacks=(Steps(), Epochs()))),
        "nobody calls on_epoch_finished of the callback Epochs; did you mean 'on_epoch_end'? "
        "known: on_train_begin, on_step_end, on_evaluation_end, on_epoch_end, on_train_end",
    ),
    "a callback of Keras": (
        lambda: check_training(nn.Linear(4, 3), request(callbacks=(Batches(),))),
        "nobody calls on_train_batch_end of the callback Batches; did you mean 'on_step_end'? "
        "known: on_train_begin, on_step_end, on_evaluation_end, on_epoch_end, on_train_end",
    ),
    "a callback with other arguments": (
        lambda: check_training(nn.Linear(4, 3), request(callbacks=(Records(),))),
        "on_epoch_end of the callback Records takes (self, record), and is called with (self, "
        "state, record)",
    ),
    "a path": (
        lambda: TorchClassifier(module=nn.Identity).fit("data/train"),
        "fit takes a DataFrame of Spark or pandas, or a source such as sparkdl.ParquetSource; "
        "received str; spark.read.parquet(path) and sparkdl.ParquetSource(path) read files, and "
        "spark.table(name) a table or a view",
    ),
    "a loader": (
        lambda: TorchClassifier(module=nn.Identity).fit(
            DataLoader(TensorDataset(torch.zeros(3, 4)))
        ),
        "fit takes a DataFrame of Spark or pandas, or a source such as sparkdl.ParquetSource; "
        "received DataLoader; sparkdl.DatasetSource(function) takes what makes a dataset",
    ),
    "the class of a source": (
        lambda: TorchClassifier(module=nn.Identity).fit(ParquetSource),
        "fit takes a DataFrame of Spark or pandas, or a source such as sparkdl.ParquetSource; "
        "received the class ParquetSource; pass an object of it, ParquetSource(...)",
    ),
    "several columns as one": (
        lambda: TorchClassifier(featuresCol=["a", "b"]),
        "featuresCol must be a string; received ['a', 'b']; put columns together with "
        "VectorAssembler or F.array, or name them as inputCols, each of which is an argument of "
        "forward",
    ),
    "a shape with the batch": (
        lambda: TorchClassifier(inputShape=(-1, 4)),
        "inputShape: expected the shape of one row, without the batch, such as (1, 28, 28), or "
        "a list with a shape or None per input column; received (-1, 4)",
    ),
    "an option that an optimizer has not": (
        lambda: check_training(nn.Linear(4, 3), request(optimizer_params={"weightdecay": 0.1})),
        "optimizer SGD refused {'weightdecay': 0.1}: it has no option 'weightdecay'; did you mean "
        "'weight_decay'?",
    ),
    "Params by their names": (
        lambda: TorchClassifier(module=nn.Identity).fit(None, {"epochs": 3}),
        "the keys are Params, and 'epochs' is a name; write {estimator.epochs: ...} with the name "
        "of your TorchClassifier in place of estimator",
    ),
    "two output columns of one name": (
        lambda: refuse_outputs(StructType(), ("p", "raw", "P"), "the model of TorchClassifier"),
        "the output columns of the model of TorchClassifier must differ; received ['p', 'raw', "
        "'P']",
    ),
    "a seed that torch does not take": (
        lambda: TorchClassifier(seed=2**64),
        "seed must be at least -2**63 and less than 2**64; received 18446744073709551616",
    ),
    "no seed": (
        lambda: TorchClassifier(seed=None),
        "seed cannot be None; leave it out to have 0: random seed.",
    ),
    "a schedule by a name": (
        lambda: TorchClassifier(scheduler="cosine"),
        "scheduler: received 'cosine', but schedules have no names here: write what makes one of "
        "the optimizer, such as functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10)",
    ),
    "a grid with a text": (
        lambda: ParamGridBuilder().addGrid(TorchClassifier.learningRate, [0.1, "a"]).build(),
        "learningRate must be a number or 'auto'; received 'a'",
    ),
    "the device of a plain loop": (
        lambda: TorchClassifier(device=torch.device("cuda", 0)),
        "device must be one of ('auto', 'cpu', 'cuda'); received 'cuda:0'; write 'cuda': each "
        "worker takes the GPU that Spark assigns to it",
    ),
    "Keras' word for a GPU": (
        lambda: TorchRunner(num_workers=1, device="gpu"),
        "device must be one of ('auto', 'cpu', 'cuda'); received 'gpu'; write 'cuda': each worker "
        "takes the GPU that Spark assigns to it",
    ),
    "a module that is frozen": (
        lambda: check_training(nn.Linear(4, 3).requires_grad_(False), request()),
        "none of the module's 2 parameters trains: all have requires_grad=False; set it to True "
        "for those to train",
    ),
    "forward that asks for gradients": (
        lambda: shown(Energy()),
        "the module's forward asks for gradients on the features (\"x\" float32 (batch, 4)): "
        "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn; "
        "evaluation and transform compute without them: put what needs them into 'with "
        "torch.enable_grad():'",
    ),
    "a loss that compares classes with a table": (
        lambda: step(module=nn.Linear(4, 2), loss=keras_table),
        "the first step of training fails in 'return (output - target).square()' (keras_table): "
        "RuntimeError: The size of tensor a (2) must match the size of tensor b (32) at "
        "non-singleton dimension 1; the same would happen on every worker: the loss gets outputs "
        "of the shape (batch, 2) and labels of the shape (batch,); make one of the two like the "
        "other",
    ),
    "patience alone": (
        lambda: TorchClassifier(earlyStopping=5),
        "earlyStopping: received 5; write earlyStopping=EarlyStopping(patience=5)",
    ),
    "early stopping that is wanted": (
        lambda: TorchClassifier(earlyStopping=True),
        "earlyStopping: received True; write earlyStopping=EarlyStopping()",
    ),
    "one callback": (
        lambda: TorchClassifier(callbacks=NOTHING),
        f"callbacks: received {NOTHING!r}; write callbacks=[Callback(...)]",
    ),
    "rows for validation alone": (
        lambda: make_plan(
            columns=(X,), shards=[replace(SHARD, num_rows=0, num_validation_rows=9)], world_size=1,
            batch_size=4, epochs=1, max_steps=-1,
        ),
        "all 9 rows are for validation, and none for training; check the column of "
        "validationIndicatorCol, or validationFraction",
    ),
    "early stopping among callbacks": (
        lambda: TorchClassifier(callbacks=[EarlyStopping(patience=3)]),
        "callbacks: received "
        f"{EarlyStopping(patience=3)!r}, which is no callback; write "
        "earlyStopping=EarlyStopping(...) instead",
    ),
    "a word of save": (
        lambda: TorchClassifier().save("model", overwrite=True),
        "TorchClassifier.save has no argument 'overwrite'; known: path; "
        "write().overwrite().save(path) replaces what is there",
    ),
    "a function that was called": (
        lambda: TorchRunner(num_workers=0).run(3),
        "run takes a function or the path of a script; received 3; pass the function itself and "
        "its arguments, run(train, ...), without calling it",
    ),
    "a function that lacks arguments": (
        lambda: TorchRunner(num_workers=2).run(keras_loss, 1),
        "keras_loss needs the argument 'y_pred': keras_loss(y_pred=...)",
    ),
    "an argument that it does not take": (
        lambda: TorchRunner(num_workers=2).run(keras_loss, 1, 2, y=3),
        "keras_loss has no argument 'y'; known: y_true, y_pred",
    ),
}  # fmt: skip


SLOW = ("no gradient",)
"""These take a step on the driver, which imports some of torch."""


@pytest.mark.parametrize(
    "mistake", [pytest.param(m, marks=[pytest.mark.slow] * (m in SLOW)) for m in MISTAKES]
)
def test_all_that_is_said_of_a_mistake(mistake: str) -> None:
    make, message = MISTAKES[mistake]
    with pytest.raises((ConfigError, DataError)) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_code_that_wants_a_gpu_which_the_driver_has_not() -> None:
    with pytest.raises((AssertionError, RuntimeError)) as of_torch:
        torch.zeros(1).cuda()
    told = f"{of_torch.type.__name__}: {of_torch.value}"

    def on_a_gpu() -> nn.Module:
        return nn.Linear(4, 3).cuda()

    with pytest.raises(ConfigError) as caught:
        made(on_a_gpu)
    assert str(caught.value) == (
        f"module cannot be made: {on_a_gpu.__qualname__} raised {told}; make it on the CPU: each "
        "worker moves it to its own device"
    )
    for place in ("cuda", "cuda:0"):
        with pytest.raises(ConfigError) as caught:
            shown(Gives(lambda logits: logits.to(place)))  # noqa: B023
        assert str(caught.value) == (
            f"the module's forward asks for a GPU, which the driver has not: {told}; leave that "
            "out: module and inputs are on the worker's own device, x.device of an input x"
        )


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (
            nn.CrossEntropyLoss(weight=torch.tensor([1, 2, 3])),
            "the loss's weight is torch.int64, and outputs are torch.float32: pass it as "
            "weight.to(torch.float32)",
        ),
        (
            "bce_with_logits",
            "give its last layer 1 output, or for classes use loss='cross_entropy' in a "
            "TorchClassifier, or an array of 3 numbers as the label of a TorchRegressor",
        ),
    ],
)
def test_the_remedy_of_a_loss_names_what_is_wrong(loss: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        shown(nn.Linear(4, 3), loss=loss)
    assert str(caught.value).endswith(said)


def test_files_of_images_are_known_by_their_bytes() -> None:
    class Flat(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.float())

    files = Column(name="img", role="feature", dtype="uint8", shape=(69,))
    with pytest.raises(ConfigError) as caught:
        shown(Flat(48, 3), (files, Y))
    assert 'decode files of images, inputs=[sparkdl.Image("img")]' in str(caught.value)
    assert "call .float()" not in str(caught.value)


def test_weights_of_another_dtype_in_a_function_are_told_before_any_job() -> None:
    weights = torch.ones(3, dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"two tensors are of different dtypes"):
        step(module=nn.Linear(4, 3), loss=lambda o, y: F.cross_entropy(o, y, weight=weights))


def test_a_loss_that_is_the_same_both_ways_may_have_its_parameters_in_any_order() -> None:
    number = Column(name="y", role="label", dtype="float32", shape=())
    shown(nn.Linear(4, 1), (X, number), task=CUSTOM, loss=keras_error)
    shown(nn.Linear(4, 3), loss=lambda labels, logits: F.cross_entropy(labels, logits))


def test_an_executor_that_cannot_run_a_file_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beginner_program.py").write_text("raise RuntimeError('two sessions')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    needs = Needs(names=frozenset({("beginner_program", "Net")}))
    assert needs.missing() == (
        "cannot import beginner_program.Net (RuntimeError: two sessions); workers import this file "
        "too: put what only the program shall do, such as starting Spark, below if __name__ == "
        "'__main__', or into another file"
    )
    assert "beginner_program" not in sys.modules
    lacks = Needs(names=frozenset({("beginner_module", "Net")})).missing()
    assert lacks is not None
    assert lacks.startswith("cannot import beginner_module.Net (ModuleNotFoundError: No module")
    assert "; send your own modules with --py-files" in lacks


def test_a_module_that_the_program_has_made_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = types.ModuleType("made_by_a_cell")
    monkeypatch.setitem(sys.modules, "made_by_a_cell", made)
    space = {"__name__": "__main__"}
    exec("def use(x):\n    import made_by_a_cell, os, json\n    return made_by_a_cell.K", space)
    assert foreign_names(sent_along(space["use"])) == {("made_by_a_cell", "")}


@pytest.mark.spark
def test_params_of_another_estimator_and_wrong_ones_are_told_before_the_first_fit(
    spark: SparkSession,
) -> None:
    df = spark.createDataFrame([([1.0] * 4, 0)], "features array<float>, label int")
    made, other = TorchClassifier(module=nn.Identity), TorchClassifier()
    grid = ParamGridBuilder().addGrid(other.learningRate, [0.1, 1.0]).build()
    said = (
        f"the Param learningRate of {other.uid} is none of {made.uid}, which is to be fitted; take "
        "the Params of that one"
    )
    for fit in (made.fit, made.fitMultiple):
        with pytest.raises(ConfigError) as caught:
            fit(df, grid)
        assert str(caught.value) == said
    with pytest.raises(ConfigError) as caught:
        made.fitMultiple(df, [{made.epochs: 1}, {made.epochs: 0}])
    assert str(caught.value) == "epochs must be at least 1; received 0"


@pytest.mark.spark
def test_rows_for_validation_go_into_the_same_frame(spark: SparkSession) -> None:
    df: DataFrame = spark.createDataFrame([([1.0] * 4, "train")], "x array<float>, part string")
    with pytest.raises(ConfigError) as caught:
        TorchClassifier(module=nn.Identity).fit(df, df)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "TorchClassifier takes one DataFrame with all columns, and Params as a dict; received "
        "DataFrame as the second argument; rows for validation go into the same one, with a "
        "boolean column that marks them (validationIndicatorCol), or are drawn from it "
        "(validationFraction=0.1)"
    )
    with pytest.raises(ValueError) as of_column:
        validation_indicator(df.schema, "part")
    assert str(of_column.value) == (
        'column "part" marks validation rows and must be boolean; it is string; make it of a '
        'comparison, such as F.col("part") == ...'
    )
    no_data = "fit takes a DataFrame of Spark or pandas, or a source such as sparkdl.ParquetSource"
    for given, said in (
        (df.x, "a Column, which has an attribute for whatever name; pass the DataFrame it is of"),
        ([df, df], "a list of DataFrames; pass one: train, test = df.randomSplit([0.8, 0.2])"),
        (df.pandas_api(), "a DataFrame of pandas on Spark; pass what its to_spark() gives"),
    ):
        with pytest.raises(ConfigError) as of_data:
            require_data(given)
        assert str(of_data.value) == f"{no_data}; received {said}"
