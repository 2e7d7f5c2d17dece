"""All that a module holds travels: to tasks, back to the driver, and into its module."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from sparkdl.config import EarlyStopping
from sparkdl.spark.fit.fit import fit
from sparkdl.sync.module_tensors import tensors_of
from sparkdl.train.callbacks import Callback, CallbackState
from tests.spark.rounds.test_averaging_rounds import df, request

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["df"]

pytestmark = [pytest.mark.spark, pytest.mark.gang]


class Everything(nn.Module):
    """A teacher, buffers of all kinds, a parameter that nobody uses, and an own state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 8).requires_grad_(False)
        self.head = nn.Linear(8, 3)
        self.spare = nn.Linear(8, 3)
        self.teacher = nn.Linear(8, 3).requires_grad_(False)
        self.register_buffer("center", torch.zeros(3), persistent=False)
        self.register_buffer("lengths", torch.zeros(1), persistent=False)
        self.register_buffer("scale", torch.tensor([0.5]).expand(3))
        self.register_buffer("seen", None)
        self.rotation = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.center = self.center * 0.5 + x.detach().mean(0) * 0.5
            self.lengths = torch.arange(float(len(x)))
            self.seen = torch.ones(2) if self.seen is None else self.seen + 1
            with torch.no_grad():
                for mean, own in zip(
                    self.teacher.parameters(), self.head.parameters(), strict=True
                ):
                    mean.data.lerp_(own, 0.5)
        x = self.body(x * self.scale).tanh()
        return (self.head(x) + self.teacher(x)) * (self.rotation * self.rotation.conj()).real

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        found = super().state_dict(*arguments, **options)
        return {name: value for name, value in found.items() if "teacher" not in name}

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("this module has a way of its own")


def make() -> nn.Module:
    torch.manual_seed(5)
    return Everything()


class Thaw(Callback):
    """Unfreezes the body after the first epoch, and freezes the head after the second."""

    def on_epoch_end(self, state: CallbackState, record: Any) -> None:
        model: Any = state.model
        if record["epoch"] == 1:
            model.body.requires_grad_(True)
        if record["epoch"] == 2:
            model.head.requires_grad_(False)


@pytest.mark.slow
@pytest.mark.parametrize("stops", [False, True])
def test_rounds_and_gangs_bring_all_tensors_home(df: DataFrame, stops: bool) -> None:
    common = {"module": make, "epochs": 3, "callbacks": (Thaw(),), "optimizer": "adamw"}
    common["optimizer_params"] = {"weight_decay": 0.3}
    if stops:
        common |= {"validation_col": "held_out", "early_stopping": EarlyStopping()}
    found = [
        tensors_of(fit(df, request(**common, execution_mode=mode)).module)
        for mode in ("gang", "rounds")
    ]
    begin = tensors_of(make())
    for name, value in found[0].items():
        if name != "lengths":
            torch.testing.assert_close(value, found[1][name], rtol=0, atol=1e-5, msg=name)
        if name == "lengths" or begin[name] is None:
            continue
        is_same = torch.allclose(value, begin[name], rtol=0, atol=1e-6)  # means of equals round
        assert is_same == name.startswith(("spare", "scale")), name
    assert len(found[0]["lengths"]) == 8 and found[0]["seen"].tolist() != [0, 0]


class Scale(Callback):
    """Scales a weight on its own, as a constraint would: by 4 at first, and by 0.5 each epoch."""

    def on_train_begin(self, state: CallbackState) -> None:
        self.scale(state, 4.0)

    def on_epoch_end(self, state: CallbackState, record: Any) -> None:
        self.scale(state, 0.5)

    def scale(self, state: CallbackState, factor: float) -> None:
        model: Any = state.model
        with torch.no_grad():
            model.head.weight.mul_(factor)
            model.scale = model.scale * factor


@pytest.mark.slow
def test_weights_that_callbacks_change_are_those_that_training_goes_on_from(
    df: DataFrame,
) -> None:
    """The rate is so small that steps leave them alone."""
    common = {"module": make, "epochs": 3, "callbacks": (Scale(),), "learning_rate": 1e-12}
    begin = tensors_of(make())
    for mode in ("rounds", "gang"):
        found = tensors_of(fit(df, request(**common, execution_mode=mode)).module)
        for name in ("head.weight", "scale"):
            expected = begin[name] * 4.0 * 0.5**3
            torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-6, msg=name + mode)


FACTOR = {"value": 1.0}


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * FACTOR["value"]


class Raise(Callback):
    """Raises a global that forward reads, as one that anneals does."""

    def on_epoch_end(self, state: CallbackState, record: Any) -> None:
        FACTOR["value"] += 1


class Count(Callback):
    """Keeps what nobody else reads."""

    seen: list[float] = []  # noqa: RUF012

    def on_epoch_end(self, state: CallbackState, record: Any) -> None:
        self.seen.append(record["loss"])


def test_a_global_that_callbacks_change_and_tasks_read_is_told(
    df: DataFrame, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FACTOR, "value", 1.0)
    method = Raise.on_epoch_end
    with caplog.at_level(logging.WARNING):
        fit(df, request(module=lambda: Scaled(3, 3), epochs=2, callbacks=(Count(), Raise())))
    (told,) = [text for text in caplog.messages if text.startswith("a callback has changed")]
    assert "'FACTOR', which the module or the loss reads" in told
    assert FACTOR["value"] == 3.0 and Raise.on_epoch_end is method


def test_a_global_that_callbacks_of_a_gang_change_is_told(
    df: DataFrame, caplog: pytest.LogCaptureFixture
) -> None:
    module = lambda: Scaled(3, 3)  # noqa: E731
    with caplog.at_level(logging.WARNING):
        fit(df, request(module=module, epochs=2, callbacks=(Raise(),), execution_mode="gang"))
    (told,) = [text for text in caplog.messages if "since training began" in text]
    assert "'FACTOR', which the module or the loss reads" in told
