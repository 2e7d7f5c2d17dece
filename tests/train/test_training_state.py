"""Two fits, the second of which goes on from the first, are one fit of all epochs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.config import EarlyStopping, TrainConfig
from sparkdl.errors import ConfigError, StorageError
from sparkdl.storage.checkpoint_format import decode, encode
from sparkdl.storage.tensor_tree import Snapshot, pack
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.averaging.slowmo import SlowMo
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.strategy import SyncStrategy
from sparkdl.train.loop import TrainOutcome
from sparkdl.train.rank_state import ResumePoint
from sparkdl.train.training_state import TrainingState, left_by, method_of
from tests.train.runs import NUM_FEATURES, but, make_data, plan_for, run, seeded

StepLR = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=5, gamma=0.5)
CONFIG = TrainConfig(
    epochs=4, batch_size=5, optimizer="adam", learning_rate=0.02, scheduler=StepLR, seed=4,
    sync_strategy=AllReduce(),
)  # fmt: skip


def make_net() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    )


def data(rows: int = 20) -> Any:
    return make_data([rows], dtype=torch.float32)


def left(net: nn.Module, config: TrainConfig, outcome: TrainOutcome) -> TrainingState:
    """What the fit has left, as it comes back from a file."""
    state = TrainingState(**left_by(outcome.final.shared), method=method_of(config, net, "gang"))
    data = b"".join(encode(Snapshot(*pack(state.tree()))))
    return TrainingState.from_tree(decode(data, "state"))


def go_on(
    net: nn.Module, config: TrainConfig, state: TrainingState, rows: int = 20, **options: Any
) -> TrainOutcome:
    shards = data(rows)
    plan = dataclasses.replace(
        plan_for(shards, config), first_epoch=state.epoch, first_step=state.step
    )
    point = ResumePoint(step=state.step, shared=state.shared(), rank_state=None)
    return run(net, config, shards, plan=plan, resume=point, **options)


def same(one: Any, other: Any) -> bool:
    return encoded(one) == encoded(other)


def encoded(tree: Any) -> bytes:
    return b"".join(bytes(piece) for piece in encode(Snapshot(*pack(tree))))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "strategy", [AllReduce(), ParameterAveraging(averaging_period=3), SlowMo(averaging_period=3)]
)
def test_two_fits_are_one(strategy: SyncStrategy, precision: Any) -> None:
    config = but(CONFIG, sync_strategy=strategy, precision=precision)
    half = but(config, epochs=2)
    whole, net = make_net(), make_net()
    expected = run(whole, config, data())
    first = run(net, half, data())
    got = go_on(net, half, left(net, half, first))
    assert same(dict(whole.state_dict()), dict(net.state_dict()))
    for part in ("optimizer", "scheduler", "scaler", "strategy"):
        assert same(got.final.shared[part], expected.final.shared[part]), part
    assert got.steps == expected.steps == 16
    assert [r["epoch"] for r in got.history] == [3, 4]
    assert [r["loss"] for r in got.history] == [r["loss"] for r in expected.history[2:]]
    rates = [r["learning_rate"] for r in got.history]
    assert rates == [r["learning_rate"] for r in expected.history[2:]]
    assert precision == "fp16" or rates == [0.005, 0.0025]


def test_other_rows_and_other_limits() -> None:
    net, config = make_net(), but(CONFIG, epochs=2)
    state = left(net, config, run(net, but(config, max_steps=5), data()))
    assert (state.epoch, state.step) == (2, 5)  # the second epoch was cut short
    got = go_on(net, but(config, max_steps=3), state, rows=50)
    assert (got.steps, got.rows) == (8, 40)
    assert [(r["epoch"], r["steps"]) for r in got.history] == [(3, 3)]
    assert got.final.shared["scheduler"]["last_epoch"] == 8
    assert got.final.shared["optimizer"]["state"][0]["step"] == 8


def test_of_the_best_weights_the_strategy_begins_anew() -> None:
    stopping = EarlyStopping(monitor="loss", mode="max", patience=2)
    config = but(CONFIG, early_stopping=stopping, sync_strategy=SlowMo(averaging_period=3))
    net = make_net()
    state = left(net, config, run(net, config, data()))
    assert "strategy" not in state.parts
    got = go_on(net, config, state)
    assert [r["epoch"] for r in got.history] == [4, 5, 6]  # its own patience


def options(state: TrainingState) -> dict[str, Any]:
    group: dict[str, Any] = state.parts["optimizer"]["param_groups"][0]
    return group


def test_what_must_agree_is_named() -> None:
    net = make_net()
    state = left(net, CONFIG, run(net, CONFIG, data()))

    def against(other: nn.Module = net, mode: Any = "gang", **changes: Any) -> TrainingState:
        return state.for_method(method_of(but(CONFIG, **changes), other, mode))

    assert against(epochs=9, batch_size=2, seed=1) is state
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"optimizer": "sgd"}, r"the optimizer was torch.optim.adam.Adam and is torch.*SGD; make"),
        ({"scheduler": None}, "the schedule was functools.partial.* and is None"),
        ({"scheduler": functools.partial(StepLR, gamma=0.1)}, "the schedule was"),
        ({"sync_strategy": ParameterAveraging()}, "syncStrategy was AllReduce.* and is Param"),
        ({"mode": "rounds"}, "executionMode was gang and is rounds"),
        ({"learning_rate": 0.5}, "StepLR.* sets options of the optimizer, which were"),
        ({"parameter_groups": {"0": {"lr": 1.0}}}, "the number of parameter groups was 1 and is 2"),
    ]
    for changes, message in wrong:
        with pytest.raises(ConfigError, match=message):
            against(**changes)
    frozen = make_net()
    frozen[0].bias.requires_grad_(False)  # type: ignore[index, union-attr]
    with pytest.raises(ConfigError, match=r"what trains differs in 0\.bias: it was 6 and is 5"):
        against(frozen)


def test_options_that_were_changed_take_effect_and_no_others() -> None:
    config, net = but(CONFIG, scheduler=None), make_net()
    state = left(net, config, run(net, config, data()))
    options(state)["lr"] = 0.01  # as a callback may have done
    assert options(state.for_method(method_of(config, net, "gang")))["lr"] == 0.01
    slower = but(config, learning_rate=0.001)
    changed = state.for_method(method_of(slower, net, "gang"))
    assert (options(changed)["lr"], options(state)["lr"]) == (0.001, 0.01)
    heavier = but(config, optimizer_params={"weight_decay": 0.1})
    assert options(state.for_method(method_of(heavier, net, "gang"))) == {
        **options(state), "weight_decay": 0.1,
    }  # fmt: skip


def test_another_tree_is_refused() -> None:
    for tree in ({}, {"method": {}}, [1]):
        with pytest.raises(StorageError, match="no training state"):
            TrainingState.from_tree(tree)
