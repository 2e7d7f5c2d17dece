"""Globals that callbacks change, and that no checkpoint has, are told of once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.inference.regression import REGRESSION
from sparkdl.serialization.program.program_watch import ProgramWatch
from sparkdl.train.callbacks import Callback, CallbackState
from tests.train.runs import make_data, run

FACTOR = {"value": 1.0}
CALLS = [0]
LOSSES: list[float] = []


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS[0] += 1
        return super().forward(x) * FACTOR["value"]


class EachStep(Callback):
    def on_step_end(self, state: CallbackState) -> None:
        FACTOR["value"] = 1 / (1 + state.step)


class AtSteps(Callback):
    """As one that anneals from some step on."""

    def on_step_end(self, state: CallbackState) -> None:
        if state.step >= 3:
            FACTOR["value"] = 0.5


class EachEpoch(Callback):
    def on_epoch_end(self, state: CallbackState, record: Any) -> None:
        FACTOR["value"] /= 2


class Keeps(EachEpoch):
    """Goes on with what it was."""

    def state_dict(self) -> dict[str, Any]:
        return dict(FACTOR)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        FACTOR.update(state)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    FACTOR["value"], CALLS[0] = 1.0, 0
    yield
    FACTOR["value"], CALLS[0] = 1.0, 0
    LOSSES.clear()


class Notes(Callback):
    """As people fill a list of a notebook with losses."""

    def on_step_end(self, state: CallbackState) -> None:
        LOSSES.append(state.loss)


class Counts(Callback):
    """Looks at what forward counts."""

    def on_step_end(self, state: CallbackState) -> None:
        assert CALLS[0] > 0


def told(
    make: Callable[[], Callback],
    caplog: pytest.LogCaptureFixture,
    said: str = "since training began",
) -> list[str]:
    config = TrainConfig(
        task=REGRESSION, epochs=3, batch_size=4, learning_rate=0.01, callbacks=(make(),)
    )
    module = Scaled(4, 1, dtype=torch.float64)
    with caplog.at_level(logging.WARNING):
        run(module, config, make_data([16]), parts=[ProgramWatch(module, config)])
    return [text for text in caplog.messages if said in text]


@pytest.mark.parametrize("make", [EachStep, AtSteps, EachEpoch])
def test_a_global_that_a_callback_changes_is_told_once(
    make: Callable[[], Callback], caplog: pytest.LogCaptureFixture
) -> None:
    (text,) = told(make, caplog)
    assert text.startswith("'FACTOR', which the module or the loss reads, has changed")
    assert "no checkpoint has it" in text and CALLS[0] > 0


@pytest.mark.parametrize("make", [Callback, Keeps])
def test_nothing_is_told_of_what_steps_count_or_a_callback_keeps(
    make: Callable[[], Callback], caplog: pytest.LogCaptureFixture
) -> None:
    assert told(make, caplog) == []


def test_a_list_that_a_callback_fills_is_told_to_stay_empty(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (text,) = told(Notes, caplog, "outside of itself")
    assert text.startswith("a callback has changed 'LOSSES' outside of itself, in the copy")
    assert len(LOSSES) > 0
    for make in (Counts, EachStep, Keeps):
        caplog.clear()
        assert told(make, caplog, "outside of itself") == []
