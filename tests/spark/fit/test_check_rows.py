"""Module and rows must fit together before anything is launched."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torchmetrics import classification

from sparkdl.config import CUSTOM, EarlyStopping, Task, TrainConfig
from sparkdl.data.column_stats import ColumnStats, SpooledShard
from sparkdl.data.plan import Column, Shard, TrainPlan, make_plan
from sparkdl.errors import ConfigError, DataError
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.inference.regression import REGRESSION
from sparkdl.inputs import Sequence
from sparkdl.mesh import Mesh
from sparkdl.spark.fit.check_rows import (
    check_counted,
    check_empty_batches,
    check_labels,
    check_plan,
    check_rows,
    check_single_rows,
    shaped,
    warn_of_labels,
)
from sparkdl.spark.fit.example import Example
from sparkdl.spark.fit.trial import Sink, try_module
from sparkdl.spark.frames.example_rows import UserRows
from sparkdl.spark.frames.prepare_columns import prepare
from sparkdl.spark.frames.row_table import TableSpec
from sparkdl.spark.frames.shard_table import ShardTable
from sparkdl.spark.run.run import FitRequest
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.train.objective.training_step import objective_of
from tests.spark.fit.requests import config, request

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

X = Column(name="x", role="feature", dtype="float32", shape=(4,))
Y = Column(name="y", role="label", dtype="int64", shape=())
NO_GPUS: Any = SimpleNamespace(
    cluster=SimpleNamespace(gpus_per_executor=0), max_workers=None, num_workers=2
)


def test_rows_for_validation_that_were_asked_for_and_are_not_there() -> None:
    def check(**changes: Any) -> None:
        asked = request(early_stopping=EarlyStopping(), **changes)
        checked: Any = SimpleNamespace(config=asked.config, request=asked, has_logs=False)
        plan: Any = SimpleNamespace(num_rows=40)
        check_plan(checked, plan, has_validation=False)

    with pytest.raises(ConfigError, match=r"=0.001 has drawn none of the 40 rows .*; raise it, or"):
        check(validation_fraction=0.001)
    with pytest.raises(ConfigError, match=r'column "v" marks none of the 40 rows for validation: '):
        check(validation_col="v")
    with pytest.raises(ConfigError, match=r"validationFraction=0.1"):
        check()


def num_classes(
    module: nn.Module,
    columns: list[Column],
    asked: FitRequest,
    sink: Sink | None = None,
    rows: dict[str, Any] | None = None,
) -> int | None:
    """What a trial shows, on zeros or on rows."""
    objective = objective_of(asked.config, module)
    checked: Any = SimpleNamespace(
        module=module,
        weights=None,
        objective=objective,
        request=asked,
        config=asked.config,
        float_dtype="float32",
    )
    return try_module(checked, Example(columns=tuple(columns), rows=rows), sink).num_classes


class Shy(nn.Linear):
    """Cannot be looked at."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._forward_hooks:
            raise RuntimeError("somebody looks")
        return super().forward(x)


def test_a_module_that_cannot_be_looked_at_trains_without_a_graph() -> None:
    graphs: list[Any] = []

    assert num_classes(Shy(4, 3), [X, Y], request(), graphs.append) == 3
    assert graphs == []
    num_classes(nn.Linear(4, 3), [X, Y], request(), graphs.append)
    assert [node["op"] for node in graphs[0]["nodes"]] == ["input", "Linear", "output"]
    with pytest.raises(ConfigError, match="cannot take the features"):
        num_classes(nn.Linear(5, 3), [X, Y], request(), graphs.append)


@pytest.mark.slow
def test_a_compiled_module_is_not_looked_at() -> None:
    graphs: list[Any] = []
    net = nn.Sequential(torch.compile(nn.Linear(4, 6), backend="eager"), nn.Linear(6, 3))
    assert num_classes(net, [X, Y], request(), graphs.append) == 3
    assert graphs == []


def test_layers_are_found_to_divide_in_a_module_that_is_looked_at() -> None:
    """Layers with hooks are passed by, and whoever draws the graph has hooks on all."""
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    asked = request(parallelism=Mesh(tensor=2))
    graphs: list[Any] = []
    assert num_classes(module, [X, Y], asked, graphs.append) == 3
    assert [node["op"] for node in graphs[0]["nodes"][1:-1]] == ["Linear", "ReLU", "Linear"]


def test_dry_run_counts_the_classes() -> None:
    assert num_classes(nn.Linear(4, 3), [X, Y], request()) == 3
    one = request(loss="bce_with_logits")
    assert num_classes(nn.Linear(4, 1), [X, Y], one) == 2
    assert num_classes(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), [X, Y], one) == 2
    assert num_classes(nn.Linear(4, 1), [X, Y], request(task=REGRESSION)) is None


@pytest.mark.parametrize("module", [nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))])
def test_one_output_is_no_output_for_each_class(module: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"one output, .* give the module two, or use loss='bce_"):
        num_classes(module, [X, Y], request())


def test_a_softmax_before_the_loss_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    num_classes(nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)), [X, Y], request(loss="nll"))
    num_classes(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), [X, Y], request())
    assert not caplog.messages
    num_classes(nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), [X, Y], request())
    assert "leave the softmax out" in caplog.messages[0]


def test_nll_of_what_are_no_logarithms_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for asked in (request(loss="nll"), request(loss=nn.NLLLoss())):
        num_classes(nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)), [X, Y], asked)
        assert not caplog.messages
        num_classes(nn.Linear(4, 3), [X, Y], asked)
        assert "it would grow them without end; use loss='cross_entropy'" in caplog.messages[0]
        caplog.clear()


@pytest.mark.parametrize(
    ("last", "label", "said"),
    [
        (nn.Sigmoid(), 7.5, 'a sigmoid, which gives 0 to 1, and "y" is 7.5 in one of'),
        (nn.Tanh(), -2.0, 'a tanh, which gives -1 to 1, and "y" is -2 in one of'),
        (nn.ReLU(), -2.0, 'a relu, which gives 0 to inf, and "y" is -2 in one of'),
        (nn.Sigmoid(), 0.5, None),
        (nn.Tanh(), -0.5, None),
        (nn.ReLU(), 7.5, None),
        (nn.Identity(), 7.5, None),
    ],
)
def test_labels_that_the_last_function_cannot_give_are_warned_of(
    last: nn.Module, label: float, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    rows = {"feature x": torch.zeros(2, 4), "label y": torch.tensor([0.5, label])}
    target = Column(name="y", role="label", dtype="float32", shape=())
    module = nn.Sequential(nn.Linear(4, 1), last)
    for loss in ("mse", nn.SmoothL1Loss()):
        num_classes(module, [X, target], request(loss=loss, task=REGRESSION), rows=rows)
        assert (not caplog.messages) if said is None else (said in caplog.messages[0])
        caplog.clear()


def test_an_input_shape_is_that_of_one_row() -> None:
    with pytest.raises(DataError, match=r"\(32, 4\) cannot hold; .* leave out the batch, \[4\]$"):
        X.reshaped((32, 4))
    with pytest.raises(DataError, match=r"\(32, 5\) cannot hold$"):
        X.reshaped((32, 5))


def test_rows_of_one_class_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    checked: Any = SimpleNamespace(request=request(label_col="y"))
    shards: list[Any] = [
        SimpleNamespace(columns=[ColumnStats(), ColumnStats(minimum=low, maximum=2.0)])
        for low in (0.0, 2.0)
    ]
    for classes, parts in ((3, shards[1:]), (3, shards), (None, shards[1:])):
        found: Any = SimpleNamespace(trial=SimpleNamespace(num_classes=classes), columns=[])
        warn_of_labels(checked, found, parts)
    assert caplog.messages == [
        'all rows have the label 2 in "y": the model can learn nothing but to give that; look at '
        "what selects the rows"
    ]


@pytest.mark.parametrize(
    ("dtype", "low", "high", "is_told"),
    [
        ("float32", 1.7e9, 1.7e9 + 299, True),
        ("float32", 1.7e9, 1.7e9, True),  # as they are when all have become equal
        ("float32", 1e4, 1e4 + 299, False),
        ("float32", 1e4, 1e4, False),
        ("float64", 1.7e9, 1.7e9 + 299, False),
    ],
)
def test_labels_that_float32_rounds_together_are_warned_of(
    dtype: str, low: float, high: float, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    checked: Any = SimpleNamespace(request=request(label_col="y"))
    shard: Any = SimpleNamespace(columns=[ColumnStats(), ColumnStats(minimum=low, maximum=high)])
    label = Column(name="y", role="label", dtype=dtype, shape=())
    found: Any = SimpleNamespace(trial=SimpleNamespace(num_classes=None), columns=[X, label])
    warn_of_labels(checked, found, [shard])
    told = f'the labels in "y" are from 1700000000 to {high:.0f}, where float32 has steps of 128, '
    assert [text.startswith(told) for text in caplog.messages] == [True] * is_told


WEIGHTS = torch.tensor([1.0, 5.0, 0.2])


def weighted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, weight=WEIGHTS)


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)


def pair(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = nn.functional.cross_entropy(output, target, weight=WEIGHTS, reduction="sum")
    return loss, WEIGHTS[target].sum()


@pytest.mark.parametrize(("loss", "is_warned_of"), [(weighted, True), (mean, False), (pair, False)])
def test_a_function_that_is_no_mean_over_rows(
    loss: Any, is_warned_of: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rows = {"feature x": torch.arange(32.0).reshape(8, 4), "label y": torch.arange(8) // 3}
    num_classes(nn.Linear(4, 3), [X, Y], request(loss=loss), rows=rows)
    assert ("is no mean over rows: it gives" in caplog.text) is is_warned_of
    num_classes(nn.Linear(4, 3), [X, Y], request(loss=refuses), rows=rows)


class Counting:
    """Weighs the loss by how often it was called."""

    calls = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return mean(output, target) * self.calls


def test_a_loss_that_counts_its_calls_is_not_asked() -> None:
    rows = {"feature x": torch.arange(32.0).reshape(8, 4), "label y": torch.arange(8) // 3}
    loss = Counting()
    num_classes(nn.Linear(4, 3), [X, Y], request(loss=loss), rows=rows)
    assert loss.calls == 0


class Focal(nn.CrossEntropyLoss):
    """Its mean is over rows, not over class weights."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = nn.functional.cross_entropy(output, target, self.weight, reduction="none")
        losses = (1 - torch.exp(-losses)) * losses
        return losses if self.reduction == "none" else losses.mean()


class RootMean(nn.MSELoss):
    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(output, target).sqrt()


class Halved(nn.MSELoss):
    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(output, target) / 2


class ByClass(nn.CrossEntropyLoss):
    """Gives the losses of classes in place of those of rows."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = output.softmax(1).mean(0)
        return losses if self.reduction == "none" else losses.mean()


@pytest.mark.parametrize(
    ("loss", "task", "said"),
    [
        (Focal(weight=WEIGHTS), CLASSIFICATION, "the loss Focal gives"),
        (Focal(), CLASSIFICATION, None),
        (RootMean(), REGRESSION, "the loss RootMean gives"),
        (Halved(), REGRESSION, None),
        (ByClass(), CLASSIFICATION, r"ByClass\(reduction='none'\) returned \(3,\) for 2 samples"),
    ],
)
def test_a_loss_module_means_what_its_rows_add_up_to(
    loss: nn.Module, task: Task, said: str | None
) -> None:
    label = Y if task == CLASSIFICATION else replace(Y, dtype="float32")
    rows = {"feature x": torch.arange(32.0).reshape(8, 4), "label y": torch.arange(8) // 3}
    if task == REGRESSION:
        rows["label y"] = rows["label y"].float().unsqueeze(1)
        label = replace(label, shape=(1,))
    net = nn.Linear(4, 3 if task == CLASSIFICATION else 1)
    asked = request(loss=loss, task=task)
    if said is None:
        num_classes(net, [X, label], asked, rows=rows)
        return
    with pytest.raises(ConfigError, match=said):
        num_classes(net, [X, label], asked, rows=rows)


def bce(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy(output.squeeze(1), target.float())


def test_a_sigmoid_before_a_function_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    num_classes(nn.Sequential(nn.Sigmoid(), nn.Linear(4, 1)), [X, Y], request(loss=refuses))
    assert not caplog.messages
    num_classes(nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), [X, Y], request(loss=bce))
    assert "seems to end in a Sigmoid" in caplog.messages[0]


class Squashed(nn.Linear):
    """Ends in a sigmoid that is no layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(super().forward(x)).squeeze(-1)


class Gated(nn.Linear):
    """Gives logits, which a sigmoid is a part of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out * torch.sigmoid(out)


def test_a_sigmoid_before_a_loss_of_logits_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    asked = request(loss="bce_with_logits")
    for plain in (nn.Linear(4, 1), Gated(4, 1), nn.Sequential(nn.Sigmoid(), nn.Linear(4, 1))):
        num_classes(plain, [X, Y], asked)
    assert not caplog.messages
    for squashed in (Squashed(4, 1), nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())):
        num_classes(squashed, [X, Y], asked)
        assert caplog.messages == [
            "the module seems to end in a sigmoid, but the loss takes what comes before it "
            "(logits), and learns slowly otherwise; leave the sigmoid out: transform of a "
            "classifier applies it"
        ]
        caplog.clear()


def test_metrics_that_ignore_a_weight_column_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = request(weight_col="w", loss="cross_entropy", metrics={"f1": "f1"})
    num_classes(nn.Linear(4, 3), [X, Y], asked)
    assert not caplog.messages
    own = classification.MulticlassF1Score(num_classes=3)
    asked = request(weight_col="w", loss="cross_entropy", metrics={"f1": "f1", "own": own})
    num_classes(nn.Linear(4, 3), [X, Y], asked)
    assert "weightCol does not count in the metrics ['own']" in caplog.messages[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss": "bce_with_logits"},
            r"output has shape \(batch, 3\) but the target has shape \(batch,\)",
        ),
        (
            {"task": REGRESSION, "loss": "mse"},
            "give its last layer 1 output, or for classes use loss='cross_entropy'",
        ),
        (
            {"task": REGRESSION, "loss": nn.GaussianNLLLoss()},
            r"cannot compare the module's output with \"y\" int64 \(batch,\): TypeError: ",
        ),
    ],
)
def test_the_loss_must_take_output_and_label(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        num_classes(nn.Linear(4, 3), [X, Y], request(**options))


def refuses(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise AssertionError("zeros")


def test_a_loss_of_the_users_is_not_tried() -> None:
    assert num_classes(nn.Linear(4, 3), [X, Y], request(loss=refuses)) == 3


def test_a_loss_with_a_weight_for_each_row_of_a_batch() -> None:
    weights = nn.BCEWithLogitsLoss(weight=torch.linspace(1, 2, 24))
    asked = request(task=REGRESSION, loss=weights)
    assert num_classes(nn.Linear(4, 1), [X, replace(Y, dtype="float32")], asked) is None
    with pytest.raises(ConfigError, match=r"shape \(batch, 3\) but the target has"):
        num_classes(nn.Linear(4, 3), [X, replace(Y, dtype="float32")], asked)


class Recorder(nn.Module):
    """Remembers its inputs."""

    took: ClassVar = Mock()  # which trials leave alone, as all that is not the user's

    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.took(*inputs)
        out: torch.Tensor = self.norm(self.lazy(inputs[0]))
        return out + torch.rand(1)


def test_dry_run_gives_what_training_will_give() -> None:
    columns = [
        X,
        Column(name="image", role="feature", dtype="uint8", shape=(1, 8, 8)),
        Column(name="flag", role="feature", dtype="bool", shape=()),
    ]
    module = Recorder().train()
    asked = request(module)
    torch.manual_seed(1)
    assert num_classes(module, columns, asked) == 2
    assert [(i.dtype, tuple(i.shape)) for i in module.took.call_args_list[0].args] == [
        (torch.float32, (2, 4)),
        (torch.uint8, (2, 1, 8, 8)),
        (torch.bool, (2,)),
    ]
    assert module.training
    assert not nn.parameter.is_lazy(module.lazy.weight)
    assert module.norm.num_batches_tracked == 0
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))


def test_lazy_weights_follow_from_the_seed() -> None:
    modules = [nn.LazyLinear(3) for _ in range(3)]
    for number, module in enumerate(modules):
        torch.manual_seed(number)
        num_classes(module, [X], request(seed=min(number, 1)))
    assert not torch.equal(modules[0].weight, modules[1].weight)
    assert torch.equal(modules[1].weight, modules[2].weight)


def test_a_module_that_does_not_take_the_features() -> None:
    module = nn.Linear(5, 3).train()
    with pytest.raises(ConfigError) as caught:
        num_classes(module, [X, Y], request())
    message = str(caught.value)
    assert message == (
        'the module cannot take the features ("x" float32 (batch, 4)): Linear(in_features=5, '
        "out_features=3, bias=True), got float32 (batch, 4): mat1 and mat2 shapes cannot be "
        "multiplied (batchx4 and 5x3); let it have in_features=4, or adapt the module"
    )
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert module.training


def test_whole_numbers_where_the_module_takes_floating_ones() -> None:
    counts = Column(name="n", role="feature", dtype="int32", shape=(4,))
    advice = r'call \.float\(\) on "n" \(int32\) in forward, or adapt the module'
    with pytest.raises(ConfigError, match=advice):
        num_classes(nn.Linear(4, 3), [counts, Y], request())


class FirstBatch(nn.Module):
    """Sets itself up from the first batch, and counts what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("scale", torch.zeros(4))
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.scale.any():
            self.scale.copy_(1 / (x.std(0) + 1e-6))
        self.seen.append(len(x))
        with torch.no_grad():
            self.layer.weight.mul_(0.5)
        out: torch.Tensor = self.layer(x * self.scale)
        return out


def test_a_trial_leaves_no_marks() -> None:
    module = FirstBatch()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert num_classes(module, [X, Y], request(), [].append) == 3
    assert module.training and module.seen == []
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


class Picky(nn.Module):
    """Takes real rows and no zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (x > 0).all():
            raise ValueError("prices are positive")
        return x[:, :3]


def test_real_rows_are_tried_in_place_of_zeros() -> None:
    rows = {"feature x": torch.full((5, 4), 2.0), "label y": torch.arange(5)}
    with pytest.raises(ConfigError, match="prices are positive"):
        num_classes(Picky(), [X, Y], request())
    assert num_classes(Picky(), [X, Y], request(), rows=rows) == 3
    one = {name: value[:1] for name, value in rows.items()}
    assert num_classes(Picky(), [X, Y], request(), rows=one) == 3
    rows["feature x"][1] = 0
    with pytest.raises(ConfigError, match="prices are positive"):
        num_classes(Picky(), [X, Y], request(), rows=rows)


class Squeezed(nn.Module):
    """Loses the dimension of a single row."""

    def __init__(self, *dimension: int) -> None:
        super().__init__()
        self.layer, self.dimension = nn.Linear(4, 1), dimension

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out.squeeze(*self.dimension)


def test_one_row_keeps_its_dimension() -> None:
    asked = request(task=REGRESSION)
    with pytest.raises(ConfigError, match=r"one row \(\): .* use squeeze\(-1\) in place"):
        num_classes(Squeezed(), [X, Y], asked)
    assert num_classes(Squeezed(-1), [X, Y], asked) is None


class Broken(nn.Module):
    """Has a mistake of its own."""

    calls: ClassVar = Mock()  # which trials leave alone, as all that is not the user's

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls()
        found: torch.Tensor = self.nothing(x)
        return found


def test_a_mistake_in_forward_is_no_matter_of_shapes() -> None:
    graphs: list[Any] = []
    with pytest.raises(ConfigError, match=r"AttributeError: .*'nothing'; correct forward$"):
        num_classes(Broken(), [X, Y], request(), graphs.append)
    assert Broken.calls.call_count == 2  # once without being looked at


def test_the_rows_of_zeros_are_not_told() -> None:
    image = Column(name="photo", role="feature", dtype="float32", shape=(16,))
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    with pytest.raises(ConfigError) as caught:
        num_classes(net, [image, Y], request())
    assert "layer 0, Conv2d(1, 2, " in str(caught.value)
    assert "got input of size: [batch, 16]" in str(caught.value)
    pair = nn.Linear(4, 2)
    with pytest.raises(ConfigError, match=r"has shape \(batch, 2\) but the target has shape"):
        num_classes(pair, [X, Y], request(task=REGRESSION, loss="mse"))


def test_a_classifier_returns_a_tensor() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x

    with pytest.raises(ConfigError, match="it returned tuple; return the logits alone, or use T"):
        num_classes(Two(), [X], request())
    assert num_classes(Two(), [X], request(task=CUSTOM)) is None


class Viewing(nn.Module):
    """Cannot tell the second dimension of a batch without rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), -1) + torch.rand(1)


def plan_of(rows: list[int], validation: tuple[int, ...] = ()) -> TrainPlan:
    shards = [
        Shard(
            shard_id=i, host="", path="", num_rows=n, fingerprint="", num_bytes=0,
            num_validation_rows=validation[i] if validation else 0,
        )
        for i, n in enumerate(rows)
    ]  # fmt: skip
    return make_plan(columns=[X, Y], shards=shards, world_size=len(rows), batch_size=4, epochs=1)


@pytest.mark.parametrize(
    ("rows", "parts", "is_set", "is_refused"),
    [
        ([8, 1], 1, True, True),  # two steps, one row
        ([8, 2], 1, True, False),
        ([8, 2], 2, True, True),  # one row a step, in two parts
        ([8, 1], 1, False, False),
        ([1], 4, True, False),
    ],
)
def test_sync_batch_norm_may_need_modules_that_take_no_rows(
    rows: list[int], parts: int, is_set: bool, is_refused: bool
) -> None:
    config = TrainConfig(sync_batch_norm=is_set, gradient_accumulation_steps=parts, batch_size=4)
    before = torch.random.get_rng_state()
    check_empty_batches(nn.Flatten(), plan_of(rows), config)
    if is_refused:
        with pytest.raises(ConfigError, match=r"without rows, .* torch\.flatten\(x, 1\)"):
            check_empty_batches(Viewing(), plan_of(rows), config)
    else:
        check_empty_batches(Viewing(), plan_of(rows), config)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("mesh", [Mesh(shard=2), Mesh(data=2, shard_optimizer=True)], ids=str)
def test_layers_that_are_gathered_may_need_modules_that_take_no_rows(mesh: Mesh) -> None:
    def check(module: nn.Module, *rows: Any) -> None:
        check_empty_batches(module, plan_of(*rows), TrainConfig(batch_size=4, parallelism=mesh))

    check(Viewing(), [8, 8])
    check(Viewing(), [8, 2], (3, 1))
    for rows in (([8, 1],), ([8, 8], (5, 1)), ([8, 8], (0, 1))):
        check(nn.Flatten(), *rows)
        with pytest.raises(ConfigError, match=r"unflatten\(-1, \(-1, 4\)\) .* raise batchSize"):
            check(Viewing(), *rows)


class InSteps(nn.Linear):
    steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return super().forward(x) * self.steps


@pytest.mark.parametrize(
    ("rows", "options", "is_refused"),
    [
        ([8, 2], {}, False),
        ([8, 1], {}, True),  # two steps, one row
        ([8, 2], {"gradient_accumulation_steps": 2}, True),
        ([1], {"gradient_accumulation_steps": 4}, False),
        ([8, 1], {"elasticity": "bits"}, True),
        ([8, 1], {"sync_batch_norm": True}, False),
        ([8, 1], {"sync_strategy": ParameterAveraging()}, False),
        ([8, 1], {"parallelism": Mesh(data=2)}, True),
        ([8, 1], {"parallelism": Mesh(shard=2)}, False),
    ],
)
def test_a_module_that_counts_steps_takes_part_in_all(
    rows: list[int], options: dict[str, Any], is_refused: bool
) -> None:
    def check(module: nn.Module) -> None:
        asked = request(module, batch_size=4, **options)
        checked: Any = SimpleNamespace(
            module=module, weights=None, config=asked.config, request=asked, shared=(),
            strategy=asked.config.sync_strategy, objective=objective_of(asked.config, module),
        )  # fmt: skip
        check_counted(checked, plan_of(rows))

    check(nn.Linear(4, 3))
    if is_refused:
        with pytest.raises(ConfigError, match=r"the attribute 'steps', .* has [12] rows for the "):
            check(InSteps(4, 3))
    else:
        check(InSteps(4, 3))


@pytest.mark.parametrize(
    ("rows", "options", "is_refused"),
    [
        ([9], {}, False),
        ([5], {}, False),
        ([1], {}, True),
        ([8, 1], {}, True),
        ([8, 0], {}, False),
        ([8, 8], {"gradient_accumulation_steps": 4}, True),
        ([1], {"sync_batch_norm": True}, False),
    ],
)
def test_batch_norm_gets_no_single_row(
    rows: list[int], options: dict[str, Any], is_refused: bool
) -> None:
    plan, made = plan_of(rows), config(batch_size=4, **options)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    check_single_rows(nn.Linear(4, 3), plan, made)
    if is_refused:
        with pytest.raises(ConfigError, match=r"layer 1 \(BatchNorm1d\) cannot .* raise batchSize"):
            check_single_rows(net, plan, made)
    else:
        check_single_rows(net, plan, made)
    assert net[1].num_batches_tracked == 0


def test_batch_norm_over_places_takes_a_single_row() -> None:
    image = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.BatchNorm2d(1))
    check_single_rows(image, plan_of([1]), config(batch_size=4))
    frozen = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    check_single_rows(frozen, plan_of([1]), config(batch_size=4, frozen_layers=("0",)))


def test_input_shape_reshapes_the_features() -> None:
    assert [column.shape for column in shaped([X, Y], [(1, 2, 2)])] == [(1, 2, 2), ()]
    assert shaped([X, Y], [None]) == (X, Y)
    with pytest.raises(DataError, match=r'"x" has 4 values per row \(shape \(4,\)\), which'):
        shaped([X, Y], [(3, 3)])


def test_sequences_are_padded_with_values_of_their_own() -> None:
    kind = Sequence("x", padding_value=0.5)
    column = replace(X, dtype="int64", shape=(), specification=kind)
    with pytest.raises(ConfigError, match=r'padding_value 0.5 of "x" is no int64'):
        shaped([column, Y], [])


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (lambda tm: tm.MulticlassAccuracy(3, average="none"), "must compute one number"),
        (lambda tm: tm.BinaryAUROC(), "cannot be computed of the module's output"),
        (lambda tm: tm.MulticlassAccuracy(3), None),
    ],
)
def test_metrics_are_tried_on_rows_before_workers_start(metric: Any, said: str | None) -> None:
    from torchmetrics import classification

    asked = request(nn.Linear(4, 3), metrics={"m": metric(classification)})
    table: Any = SimpleNamespace(
        columns=lambda shards: (X, Y),
        rows_at_hand=lambda columns, shards: {
            "feature x": torch.ones(4, 4), "label y": torch.arange(4) % 3,
        },
        read_rows=lambda columns: None,
        labels_outside=lambda *_: None,
    )  # fmt: skip
    checked: Any = SimpleNamespace(
        module=asked.module, weights=None, request=asked, config=asked.config,
        objective=objective_of(asked.config, asked.module), slots=NO_GPUS, mode="gang", shared=(),
    )  # fmt: skip
    if said is None:
        assert check_rows(checked, table, []).trial.num_classes == 3
        return
    with pytest.raises(ConfigError, match=said):
        check_rows(checked, table, [])


def test_long_rows_of_zeros_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    wide = replace(X, shape=(20_000,))
    values = torch.zeros(4, 20_000)
    table: Any = SimpleNamespace(
        columns=lambda shards: (wide, Y),
        rows_at_hand=lambda columns, shards: {"feature x": values, "label y": torch.arange(4) % 3},
        read_rows=lambda columns: None,
        labels_outside=lambda *_: None,
    )
    asked = request(nn.Linear(20_000, 3))
    checked: Any = SimpleNamespace(
        module=asked.module, weights=None, request=asked, config=asked.config,
        objective=objective_of(asked.config, asked.module), slots=NO_GPUS, mode="gang", shared=(),
    )  # fmt: skip
    values[:, :2_000] = 1
    check_rows(checked, table, [])
    assert "Sparse" not in caplog.text
    values[:, 10:] = 0
    check_rows(checked, table, [])
    assert "0.05 % are not 0, and each row takes 0.1 MB" in caplog.text
    assert 'sparkdl.Sparse("x")' in caplog.messages[-1]


def with_maximum(*maxima: float | None) -> list[SpooledShard]:
    parts = []
    for shard_id, maximum in enumerate(maxima):
        shard = Shard(
            shard_id=shard_id, host="", path="", num_rows=1, num_validation_rows=0,
            fingerprint="", num_bytes=0,
        )  # fmt: skip
        stats = (ColumnStats(), ColumnStats(minimum=0.0, maximum=maximum))
        parts.append(SpooledShard(shard=shard, content=0, columns=stats))
    return parts


def test_labels_inside_the_classes_cost_no_job() -> None:
    table: Any = None  # not even looked at
    for maxima in ((2.0, None, 0.0), (None, None)):
        assert ShardTable.labels_outside(table, "y", 3, 1, with_maximum(*maxima)) is None


@pytest.mark.spark
def test_labels_outside_the_classes(spark: SparkSession) -> None:
    rows = [(i, float(i % 5)) for i in range(20)]
    df = spark.createDataFrame(rows, "id int, `the label` double")
    label = prepare(df.schema, "the label", "label", float_dtype="float32", as_classes=True)
    x = prepare(df.schema, "id", "feature", float_dtype="float32")
    spec = TableSpec(columns=(x, label), num_shards=1)
    table = ShardTable(df.limit(1), spec, run_id="labels", shown=UserRows(df, ()))
    with pytest.raises(DataError) as caught:
        check_labels(table, "the label", 3, 1, with_maximum(2.0, 4.0))
    table.close()
    message = str(caught.value)
    assert message.startswith(
        'column "the label" has 8 label(s) outside the 3 classes of the module\'s output, 0 to 2 '
        "(such as the row with the label=3.0, id=3)"
    )
