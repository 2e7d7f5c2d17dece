"""Callbacks stop training, change the learning rate and save: on all ranks alike, and for good."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from sparkdl.config import TrainConfig
from sparkdl.data.plan import RoundPart
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.errors import ConfigError
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.train.callbacks import (
    Callback,
    CallbackRequest,
    CallbackState,
    NullObserver,
    give_states,
    states_of,
    steps_between,
)
from sparkdl.train.round_replica import RoundReplica
from tests.gang import Gang
from tests.train.runs import NUM_FEATURES, Keeper, but, make_data, plan_for, run, seeded, weights

CONFIG = TrainConfig(epochs=3, batch_size=5, optimizer="adam", learning_rate=0.02, seed=4)


def make_net() -> nn.Module:
    return seeded(lambda: nn.Linear(NUM_FEATURES, 1, dtype=torch.float64))


def with_callbacks(*callbacks: Callback, **changes: Any) -> TrainConfig:
    return but(CONFIG, callbacks=callbacks, **changes)


def shown(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in record.items() if k != "seconds"} for record in history]


class At(Callback):
    """Asks for something after some step, or at the end of some epoch."""

    acts_every = 1

    def __init__(self, method: str, *arguments: Any, step: int = 0, epoch: int = 0) -> None:
        self.method, self.arguments, self.step, self.epoch = method, arguments, step, epoch

    def on_step_end(self, state: CallbackState) -> None:
        if state.step == self.step:
            getattr(state, self.method)(*self.arguments)

    def on_epoch_end(self, state: CallbackState, record: Mapping[str, float]) -> None:
        if record["epoch"] == self.epoch:
            getattr(state, self.method)(*self.arguments)


def test_a_callback_stops_at_a_step_and_at_the_end_of_an_epoch() -> None:
    outcome = run(make_net(), with_callbacks(At("stop", step=6)), make_data([20]))
    assert (outcome.steps, outcome.stopped_early) == (6, True)
    assert [record["steps"] for record in outcome.history] == [4, 2]
    cut = run(make_net(), but(CONFIG, max_steps=6), make_data([20]))
    assert shown(outcome.history) == shown(cut.history)
    again = run(make_net(), with_callbacks(), make_data([20]), resume=outcome.final)
    assert again.steps == 6  # what was stopped is complete, as after early stopping

    outcome = run(make_net(), with_callbacks(At("stop", epoch=1)), make_data([20]))
    assert [record["steps"] for record in outcome.history] == [4]


class AtEvaluation(At):
    def on_epoch_end(self, state: CallbackState, record: Mapping[str, float]) -> None:
        pass

    on_evaluation_end = At.on_epoch_end


def test_a_callback_acts_at_an_evaluation_within_an_epoch() -> None:
    sink, ends = Keeper(), At("save", epoch=-1)
    ends.epoch = 1.25  # type: ignore[assignment]
    stop, save = AtEvaluation("stop"), AtEvaluation("save", epoch=1)
    stop.epoch = 1.25  # type: ignore[assignment]
    config = with_callbacks(stop, save, ends, validation_interval=5)
    outcome = run(make_net(), config, make_data([20]), validation=make_data([6]), sink=sink)
    assert (outcome.steps, outcome.stopped_early) == (5, True)
    assert [record["epoch"] for record in outcome.history] == [1, 1.25]
    assert sorted(sink.points) == [4]


def halving(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)


def test_the_learning_rate_changes_at_once_and_a_schedule_keeps_its_shape() -> None:
    rates: list[float] = []

    class Look(Callback):
        def on_step_end(self, state: CallbackState) -> None:
            rates.append(state.learning_rate)

    def found(*callbacks: Callback, **changes: Any) -> list[float]:
        rates.clear()
        run(make_net(), with_callbacks(*callbacks, Look(), **changes), make_data([20]))
        return list(rates)

    change = At("set_learning_rate", 0.2, step=2)
    assert found(change) == [0.02] * 2 + [0.2] * 10
    plain = found(scheduler=halving)
    assert plain == pytest.approx([0.02] * 3 + [0.01] * 4 + [0.005] * 4 + [0.0025])
    assert found(change, scheduler=halving) == pytest.approx(
        plain[:2] + [10 * rate for rate in plain[2:]]
    )
    at_end = At("set_learning_rate", 0.2, epoch=1)
    assert found(at_end) == [0.02] * 4 + [0.2] * 8


def test_other_groups_keep_their_proportion() -> None:
    net = seeded(lambda: nn.Sequential(nn.Linear(NUM_FEATURES, 2), nn.Linear(2, 1)).double())
    config = with_callbacks(
        At("set_learning_rate", 0.2, step=2), parameter_groups={"1": {"lr": 0.002}}
    )
    outcome = run(net, config, make_data([20]))
    groups = outcome.final.shared["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == [0.2, pytest.approx(0.02)]


def test_save_writes_a_checkpoint_now() -> None:
    sink = Keeper()
    config = with_callbacks(At("save", step=3), At("save", epoch=1), At("save", epoch=3))
    run(make_net(), config, make_data([20]), sink=sink)
    assert sorted(sink.points) == [3, 4]  # the last is written anyway, by whoever called


class Plateau(Callback):
    """Decides by what it has seen, so that its state must survive a restart."""

    acts_every = 2

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, state: CallbackState) -> None:
        self.losses.append(state.loss)
        if len(self.losses) % 3 == 0:
            state.set_learning_rate(state.learning_rate * (0.5 + min(self.losses) % 1))
        if len(self.losses) == 9:
            state.stop()  # is done after step 10

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


@pytest.mark.parametrize("scheduler", [None, halving])
@pytest.mark.parametrize("step", [1, 3, 4, 7, 9])
def test_a_run_with_acting_callbacks_resumes_bit_for_bit(step: int, scheduler: Any) -> None:
    sink = Keeper(steps=tuple(range(1, 100)))
    whole, resumed = make_net(), make_net()
    expected = run(
        whole, with_callbacks(Plateau(), scheduler=scheduler), make_data([20]), sink=sink
    )
    got = run(
        resumed,
        with_callbacks(Plateau(), scheduler=scheduler),
        make_data([20]),
        resume=sink.points[step],
    )
    assert shown(got.history) == shown(expected.history)
    assert torch.equal(weights(whole), weights(resumed))
    assert got.steps == expected.steps == 10


def test_states_belong_to_classes_and_places() -> None:
    first, second, third = Plateau(), Plateau(), At("stop")
    first.losses, second.losses = [1.0], [2.0]
    states = states_of([first, third, second])
    fresh = Plateau(), Plateau(), Plateau()
    give_states(fresh, states)
    assert [callback.losses for callback in fresh] == [[1.0], [2.0], []]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (At("set_learning_rate", -1.0, step=1), "at least 0"),
        (At("set_learning_rate", float("nan"), step=1), "at least 0"),
        (At("save", step=1), "set checkpointDir"),
    ],
)
def test_what_cannot_be_had_is_refused(ask: Callback, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(make_net(), with_callbacks(ask), make_data([20]))


class Every16(Callback):
    """Asks at each step; without a number of its own it is heard every 16 steps."""

    def on_step_end(self, state: CallbackState) -> None:
        state.set_learning_rate(state.step / 100)
        if state.step == 23:
            state.stop()


def test_what_steps_ask_for_waits_for_16_steps_or_the_end_of_the_epoch() -> None:
    rates: list[float] = []

    class Look(Every16):
        def on_step_end(self, state: CallbackState) -> None:
            super().on_step_end(state)
            rates.append(state.learning_rate)

    data, sink = make_data([40]), Keeper(steps=(5, 37))
    outcome = run(make_net(), with_callbacks(Look(), batch_size=2), data, sink=sink)
    # 20 steps an epoch.
    assert rates == [*[0.02] * 16, *[0.16] * 4, *[0.2] * 12]
    assert (outcome.steps, outcome.stopped_early) == (32, True)
    expected = [*rates]
    rates.clear()
    again = run(make_net(), with_callbacks(Look(), batch_size=2), data, resume=sink.points[5])
    assert shown(again.history) == shown(outcome.history)
    assert rates == expected[5:]

    class Never(Every16):
        acts_every = 0

    with pytest.raises(ConfigError, match="at least 1"):
        run(make_net(), with_callbacks(Never()), data)


def test_only_steps_and_epochs_may_act() -> None:
    class Begin(Callback):
        def on_train_begin(self, state: CallbackState) -> None:
            state.stop()

    class End(Callback):
        def on_train_end(self, state: CallbackState) -> None:
            state.save()

    for callback in (Begin(), End()):
        with pytest.raises(ConfigError, match="may act in on_step_end, on_evaluation_end and"):
            run(make_net(), with_callbacks(callback), make_data([20]), sink=Keeper())


def test_tasks_of_rounds_cannot_act() -> None:
    shards = make_data([10])
    config = with_callbacks(At("stop", step=1))
    plan = plan_for(shards, config)
    replica = RoundReplica(make_net(), config, plan, torch.device("cpu"))
    part = RoundPart(epoch=0, step_in_epoch=0, step=0, num_steps=2)
    start = {"model": make_net().state_dict()}
    with pytest.raises(ConfigError, match="act in on_epoch_end"):
        replica.train(start, 0, MappedRows(shards[0], plan), part, NullObserver())


def in_gang(comm: Any, strategy: Any, *callbacks: Callback) -> Any:
    net = make_net()
    config = with_callbacks(*callbacks, sync_strategy=strategy, batch_size=4)
    outcome = run(net, config, make_data([13, 9]), comm=comm)
    return shown(outcome.history), outcome.steps, weights(net)


class ByRank(At):
    """Asks on rank 1 for something else."""

    def on_step_end(self, state: CallbackState) -> None:
        if state.rank == 0:
            super().on_step_end(state)
        elif state.step == self.step:
            state.set_learning_rate(0.5)


def in_gang_by_rank(comm: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        in_gang(comm, None, ByRank("stop", step=3))
    return str(caught.value)


@pytest.mark.slow
def test_all_ranks_act_alike_or_none_does(gang: Gang) -> None:
    act = At("set_learning_rate", 0.2, step=2), At("stop", step=6)
    first, second = gang.run(in_gang, None, *act)
    assert first[:2] == second[:2]
    assert first[1] == 6
    assert torch.equal(first[2], second[2])
    apart, also = gang.run(in_gang, ParameterAveraging(averaging_period=4), *act)
    assert apart[:2] == also[:2]
    # A round of four steps, changed by half of it; the next would end after the epoch's.
    assert apart[1] == 8
    messages = gang.run(in_gang_by_rank)
    assert messages[0] == messages[1]
    assert "after step 3 rank 1 asked for the learning rate 0.5, and rank 0 to stop" in messages[0]


def test_a_request_says_what_it_is() -> None:
    assert str(CallbackRequest()) == "for nothing"
    assert (
        str(CallbackRequest(True, True, 0.5)) == "to stop and to save and for the learning rate 0.5"
    )


class Dividing(Callback):
    """Calls a method of its own, which has nearly the name of another."""

    def on_epoch_end(self, state: CallbackState, record: Mapping[str, float]) -> None:
        self.on_epoch_ending(state)

    def on_epoch_ending(self, state: CallbackState) -> None: ...


def test_a_method_that_the_callback_calls_itself_may_have_any_name() -> None:
    steps_between([Dividing()])
    kind = type("Left", (Callback,), {"on_epoch_ended": Dividing.on_epoch_ending})
    with pytest.raises(ConfigError, match="nobody calls on_epoch_ended"):
        steps_between([kind()])
