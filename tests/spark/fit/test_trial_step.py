"""What a first step shows is told by the driver, and the step leaves no trace."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from sparkdl.config import CUSTOM
from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError
from sparkdl.mesh import Mesh
from sparkdl.serialization.program.process_settings import present_settings
from sparkdl.spark.fit import trial_step
from sparkdl.spark.fit.check_request import CheckedValues, check_values
from sparkdl.spark.fit.check_training import check_sparse_gradients
from sparkdl.spark.fit.example import Example
from sparkdl.spark.fit.trial_step import counted_in_steps, try_step
from sparkdl.sync.asynchronous.async_sgd import AsyncSGD
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.train.callbacks import Callback, CallbackState
from sparkdl.train.objective.training_step import objective_of
from tests.serialization.programs import program
from tests.spark.fit.requests import request

X = Column(name="x", role="feature", dtype="float32", shape=(4,))
Y = Column(name="y", role="label", dtype="int64", shape=())
ROWS = {
    "feature x": torch.arange(32.0).view(8, 4) / 32,
    "label y": torch.arange(8) % 3,
}


def checked_values(module: nn.Module, **options: Any) -> CheckedValues:
    asked = request(module, **options)
    return CheckedValues(
        request=asked, mode="gang", module=module, weights=None, float_dtype="float32", frozen=(),
        objective=objective_of(asked.config, module), has_logs=False,
    )  # fmt: skip


def step(
    checked: CheckedValues | None = None, *, rows: Any = ROWS, later: Any = None, **options: Any
) -> None:
    """A trial on rows, or with None on zeros, after which ``later`` may be read."""
    if checked is None:
        checked = checked_values(options.pop("module", None) or nn.Linear(4, 3), **options)
    try_step(checked, Example(columns=(X, Y), rows=rows), None, lambda: later)


class InPlace(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x).exp()
        found += 1  # exp needs its result
        return found


class TrainsOtherwise(nn.Linear):
    """Fails in training mode alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return found.nowhere if self.training else found


class Detached(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach()


def odd_loss(output: torch.Tensor, target: torch.Tensor, factor: float) -> torch.Tensor:
    return F.cross_entropy(output, target) * factor


class Looking(torch.optim.lr_scheduler.LRScheduler):
    """Needs a second moment that SGD does not have."""

    def get_lr(self) -> list[float]:
        for group in self.optimizer.param_groups if self.last_epoch else ():
            for parameter in group["params"]:
                self.optimizer.state[parameter]["exp_avg_sq"].mean()
        return [group["lr"] for group in self.optimizer.param_groups]


class Keeping(torch.optim.SGD):
    """Its state has something that no checkpoint holds, once a gradient was of rows."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["made"] = iter([1])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4, sparse=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words((x * 8).long()).sum(1))


class Strange(Words):
    """Does not say beforehand that its gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words.sparse = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.embedding((x * 8).long(), self.words.weight, sparse=True).sum(1))


class Viewing(nn.Module):
    """Wants what its convolution gives channel by channel in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Conv2d(1, 2, 2, padding=1), nn.Linear(18, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x.view(-1, 1, 2, 2)).view(len(x), -1))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("in place", {"module": InPlace(4, 3)},
     r"backward pass of '.*exp\(\)' \(forward\): .*modified"),
    ("training mode", {"module": TrainsOtherwise(4, 3)}, r"in 'return found\..*' \(forward\)"),
    ("no gradient", {"module": Detached(4, 3)}, "does not require grad"),
    ("channels last", {"module": Viewing(), "memory_format": "channels_last"},
     r"in 'return self.head.*' \(forward\): .* Use .reshape"),
    ("loss", {"loss": odd_loss}, "missing 1 required positional argument: 'factor'"),
    ("classes", {"loss": lambda output, target: F.cross_entropy(output, target.double())},
     r"give it target.long\(\)"),
    ("schedule", {"scheduler": Looking, "optimizer": "sgd", "learning_rate": 0.1},
     r"\.mean\(\)' \(get_lr\): KeyError: 'exp_avg_sq'"),
    ("state", {"optimizer": partial(Keeping, lr=0.1)}, "has a state that no checkpoint can hold"),
    ("adam", {"module": Words(), "optimizer": "adam"}, "Adam does not support sparse gradients"),
    ("sparse adam", {"module": Words(), "optimizer": "sparseadam"}, "not support dense gradients"),
    ("decay",
     {"module": Words(), "optimizer": "adagrad", "optimizer_params": {"weight_decay": 1.0}},
     "weight_decay option is not compatible with sparse gradients"),
    ("clipping", {"module": Words(), "optimizer": "adagrad", "gradient_clip_norm": 1.0},
     r"gradient of words.weight is sparse, .* sparse=False"),
    ("strange", {"module": Strange(), "optimizer": "adagrad"}, r"nn.Embedding\(..., sparse=True\)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"), [one[1:] for one in REFUSED], ids=[one[0] for one in REFUSED]
)
def test_what_fails_in_a_step_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        step(**options)


class Unused(nn.Linear):
    """Has parameters that no step uses, and takes note of what it sees."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.spare = nn.Linear(2, 2)
        self.seen: list[int] = []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        self.count += 1
        return super().forward(x)


class WantsMany(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(x) != 32:
            raise ValueError("batches have 32 rows")
        return super().forward(x)


def sum_over_ranks(module: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    torch.distributed.all_reduce(torch.ones(1))
    return F.cross_entropy(module(inputs), target)


class Closing(torch.optim.SGD):
    """Wants a closure, as `LBFGS` does."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


def of_logarithm(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if (target == 0).all():
        raise ValueError("labels are not all zero")
    return F.cross_entropy(output, target)


def weighted_by_place(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, reduction="none") @ torch.ones(24)


class Modes(torch.optim.SGD):
    trains = False

    def train(self) -> None:
        self.trains = True

    def eval(self) -> None:
        self.trains = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.trains
        super().step()


def counting(optimizer: torch.optim.Optimizer) -> Any:
    """A rate that follows from what a step leaves in the state."""
    first = optimizer.param_groups[0]["params"][0]

    def factor(step: int) -> float:
        return 1.0 if step == 0 else 1.0 / float(optimizer.state[first]["step"])

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class Both(torch.optim.Optimizer):
    """Two optimizers as one: `SparseAdam` for tables of nine words, Adam for the rest."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        words = [p for p in parameters if p.shape[0] == 9]
        self.parts = [
            torch.optim.SparseAdam(words, lr=0.1),
            torch.optim.Adam([p for p in parameters if p.shape[0] != 9], lr=0.1),
        ]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def both(parameters: Any) -> torch.optim.Optimizer:
    return Both(list(parameters))


TAKEN: dict[str, dict[str, Any]] = {
    "parameters without gradient": {"module": Unused()},
    "whole batches only": {"module": WantsMany(4, 3), "batch_size": 32},
    "one row each": {"module": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
                     "gradient_accumulation_steps": 8, "batch_size": 32},
    "ranks that talk": {"training_step": sum_over_ranks},
    "zeros": {"rows": None, "later": ROWS, "loss": of_logarithm},
    "zeros alone": {"rows": None, "loss": of_logarithm},
    "no loss": {"loss": lambda output, target: F.cross_entropy(output, target) * float("nan")},
    "closure": {"optimizer": partial(Closing, lr=0.1)},
    "lbfgs": {"optimizer": lambda parameters: torch.optim.LBFGS(parameters)},
    "modes": {"optimizer": partial(Modes, lr=0.1)},
    "schedule": {"scheduler": counting, "optimizer": "adam", "learning_rate": 0.1},
    "sparse": {"module": Words(), "optimizer": "sgd", "learning_rate": 0.1},
    "two optimizers in one": {"module": Words(), "optimizer": both},
    "a loss for so many rows": {"loss": weighted_by_place, "batch_size": 32},
    "one row": {"rows": {key: rows[:1] for key, rows in ROWS.items()}, "module": WantsMany(4, 3)},
}  # fmt: skip


@pytest.mark.parametrize("case", TAKEN)
def test_what_would_train_is_taken(case: str) -> None:
    step(**TAKEN[case])


def test_nothing_of_the_users_is_touched() -> None:
    module = Unused()
    before = copy.deepcopy(module.state_dict())
    held = {"calls": 0}

    def counted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        held["calls"] += 1
        return F.cross_entropy(output, target)

    checked = checked_values(module, loss=counted, optimizer="sgd", learning_rate=0.1)
    drawn = torch.random.get_rng_state()
    step(checked)
    assert torch.equal(drawn, torch.random.get_rng_state())
    assert held["calls"] == 0 and module.seen == []
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in module.parameters())
    assert module.training


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"precision": "fp16"}])
def test_what_the_driver_cannot_do_is_left_to_workers(options: dict[str, Any]) -> None:
    step(module=Detached(4, 3), **options)


def test_compiled_and_very_large_modules_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_step, "is_compiled", lambda module: True)
    step(module=Detached(4, 3))
    monkeypatch.undo()
    monkeypatch.setattr(trial_step, "_MOST_NUMBERS", 14)
    step(module=Detached(4, 3))


SPARSE_REFUSED: dict[str, dict[str, Any]] = {
    "double_buffering": {"sync_strategy": AllReduce(double_buffering=True)},
    "num_backup_workers": {"sync_strategy": AllReduce(num_backup_workers=1)},
    "AsyncSGD": {"sync_strategy": AsyncSGD()},
    "elasticity='bits'": {"elasticity": "bits"},
    "parallelism": {"parallelism": Mesh(data=2)},
}


@pytest.mark.parametrize("named", SPARSE_REFUSED)
def test_sparse_gradients_are_refused_with_what_keeps_whole_ones(named: str) -> None:
    asked = request(Words(), optimizer="adagrad", **SPARSE_REFUSED[named])
    with pytest.raises(ConfigError, match=f"gradient of words.weight is sparse, and .*{named}"):
        check_values(asked)
    frozen = Words()
    frozen.words.requires_grad_(False)
    check_sparse_gradients(frozen, asked.config, asked.config.sync_strategy)


def test_an_optimizer_of_sparse_gradients_passes_the_checks_before_any_row() -> None:
    for optimizer in ("sparseadam", both, "adagrad"):
        check_values(request(Words(), optimizer=optimizer))


def farthest_and_nearest(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Has no nearest of another class where a batch has one class."""
    distances = torch.cdist(output, output)
    same = target[:, None] == target[None, :]
    return distances[same].max() - distances[~same].min()


def all_classes(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if len(torch.unique(target)) < 8:
        raise ValueError("a batch needs all classes")
    return F.cross_entropy(output, target % 3)


def no_duplicates(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    assert len(torch.unique(output[:, 0])) == len(output), "duplicate samples"
    return F.cross_entropy(output, target)


def hardest(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(output, target, reduction="none")
    return losses[target == 0].topk(3 * int((target > 0).sum())).values.mean()


def of_rare_pairs(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.stack([output[place] for place in range(len(target)) if target[place] == 9]).sum()


class Whitening(nn.Linear):
    """Needs features of full rank, in training alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            torch.linalg.cholesky((x - x.mean(0)).T @ (x - x.mean(0)))
        return super().forward(x)


class Kernel(nn.Linear):
    """Has no inverse where rows are equal."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            torch.linalg.cholesky((-torch.cdist(x, x).square()).exp())
        return super().forward(x)


@pytest.mark.parametrize(
    "options",
    [
        *({"loss": loss, "task": CUSTOM} for loss in (
            farthest_and_nearest, all_classes, no_duplicates, hardest, of_rare_pairs
        )),
        {"module": Whitening(4, 3)},
        {"module": Kernel(4, 3)},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("labels", [torch.zeros(8, dtype=torch.int64), torch.arange(8) % 2])
def test_what_depends_on_the_rows_of_a_batch_is_left_to_workers(
    options: dict[str, Any], labels: torch.Tensor
) -> None:
    """Few different rows are at hand, and what stands first may be of one class."""
    rows = {"feature x": torch.rand(8, 4).index_select(0, torch.arange(8) % 3), "label y": labels}
    step(**options, rows=rows)


def test_one_worker_may_have_sparse_gradients_that_nobody_expects() -> None:
    checked = checked_values(Strange(), optimizer="adagrad")
    example = Example(columns=(X, Y), rows=ROWS)
    try_step(checked, example, None, lambda: None, adds_up=False, several=False)


class Follows(nn.Linear):
    """Does something of its own to what it holds in each forward pass."""

    def __init__(self, change: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__(4, 3)
        self.change, self.count, self.began = change, 0, False
        self.register_buffer("held", torch.ones(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self, x)
        return super().forward(x)


class Counts(nn.Module):
    """A loss that weighs later steps more."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return F.cross_entropy(output, target) * self.steps


def count(module: Any, x: torch.Tensor) -> None:
    module.count += 1


def begin(module: Any, x: torch.Tensor) -> None:
    module.began = True


def follow(module: Any, x: torch.Tensor) -> None:
    module.held.lerp_(module.weight.detach(), 0.1)


def keep_mean(module: Any, x: torch.Tensor) -> None:
    module.held = module.held + x.mean()


def keep_spread(module: Any, x: torch.Tensor) -> None:
    module.held = module.held + F.layer_norm(x, (4,)).std(0)


def count_rows(module: Any, x: torch.Tensor) -> None:
    module.count += len(x)


def draw(module: Any, x: torch.Tensor) -> None:
    module.held = torch.rand(3, 4)


def fail(module: Any, x: torch.Tensor) -> None:
    module.count += 1
    assert x.sum() < 0


@pytest.mark.parametrize(
    ("module", "options", "name"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)), {}, ""),
        (Follows(count), {}, "attribute 'count'"),
        (Follows(begin), {}, ""),
        (Follows(follow), {}, "buffer 'held'"),
        (Follows(keep_mean), {}, ""),
        (Follows(keep_spread), {}, ""),
        (Follows(count_rows), {}, ""),
        (Follows(draw), {}, ""),
        (Follows(fail), {}, ""),
        (parametrizations.spectral_norm(nn.Linear(4, 3)), {},
         "buffer 'parametrizations.weight.0._u'"),
        (nn.Linear(4, 3), {"loss": Counts()}, "loss"),
    ],
    ids=["norm", "count", "begin", "follow", "mean", "spread", "rows", "draw", "fail", "spectral",
         "loss"],
)  # fmt: skip
def test_what_counts_steps_is_found(module: nn.Module, options: Any, name: str) -> None:
    before = copy.deepcopy(module.state_dict())
    assert counted_in_steps(checked_values(module, **options), (X, Y)) == name
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert getattr(module, "count", 0) == 0


class Draws(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + random.random() + float(np.random.rand()))


def test_random_numbers_stay_as_they_are() -> None:
    checked = checked_values(Draws(4, 3))
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    step(checked)
    assert (random.getstate(), str(np.random.get_state())) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])


class Tempered(nn.Linear):
    """Has a temperature in training once a callback has given it one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return found / self.temperature if self.training else found


class Warm(Callback):
    def on_train_begin(self, state: CallbackState) -> None:
        state.model.temperature = 2.0  # type: ignore[assignment]


def test_what_a_callback_prepares_is_not_missed() -> None:
    step(module=Tempered(4, 3), callbacks=(Warm(),))
    with pytest.raises(ConfigError, match="temperature"):
        step(module=Tempered(4, 3), callbacks=(Callback(),))


class Scaled(nn.Linear):
    """Takes its first scale from the first batch, as ActNorm does."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.scale = nn.Parameter(torch.ones(4))
        self.is_begun = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not self.is_begun:
            self.scale.data.copy_(1 / (x.std(0) + 1e-3))
            self.is_begun = True
        return super().forward(x * self.scale)


class Extremes(nn.Linear):
    """Keeps the largest values, which rows have, and no mean has."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("most", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.most = torch.maximum(self.most, x.detach().amax(0))
        return super().forward(x / self.most.clamp(min=0.1))


class Alike(nn.Sequential):
    """Changes what it has in each step, whichever rows it gets; and torch's own statistics."""

    def __init__(self) -> None:
        body = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
        super().__init__(nn.BatchNorm1d(4), body)
        self.teacher = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
            with torch.no_grad():
                self[0].weight.clamp_(-0.5, 0.5)
                self.teacher.mul_(0.9)
        return super().forward(x * self.teacher)


@pytest.mark.parametrize("rows", [ROWS, None])
def test_what_forward_changes_by_its_rows_is_told(
    rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="changes the parameter 'scale' by the rows"):
        step(module=Scaled(), rows=rows, later=ROWS)
    begun = Scaled()
    begun(ROWS["feature x"])
    step(module=begun, rows=rows, later=ROWS)
    step(module=Alike(), rows=rows, later=ROWS)
    assert not caplog.records
    step(module=Extremes(), rows=rows, later=ROWS)
    assert "changes the buffer 'most' by the rows" in caplog.text


class Greedy(nn.Linear):
    """Trains a layer by a loss of its own, or a copy of itself for an example."""

    def __init__(self, *, clears: bool) -> None:
        super().__init__(4, 3)
        self.local, self.clears = nn.Linear(4, 4), clears

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            (self.local(x) - x).square().mean().backward()
            if self.clears:
                self.zero_grad()
        return super().forward(self.local(x) if self.clears else x)


def test_gradients_that_forward_leaves_are_for_one_worker() -> None:
    """Workers would add them up, divided by nothing."""
    with pytest.raises(ConfigError, match=r"leaves a gradient in 'local\.weight'"):
        step(module=Greedy(clears=False))
    step(module=Greedy(clears=True))
    example = Example(columns=(X, Y), rows=ROWS)
    alone = checked_values(Greedy(clears=False))
    try_step(alone, example, None, lambda: None, adds_up=False)


class Recurrent(nn.Linear):
    """Goes on from the mean of the last batch, and keeps what it has seen, in attributes."""

    def __init__(self, *, uses: bool) -> None:
        super().__init__(4, 3)
        self.state, self.seen, self.uses = torch.zeros(4), list[torch.Tensor](), uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x + self.state * self.uses)
        self.state, self.seen = x.detach().mean(0), [*self.seen, x]
        return found


class Unregistered(nn.Linear):
    """Has a norm that nobody counts among its layers."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.norms = [nn.BatchNorm1d(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norms[0].train(self.training)(x))


class Running:
    """Divides by its own running mean, or notes it only."""

    def __init__(self, *, uses: bool) -> None:
        self.mean, self.uses = 1.0, uses

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(output, target, reduction="none")
        by = self.mean if self.uses else 1.0
        self.mean = 0.9 * self.mean + 0.1 * losses.mean().item()
        return losses / by


@pytest.mark.parametrize(
    ("module", "loss", "said"),
    [
        (Recurrent(uses=True), "cross_entropy", "changes the attribute 'state' by the rows"),
        (Recurrent(uses=False), "cross_entropy", None),
        (Unregistered(), "cross_entropy", "changes the attribute 'norms' by the rows"),
        (nn.Linear(4, 3), Running(uses=True), "the loss keeps something that follows from the"),
        (nn.Linear(4, 3), Running(uses=False), None),
    ],
)
def test_what_each_worker_goes_on_with_is_told(
    module: nn.Module, loss: Any, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Not what is written and never read."""
    step(module=module, loss=loss, later=ROWS)
    assert (not caplog.records) if said is None else (said in caplog.text)
    caplog.clear()
    example = Example(columns=(X, Y), rows=ROWS)
    for several in (True, False):
        checked = checked_values(module, loss=loss)
        try_step(checked, example, None, lambda: None, adds_up=False, several=several)
        assert bool(caplog.records) is (several and said is not None)
        caplog.clear()


@pytest.mark.parametrize("module", [Scaled(), Extremes()], ids=["parameter", "buffer"])
def test_one_worker_may_change_it(module: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    checked = checked_values(module)
    try_step(
        checked,
        Example(columns=(X, Y), rows=ROWS),
        None,
        lambda: None,
        adds_up=False,
        several=False,
    )
    assert not caplog.records


CALLS = {"n": 0, "noted": 0}


def annealed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    CALLS["n"] += 1
    return F.cross_entropy(output, target, reduction="none") / CALLS["n"]


class Noting(nn.Linear):
    """Counts in a class what nobody reads."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Noting.calls += 1
        CALLS["noted"] += 1
        return super().forward(x)


class Annealed(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Annealed.calls += self.training
        return super().forward(x) / (1 + Annealed.calls)


class Scaler:
    """A hook with a count of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, layer: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        self.calls += layer.training
        return output / (1 + self.calls)


def with_hook_object() -> nn.Module:
    module = nn.Linear(4, 3)
    module.register_forward_hook(Scaler())
    return module


def with_hook_of_gradients(register: str) -> nn.Module:
    """Has ever smaller gradients; forward knows nothing of it."""
    module, passes = nn.Linear(4, 3), [0]

    def shrunk(gradient: torch.Tensor) -> torch.Tensor:
        passes[0] += 1
        return gradient / (1 + passes[0])

    def in_place(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(shrunk(parameter.grad))

    def of_layer(layer: nn.Module, inputs: Any, outputs: Any) -> Any:
        return (shrunk(outputs[0]),)

    if register == "layer":
        module.register_full_backward_pre_hook(lambda layer, outputs: of_layer(layer, (), outputs))
    elif register == "tensor":
        module.weight.register_hook(shrunk)
    else:
        module.weight.register_post_accumulate_grad_hook(in_place)
    return module


class Tagged(nn.Linear):
    """Counts in an attribute of a parameter, beside one of its own."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.weight.calls = self.calls = 0  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.weight.calls += self.training  # type: ignore[attr-defined]
        return super().forward(x) / (1 + self.weight.calls)  # type: ignore[attr-defined,no-any-return]


class Watching(nn.Linear):
    """Has a hook that writes into the module itself, which goes along."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.calls = [0]
        self.register_forward_hook(self.count)

    def count(self, layer: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        self.calls[0] += self.training
        return output / (1 + self.calls[0])


@pytest.mark.parametrize(
    ("module", "loss", "name"),
    [
        (with_hook_object(), "cross_entropy", "a hook of Linear"),
        (with_hook_of_gradients("layer"), "cross_entropy", "passes"),
        (with_hook_of_gradients("tensor"), "cross_entropy", "passes"),
        (with_hook_of_gradients("sum"), "cross_entropy", "passes"),
        (Tagged(), "cross_entropy", "weight"),
        (Watching(), "cross_entropy", None),
        (nn.Linear(4, 3), annealed, "CALLS"),
        (Annealed(4, 3), "cross_entropy", "Annealed"),
        (Noting(4, 3), "cross_entropy", None),
    ],
)
def test_results_that_follow_from_what_is_outside_of_the_module_are_told(
    module: nn.Module, loss: Any, name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """No checkpoint has it, and tasks of rounds begin anew; trials leave all as it was."""
    checked = checked_values(module, loss=loss)
    step(checked)
    said = f"a step changes {name!r}, which is none of the module's attributes and buffers"
    assert (said in caplog.text) is (name is not None)
    in_rounds = dataclasses.replace(checked, mode="rounds")
    if name is None and isinstance(module, Noting):
        step(in_rounds)
        said = f"a step changes '{Noting.__name__}', which is none of the module's attributes"
        assert f"{said} and buffers: each worker changes its own" in caplog.text
        assert f"{said} and buffers: each task of a round begins with it anew" in caplog.text
    elif name is None:
        step(in_rounds)
    else:
        with pytest.raises(ConfigError, match=f"{said}.*each task of a round would begin"):
            step(in_rounds)
    assert CALLS == {"n": 0, "noted": 0} and Noting.calls == Annealed.calls == 0


class Careful(nn.Linear):
    """Has its whole process raise numpy's errors from the first step on, and count in float64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        np.seterr(all="raise")
        torch.set_default_dtype(torch.float64)
        return super().forward(x)


def test_a_trial_leaves_the_process_as_it_was_and_rounds_tell_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = present_settings(travelling=False)
    checked = checked_values(Careful(4, 3))
    step(checked)
    assert caplog.messages == []
    step(dataclasses.replace(checked, mode="rounds"))
    (said,) = caplog.messages
    assert "changes what holds for its whole process (default dtype, numpy errors), and" in said
    assert present_settings(travelling=False) == before


NOTEBOOK = """
import torch
from torch import nn

SEEN, KEPT, SHOWN = None, {}, [1.0]

class Rebinds(nn.Linear):
    def forward(self, x):
        global SEEN
        SEEN = super().forward(x)
        return SEEN

def hook(layer, inputs, output):
    KEPT["of"] = output

def hooked():
    layer = nn.Linear(4, 3)
    layer.register_forward_hook(hook)
    return layer

def rebound(module, inputs, target):
    return nn.functional.cross_entropy(module(inputs), target) + SEEN.pow(2).mean()

def kept(module, inputs, target):
    SHOWN.append(2.0)
    return nn.functional.cross_entropy(module(inputs), target) + KEPT["of"].pow(2).mean()

def wrong(module, inputs, target):
    return module(inputs) + SEEN
"""


def test_a_step_finds_the_globals_that_forward_leaves_and_they_stay() -> None:
    with program(NOTEBOOK) as made:
        shown = made.SHOWN
        for module, given in ((made.Rebinds(4, 3), made.rebound), (made.hooked(), made.kept)):
            step(module=module, training_step=given)
            assert made.SEEN is None and made.KEPT == {}
            assert made.SHOWN is shown and shown == [1.0]
        with pytest.raises(ConfigError, match="fails in wrong: TypeError"):
            step(module=nn.Linear(4, 3), training_step=made.wrong)


LATER = """
import torch
from torch import nn

LAST = {"value": 0.0}

class Leaves(nn.Linear):
    def forward(self, x):
        found = super().forward(x)
        if self.training:
            LAST["value"] = found.detach().pow(2).mean().item()
        return found

def of_output(layer, inputs, output):
    LAST["value"] = output.detach().pow(2).mean().item()

def of_gradient(layer, inputs, outputs):
    LAST["value"] = outputs[0].pow(2).mean().item()

def with_hook(register, hook):
    layer = nn.Linear(4, 3)
    getattr(layer, register)(hook)
    return layer

def scaled(module, inputs, target):
    before = LAST["value"]
    return nn.functional.cross_entropy(module(inputs), target) * (1 + before)

def plain(module, inputs, target):
    return nn.functional.cross_entropy(module(inputs), target)
"""


def keep_object(module: Any, x: torch.Tensor) -> None:
    module.kept = SimpleNamespace(rows=len(x))


def test_rounds_refuse_an_attribute_that_no_task_hands_on() -> None:
    step(checked_values(Follows(keep_object)))
    step(dataclasses.replace(checked_values(Follows(count)), mode="rounds"))
    with pytest.raises(ConfigError, match=r"attributes of the module \(kept, a SimpleNamespace"):
        step(dataclasses.replace(checked_values(Follows(keep_object)), mode="rounds"))


@pytest.mark.parametrize("way", ["forward", "register_forward_hook", "register_full_backward_hook"])
def test_what_a_step_reads_of_the_one_before_is_told(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    with program(LATER) as made:
        module = made.Leaves(4, 3)
        if way != "forward":
            hook = made.of_gradient if "backward" in way else made.of_output
            module = made.with_hook(way, hook)
        checked = checked_values(module, training_step=made.scaled)
        step(checked)
        assert "a step changes 'LAST', which is none of" in caplog.text
        with pytest.raises(ConfigError, match="a step changes 'LAST'"):
            step(dataclasses.replace(checked, mode="rounds"))
        caplog.clear()
        step(dataclasses.replace(checked_values(module, training_step=made.plain), mode="rounds"))
        (message,) = caplog.messages
        assert "each task of a round begins with it anew, and the program's own stays" in message
        assert made.LAST == {"value": 0.0}


FOUND_AGAIN = """
import itertools
import torch
from torch import nn

SIZE, TABLES, SEEN, COUNTS, LOSSES, NUMBERS = None, {}, None, {}, [], itertools.count()

def of_table(module, inputs, target):
    global SIZE, SEEN
    SIZE = SIZE or inputs.shape[1]
    TABLES.setdefault(SIZE, torch.arange(SIZE))
    SEEN = inputs
    return nn.functional.cross_entropy(module(inputs), target)

def counted(module, inputs, target):
    COUNTS["steps"] = COUNTS.get("steps", 0) + 1
    return of_table(module, inputs, target) * (2 if COUNTS["steps"] > 100 else 1)

def listed(module, inputs, target):
    loss = of_table(module, inputs, target)
    LOSSES.append(loss.item())
    return loss

def numbered(module, inputs, target):
    return of_table(module, inputs, target) * (2 if next(NUMBERS) > 100 else 1)
"""


@pytest.mark.parametrize(
    ("name", "moved"),
    [("of_table", None), ("counted", "COUNTS"), ("listed", "LOSSES"), ("numbered", "NUMBERS")],
)
def test_what_counts_outside_of_a_module_is_told_in_gangs_too(
    name: str, moved: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Something may follow from it after many steps; a table that is kept is no count."""
    with program(FOUND_AGAIN) as made:
        step(checked_values(nn.Linear(4, 3), training_step=getattr(made, name)))
        told = [text for text in caplog.messages if "each worker changes its own" in text]
        assert [text.split("'")[1] for text in told] == [moved] * (moved is not None)
        assert made.COUNTS == {} and made.LOSSES == [] and next(made.NUMBERS) == 0


class Reads(Callback):
    def on_epoch_end(self, state: CallbackState, record: Any) -> None:
        state.set_learning_rate(TOLD["loss"] * 0.1)


class ReadsInTasks(Callback):
    def on_step_end(self, state: CallbackState) -> None:
        assert TOLD["loss"] > 0


TOLD = {"loss": 1.0}


def telling(module: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(module(inputs), target)
    TOLD["loss"] = loss.item()
    return loss


@pytest.mark.parametrize(
    ("callback", "mode", "is_told"),
    [(Reads(), "rounds", True), (Reads(), "gang", False), (ReadsInTasks(), "rounds", False)],
)
def test_what_a_step_leaves_for_callbacks_stays_in_tasks(
    callback: Callback, mode: Any, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    checked = checked_values(nn.Linear(4, 3), training_step=telling, callbacks=(callback,))
    step(dataclasses.replace(checked, mode=mode))
    assert ("a step changes 'TOLD', which a callback reads" in caplog.text) is is_told
    assert ("each task of a round begins with it anew" in caplog.text) is (mode == "rounds")
    assert TOLD == {"loss": 1.0}


class CountsCalls(nn.Module):
    """Counts all calls, those in training, or those in evaluation, in a buffer."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.where = nn.Linear(4, 3), where
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where in ("both", "training" if self.training else "evaluation"):
            self.calls += 1
        return self.layer(x)


class LossThatCounts(nn.Module):
    def __init__(self, *, in_training: bool) -> None:
        super().__init__()
        self.calls, self.in_training = 0, in_training

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += torch.is_grad_enabled() or not self.in_training
        return F.cross_entropy(output, target)


def net_with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


@pytest.mark.parametrize(
    ("module", "loss", "name"),
    [
        (CountsCalls("both"), None, "calls"), (CountsCalls("evaluation"), None, "calls"),
        (CountsCalls("training"), None, None), (net_with_norm(), None, None),
        (nn.Linear(4, 3), LossThatCounts(in_training=False), "loss"),
        (nn.Linear(4, 3), LossThatCounts(in_training=True), None),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("mode", "fraction"), [("rounds", 0.5), ("rounds", None), ("gang", 0.5)])
def test_what_evaluation_counts_in_rounds_is_told(
    module: nn.Module, loss: Any, name: str | None, mode: Any, fraction: float | None,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Tasks that evaluate have copies of their own."""
    changes = {} if loss is None else {"loss": loss}
    checked = checked_values(module, **changes)
    asked = dataclasses.replace(checked.request, validation_fraction=fraction)
    step(dataclasses.replace(checked, request=asked, mode=mode))
    is_told = name is not None and mode == "rounds" and fraction is not None
    assert (f"evaluation changes {name!r}, too" in caplog.text) is is_told
    assert ("evaluation changes" in caplog.text) is is_told
