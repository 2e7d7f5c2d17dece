from __future__ import annotations

import json

import pytest

from sparkdl.train.state import TrainState


def test_state_comes_back_as_a_copy() -> None:
    state = TrainState(epoch=1, step=7, step_in_epoch=2, rows_seen=70)
    state.add_record({"epoch": 1, "loss": 0.5})
    state.early_stopping = {"best": 0.5}
    saved = state.state_dict()
    assert TrainState.from_state_dict(json.loads(json.dumps(saved))) == state
    state.history[0]["loss"] = 9.0
    assert saved["history"][0]["loss"] == 0.5


def test_record_of_the_same_epoch_is_replaced() -> None:
    state = TrainState()
    for record in ({"epoch": 1, "loss": 3.0}, {"epoch": 2, "loss": 2.0}, {"epoch": 2, "loss": 1.0}):
        state.add_record(record)
    assert [record["loss"] for record in state.history] == [3.0, 1.0]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (TrainState(epoch=2, step=5), False),
        (TrainState(epoch=3, step=5), True),
        (TrainState(epoch=1, step=9), True),
        (TrainState(stopped_early=True), True),
    ],
)
def test_complete(state: TrainState, expected: bool) -> None:
    assert state.is_complete(epochs=3, max_steps=9) is expected


def test_no_limit_of_steps() -> None:
    assert not TrainState(step=10**9).is_complete(epochs=1, max_steps=-1)
