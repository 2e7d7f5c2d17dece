"""Is a round a pure function of state and shard, whatever the process did before?"""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.data.batches import Batches
from sparkdl.data.plan import RoundPart, TrainPlan
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.serialization.travel.attributes import Attributes
from sparkdl.sync.apart import ApartSynchronizer
from sparkdl.sync.frozen_layers import freeze
from sparkdl.sync.module_tensors import tensors_of
from sparkdl.sync.strategy import SyncStrategy
from sparkdl.train.callbacks import NullObserver
from sparkdl.train.objective.logs import from_text
from sparkdl.train.objective.metric_states import added
from sparkdl.train.objective.metrics import Metrics
from sparkdl.train.objective.named_metrics import NamedMetric
from sparkdl.train.objective.training_step import objective_of
from sparkdl.train.round_replica import RoundOutcome, RoundReplica
from tests.train.runs import NUM_FEATURES, but, make_data, plan_for, run, seeded

CPU = torch.device("cpu")
CONFIG = TrainConfig(optimizer="adam", learning_rate=0.01, batch_size=4, epochs=2, loss="mse")
SHARDS = make_data([14, 9, 0])


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def make_net() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1)
        ).double()
    )


def part(step: int, num_steps: int) -> RoundPart:
    return RoundPart(epoch=0, step_in_epoch=step, step=step, num_steps=num_steps)


def test_what_is_frozen_is_not_sent_back() -> None:
    config = but(CONFIG, frozen_layers=("0", "1"))
    plan = plan_for(SHARDS, config, world_size=3)
    net = make_net()
    freeze(net, config.frozen_layers)
    outcome = (replica := RoundReplica(net, config, plan, CPU)).train(
        {"model": make_net().state_dict()},
        0,
        MappedRows(SHARDS[0], plan),
        part(0, 3),
        NullObserver(),
    )
    sent = replica.moving(outcome.state)
    assert list(sent["model"]) == ["3.weight", "3.bias"]
    assert sent["optimizer"] is outcome.state["optimizer"]
    assert len(sent["optimizer"]["state"]) == 2
    whole, plan = make_replica()
    everything = train(whole, {"model": make_net().state_dict()}, 0, part(0, 3)).state
    assert list(whole.moving(everything)["model"]) == list(make_net().state_dict())


def make_replica(config: TrainConfig = CONFIG) -> tuple[RoundReplica, TrainPlan]:
    plan = plan_for(SHARDS, config, world_size=3)
    return RoundReplica(make_net(), config, plan, CPU), plan


def train(
    replica: RoundReplica, state: dict[str, Any], shard: int, which: RoundPart
) -> RoundOutcome:
    return replica.train(state, shard, rows_of(shard), which, NullObserver())


def rows_of(shard: int) -> MappedRows:
    return MappedRows(SHARDS[shard], plan_for(SHARDS, CONFIG, world_size=3))


def test_training_metrics_of_rounds_are_those_of_all_rows() -> None:
    metrics = {
        "f1": torchmetrics.F1Score("multiclass", num_classes=3),
        "accuracy": NamedMetric(name="accuracy", num_classes=3),
    }
    config = TrainConfig(
        task=CLASSIFICATION, loss="cross_entropy", training_metrics=True, learning_rate=1e-30,
        batch_size=4, optimizer="sgd", metrics=metrics,
    )  # fmt: skip
    shards = make_data([14, 9], task=CLASSIFICATION, dtype=torch.float32)
    plan = plan_for(shards, config, world_size=2)
    make = partial(seeded, lambda: nn.Linear(4, 3))
    replica, over_all = RoundReplica(make(), config, plan, CPU), b""
    driver = Metrics.of(config, objective_of(config, make()), CPU)
    for step in range(plan.steps_per_epoch):
        for shard in (0, 1):
            rows = MappedRows(shards[shard], plan)
            outcome = replica.train(
                {"model": make().state_dict()}, shard, rows, part(step, 1), NullObserver()
            )
            new = from_text(outcome.logs or "")
            over_all = added([over_all, new] if over_all else [new], driver.metric)
    alone = run(make(), config, make_data([14, 9], task=CLASSIFICATION, dtype=torch.float32))
    found = driver.compute_over([over_all])
    assert found == {name: pytest.approx(alone.history[0][name]) for name in ("f1", "accuracy")}


def frozen(outcome: RoundOutcome) -> list[tuple[str, bytes]]:
    """Every number of an outcome's state."""
    found: list[tuple[str, bytes]] = []

    def walk(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key in value:
                walk(f"{path}/{key}", value[key])
        elif isinstance(value, torch.Tensor):
            found.append((path, value.detach().clone().numpy().tobytes()))
        else:
            found.append((path, repr(value).encode()))

    walk("", outcome.state)
    return found


def test_what_a_process_did_before_does_not_matter() -> None:
    config = CONFIG.__class__(**{**vars(CONFIG), "scheduler": decay})
    start = {"model": make_net().state_dict()}
    fresh, _ = make_replica(config)
    expected = frozen(train(fresh, start, 0, part(0, 3)))
    used, _ = make_replica(config)
    train(used, start, 1, part(1, 2))
    torch.rand(5)
    assert frozen(train(used, start, 0, part(0, 3))) == expected
    assert frozen(train(used, start, 1, part(0, 3))) != expected


def test_rounds_follow_each_other_like_steps() -> None:
    """Without random layers, two rounds of one shard are one round of both."""
    replica, _ = make_replica()
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    plan = plan_for(SHARDS, CONFIG, world_size=3)
    replica = RoundReplica(net, CONFIG, plan, CPU)
    start = {"model": {name: value.clone() for name, value in net.state_dict().items()}}
    whole = frozen(train(replica, start, 0, part(0, 4)))
    first = train(replica, start, 0, part(0, 1)).state
    copied = _copied(first)
    assert frozen(train(replica, copied, 0, part(1, 3))) == whole


def _copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_copied(value) for value in state]
    return state.clone() if isinstance(state, torch.Tensor) else state


def test_a_round_is_what_the_loop_does_apart() -> None:
    class Apart(SyncStrategy):
        def setup(self, model: Any, make_optimizer: Any, comm: Any) -> Any:
            return ApartSynchronizer(model, make_optimizer, comm)

    shards = make_data([14])
    config = CONFIG.__class__(**{**vars(CONFIG), "epochs": 1})
    net = nn.Linear(4, 1).double()
    start = {"model": {name: value.clone() for name, value in net.state_dict().items()}}
    plan = plan_for(shards, config)
    outcome = RoundReplica(nn.Linear(4, 1).double(), config, plan, CPU).train(
        start,
        0,
        MappedRows(shards[0], plan),
        RoundPart(epoch=0, step_in_epoch=0, step=0, num_steps=4),
        NullObserver(),
    )
    history = run(
        net, config.__class__(**{**vars(config), "sync_strategy": Apart()}), shards, plan=plan
    ).history
    for name, value in net.state_dict().items():
        torch.testing.assert_close(outcome.state["model"][name], value, rtol=0, atol=1e-14)
    assert outcome.loss_sum / outcome.weight == history[0]["loss"]
    assert (outcome.weight, outcome.rows) == (14.0, 14)


def test_an_empty_shard_stays_where_it_is() -> None:
    replica, _ = make_replica()
    start = {"model": make_net().state_dict()}
    outcome = train(replica, start, 2, part(0, 4))
    assert (outcome.weight, outcome.rows) == (0.0, 0)
    for name, value in start["model"].items():
        assert torch.equal(outcome.state["model"][name], value)


def test_evaluation_measures_the_given_state() -> None:
    replica, _ = make_replica()
    state = {"model": make_net().state_dict()}
    train(replica, state, 0, part(0, 4))
    (loss_sum, weight), *_ = replica.evaluate(state, rows_of(1))
    net = make_net().eval()
    columns = SHARDS[1].columns
    expected = ((net(columns["feature x"]).squeeze(1) - columns["label y"]) ** 2).sum().item()
    assert loss_sum == pytest.approx(expected, abs=1e-12)
    assert weight == 9.0


def test_an_optimizer_that_is_not_given_begins_anew() -> None:
    replica, _ = make_replica()
    start = {"model": make_net().state_dict()}
    train(replica, start, 0, part(0, 4))
    assert frozen(train(replica, start, 1, part(0, 2))) == frozen(
        train(make_replica()[0], start, 1, part(0, 2))
    )


class Counted(nn.Module):
    """Computes with plain attributes that each pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps, self.seen = nn.Linear(4, 1), 0, [0.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.seen.append(x.mean().item())
        self.last = x.mean(0)
        out: torch.Tensor = self.layer(x) / self.steps + self.seen[-2]
        return out


def test_attributes_are_those_of_the_state_whatever_the_process_did_before() -> None:
    plan = plan_for(SHARDS, CONFIG, world_size=3)
    net = seeded(lambda: Counted().double())
    replica = RoundReplica(net, CONFIG, plan, CPU, held=Attributes(net, resets=True))
    begin = {"model": copy.deepcopy(dict(net.state_dict()))}
    first = copy.deepcopy(train(replica, begin, 0, part(0, 2)).state)
    train(replica, begin, 1, part(0, 3))  # another shard, in the same process
    again = copy.deepcopy(train(replica, begin, 0, part(0, 2)).state)
    assert again["attributes"]["values"][""]["steps"] == 2
    assert len(again["attributes"]["values"][""]["seen"]) == 3
    for name, value in first["model"].items():
        assert torch.equal(again["model"][name], value)
    went_on = train(replica, again, 0, part(2, 1)).state
    assert went_on["attributes"]["values"][""]["steps"] == 3
    whole = train(replica, begin, 0, part(0, 3)).state
    assert whole["attributes"]["values"][""]["seen"] == went_on["attributes"]["values"][""]["seen"]


class Seeing(nn.Linear):
    """Counts batches and adds up what it sees, in an extra state."""

    def __init__(self) -> None:
        super().__init__(NUM_FEATURES, 1, dtype=torch.float64)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.append(x.detach().sum(0))
        return super().forward(x)

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def test_extra_states_go_from_round_to_round() -> None:
    config = but(CONFIG, epochs=1)
    shards = make_data([23])
    plan = plan_for(shards, config, world_size=1)
    rows, alone = MappedRows(shards[0], plan), Seeing()
    replica = RoundReplica(Seeing(), config, plan, CPU)
    state: dict[str, Any] = {"model": tensors_of(alone)}
    for first in (0, 2):
        state = replica.train(state, 0, rows, part(first, 2), NullObserver()).state
        replica.train({"model": tensors_of(Seeing())}, 0, rows, part(0, 1), NullObserver())
    batches = Batches([rows], plan, 0, seed=config.seed, epoch=0)
    expected = [batch.inputs[0].sum(0) for batch in itertools.islice(batches, 4)]
    found = state["model"]["_extra_state"]["seen"]
    assert len(found) == 4
    assert all(map(torch.equal, found, expected))
