"""Losses and modules that give parts of a batch something else than the batch are told."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparkdl.config import CUSTOM
from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError
from sparkdl.mesh import Mesh
from sparkdl.spark.fit.begin_module import begin_module
from sparkdl.spark.fit.example import Example
from sparkdl.spark.fit.parts_of_batches import check_parts
from sparkdl.train.objective.training_step import objective_of
from tests.spark.fit.requests import request

X = Column(name="x", role="feature", dtype="float32", shape=(4,))
Y = Column(name="y", role="label", dtype="float32", shape=())
A = Column(name="ca", role="label", dtype="int64", shape=(), argument="a")
B = Column(name="cb", role="label", dtype="float32", shape=(), argument="b")
C = Column(name="c", role="label", dtype="int64", shape=())
GENERATOR = torch.Generator().manual_seed(1)
ROWS = {
    "feature x": torch.randn(8, 4, generator=GENERATOR),
    "label y": torch.randn(8, generator=GENERATOR),
    "label a": torch.arange(8) % 3,
    "label c": torch.arange(8) % 3,
    "label b": torch.randn(8, generator=GENERATOR),
}
STAGED = Mesh(pipeline=2, stages=["0", "1"])


def check(module: Any, columns: tuple[Column, ...] = (X, Y), **options: Any) -> None:
    """``module``: or a factory, of which parameters are on the meta device along a mesh."""
    asked = request(module, **{"task": CUSTOM, "loss": "mse", **options})
    begun = begin_module(asked)
    module, weights = begun.module, begun.weights
    checked: Any = SimpleNamespace(
        module=module, weights=weights, objective=objective_of(asked.config, module), request=asked,
        config=asked.config, float_dtype="float32",
    )  # fmt: skip
    rows = {column.key: ROWS[column.key] for column in columns}
    check_parts(checked, Example(columns=columns, rows=rows))


def contrasted(output: torch.Tensor, target: Any) -> torch.Tensor:
    """Compares each row with all others of the batch."""
    found = F.normalize(output, dim=1)
    return F.cross_entropy(found @ found.t(), torch.arange(len(found)))


def contrasting(module: nn.Module, inputs: torch.Tensor, target: Any) -> torch.Tensor:
    return contrasted(module(inputs), target)


def plain(module: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(module(inputs).squeeze(1), target)


def hardest(module: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Takes three rows at least."""
    return (module(inputs).squeeze(1) - target).square().topk(3).values.mean()


def penalized(module: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Asks for gradients, which are of all rows."""
    loss = plain(module, inputs, target)
    (gradient,) = torch.autograd.grad(loss, module.weight, create_graph=True)
    return loss + gradient.square().sum()


def noisy(module: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return plain(module, inputs + torch.randn_like(inputs), target)


def overlap(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    chance = output.sigmoid().squeeze(1)
    return 1 - (2 * (chance * target).sum() + 1) / (chance.sum() + target.sum() + 1)


def of_all(output: dict[str, torch.Tensor], labels: dict[str, torch.Tensor]) -> torch.Tensor:
    return overlap(output["b"], labels["b"])


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": self.a(x), "b": self.b(x)}


def slightly_of_all(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Has a small term of the whole batch."""
    shares = output.softmax(1).mean(0)
    return F.cross_entropy(output, target) + 0.1 * (shares * shares.log()).sum()


def in_place(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.squeeze(1) - target.sub_(0.1)).square().mean()


def narrower(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Computes in less than the output has."""
    return F.mse_loss(output.squeeze(1).bfloat16(), target.bfloat16()).float()


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (output.squeeze(1) - target).square().mean() / self.calls


def signed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.squeeze(1) * target.sign()).mean()


HEADS: dict[str, Any] = {"module": Heads, "columns": (X, A, B), "label_col": None, "labels": ("a",)}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"module": nn.Linear(4, 3), "columns": (X,), "loss": contrasted}, "loss function"),
        ({"module": nn.Linear(4, 3), "training_step": contrasting}, "training step"),
        ({"module": nn.Linear(4, 3), "columns": (X, C), "loss": slightly_of_all}, "loss function"),
        ({"module": nn.Linear(4, 1), "loss": in_place}, None),
        ({"module": nn.Linear(4, 1), "loss": Counting()}, None),
        ({"module": nn.Linear(4, 1), "loss": signed}, None),
        ({"module": nn.Linear(4, 1).double(), "loss": lambda o, t: signed(o.float(), t)}, None),
        ({"module": nn.Linear(4, 1), "training_step": plain}, None),
        ({"module": nn.Linear(4, 1), "training_step": hardest}, "training step"),
        ({"module": nn.Linear(4, 1), "training_step": penalized}, "training step"),
        ({"module": nn.Linear(4, 1), "training_step": noisy}, None),
        ({**HEADS, "loss": {"a": "cross_entropy", "b": overlap}}, "loss function"),
        ({**HEADS, "loss": of_all}, "loss function"),
        ({**HEADS, "loss": {"a": "cross_entropy", "b": "huber"}}, None),
    ],
)
def test_what_is_no_mean_over_rows(
    options: dict[str, Any], said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Also without a label, of several labels, and in a training step."""
    check(**options)
    if said is None:
        assert not caplog.records
    else:
        assert f"the {said} is no mean over rows: it gives" in caplog.messages[0]


@pytest.mark.parametrize("loss", [torch.nn.functional.mse_loss, lambda o, t: (o - t).abs().mean()])
def test_one_output_against_labels_without_it_is_told(
    loss: Any, caplog: pytest.LogCaptureFixture
) -> None:
    check(nn.Linear(4, 1), loss=loss)
    (message,) = caplog.messages
    assert message.startswith("the loss function gets outputs of the shape (batch, 1) and labels")
    values = [float(word) for word in re.findall(r"-?\d+\.\d+", message)]
    assert len(values) == 2 and values[0] != values[1]
    assert message.endswith("for output.squeeze(1), which is what it should take")


def with_share(output: torch.Tensor, target: torch.Tensor) -> Any:
    error = output.squeeze(1) - target
    return error.square().mean(), (error.abs() < 1).double().mean()


def with_copy(module: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> Any:
    loss = plain(module, inputs, target)
    return loss, loss.detach()


def masked(output: torch.Tensor, target: torch.Tensor) -> Any:
    kept = (target > 0).to(output.dtype)
    return ((output.squeeze(1) - target).square() * kept).sum(), kept.sum()


def test_a_pair_is_of_sums(caplog: pytest.LogCaptureFixture) -> None:
    check(nn.Linear(4, 1), loss=masked)
    assert not caplog.records
    for options in ({"loss": with_share}, {"training_step": with_copy}):
        with pytest.raises(ConfigError, match=r"returned a pair.* its second value is"):
            check(nn.Linear(4, 1), **options)


class Mixing(nn.Sequential):
    """Compares rows with their mean: always, in training alone, or never; and draws numbers."""

    def __init__(self, how: str) -> None:
        layers = [nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)]
        super().__init__(*(layers if how == "layers" else ()), nn.Linear(4, 4), nn.Linear(4, 1))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "always" or (self.how == "train" and self.training):
            x = x - x.mean(0)
        if self.how == "gradient" and self.training:
            energy = super().forward(x)
            (gradient,) = torch.autograd.grad(energy.sum(), self[0].weight, create_graph=True)
            x = x + gradient.square().sum()
        if self.how == "draws":
            x = F.dropout(x, 0.5, self.training)
        found: torch.Tensor = super().forward(x)
        return found


@pytest.mark.parametrize(
    ("how", "is_told"),
    [
        ("always", True), ("train", True), ("gradient", True), ("never", False), ("layers", False),
        ("draws", False),
    ],
)  # fmt: skip
def test_a_module_that_mixes_rows(
    how: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    check(Mixing(how))
    assert ("depends on the other rows of its batch" in caplog.text) is is_told
    assert is_told or not caplog.records


class Counting(nn.Linear):
    """Does something else for a number of rows."""

    def __init__(self, most: int, width: int = 4) -> None:
        super().__init__(width, 1)
        self.most = most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(F.dropout(x, 0.5, self.training))
        return 2 * found if len(x) > self.most else found


@pytest.mark.parametrize(("most", "is_told"), [(100, True), (199, True), (200, False)])
def test_a_module_that_counts_rows(
    most: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a batch of both workers is 200 rows."""
    check(Counting(most), batch_size=100, num_workers=2)
    told = "forward gives a row other values in a batch of 200 rows than in one of 4"
    assert (told in caplog.text) is is_told
    assert is_told or not caplog.records


class Drawing(nn.Linear):
    """Draws numbers in evaluation, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(F.dropout(x, 0.5, training=True))
        return found * torch.randn(len(x), 1)


def test_what_draws_is_not_said_to_count_rows(caplog: pytest.LogCaptureFixture) -> None:
    check(Drawing(4, 1), batch_size=32)
    assert not caplog.records


def test_one_worker_sees_whole_batches(caplog: pytest.LogCaptureFixture) -> None:
    for module in (Mixing("always"), Counting(50)):
        check(module, batch_size=100, num_workers=1)
    assert len(caplog.messages) == 2
    assert all(": transform gives it other values in" in text for text in caplog.messages)
    assert not any("numWorkers=1" in text for text in caplog.messages)


class InTurns(nn.Sequential):
    """Computes otherwise in every second call, or third one, of its training."""

    def __init__(self, period: int) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 1))
        self.period, self.calls = period, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        found: torch.Tensor = super().forward(x)
        return found * 2 if self.calls % self.period else found


@pytest.mark.parametrize("period", [2, 3, 4])
def test_a_module_that_takes_turns_mixes_no_rows(
    period: int, caplog: pytest.LogCaptureFixture
) -> None:
    check(InTurns(period))
    assert not caplog.records
    with pytest.raises(ConfigError, match="the same rows something else from call to call"):
        check(InTurns(period), parallelism=STAGED)


class Counted:
    """A loss that becomes smaller by its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (output.squeeze(1) - target).square() / self.calls


def counting() -> Any:
    """The same, which counts in a variable."""
    calls = 0

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return (output.squeeze(1) - target).square() / calls

    return loss


class WithMean(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(x)
        return {"output": found, "size": found.square().mean()}


def sized(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return (output["output"].squeeze(1) - target).square() + output["size"]


class WithCenters(nn.Linear):
    """Gives as many centers as half of a batch has rows."""

    def forward(self, x: torch.Tensor) -> Any:
        return torch.arange(8.0).view(2, 4), super().forward(x)


def test_what_has_no_row_for_each_is_not_taken_for_rows(caplog: pytest.LogCaptureFixture) -> None:
    check(WithCenters(4, 4), loss=lambda output, target: output[1].mean(1) - target)
    assert not caplog.records


def of_labelled(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over the rows that have a label, here none."""
    is_there = (target > 1e9).float()
    return ((output.squeeze(1) - target).square() * is_there).sum() / is_there.sum()


@pytest.mark.parametrize("make", [lambda make: make, lambda make: make()], ids=["meta", "made"])
def test_a_pipeline_wants_rows_by_themselves(make: Any) -> None:
    check(make(lambda: Mixing("never")), parallelism=STAGED)
    check(make(lambda: Mixing("never")), parallelism=STAGED, loss=of_labelled)
    for how, loss, said in (
        (lambda: Mixing("train"), "mse", "depends on the other rows of its batch, of which each"),
        (WithMean, sized, r"a tensor of the shape \(\), and a pipeline"),
        (lambda: Mixing("never"), Counted(), "the loss keeps something from call to call"),
        (lambda: Mixing("never"), counting(), "the loss keeps something from call to call"),
    ):
        with pytest.raises(ConfigError, match=said):
            check(make(how), parallelism=STAGED, loss=loss)
