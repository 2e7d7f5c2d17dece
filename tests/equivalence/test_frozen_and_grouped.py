"""Frozen layers stay as they are, cost nothing, and leave every strategy exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.config import TrainConfig
from sparkdl.sync.asynchronous.async_sgd import AsyncSGD
from sparkdl.sync.averaging.adasum import Adasum
from sparkdl.sync.frozen_layers import freeze
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.strategy import SyncStrategy
from sparkdl.train.rank_state import ResumePoint
from tests.gang import Gang
from tests.sync.apart import (
    ROWS,
    SHARE_BYTES,
    assert_equal_bits,
    bytes_by_pattern,
    gradient_bytes,
)
from tests.sync.test_contract import FORMS as OTHER_FORMS
from tests.sync.test_contract import STRATEGIES
from tests.train.runs import Keeper, but, make_data, run, seeded, weights

FROZEN = ("0", "1")
"""A linear layer and BatchNorm, before two more linear layers."""
GROUPS = {"4.bias": {"lr": 0.002, "weight_decay": 0.0}}
TRAINED = [(3, 5), (3,), (1, 3), (1,)]
CONFIG = TrainConfig(
    optimizer="adam", optimizer_params={"weight_decay": 0.01}, learning_rate=0.01, batch_size=4,
    epochs=2, loss="mse", frozen_layers=FROZEN, parameter_groups=GROUPS,
)  # fmt: skip
TOGETHER: dict[str, SyncStrategy] = {
    "all-reduce": AllReduce(),
    "all-reduce, double buffering": AllReduce(double_buffering=True),
    "all-reduce, int8": AllReduce(compression="int8"),
    "all-reduce, powersgd": AllReduce(compression="powersgd"),
    "adasum": Adasum(),
    "async, not stale": AsyncSGD(staleness_bound=0),
}
NOT_APART = ("AllReduce", "Adasum", "AsyncSGD", "Hogwild")
APART = {name: strategy for name, strategy in STRATEGIES.items() if name not in NOT_APART}
FORMS = {**TOGETHER, **APART, **OTHER_FORMS}


def tuned_net() -> nn.Sequential:
    """With statistics whose mean over ranks is not exactly themselves in floating point."""
    net = seeded(
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 1)
        ).double()
    )
    net[1].running_mean.copy_(torch.arange(5.0, dtype=torch.float64) / 3)
    net[1].running_var.copy_(1 + torch.arange(5.0, dtype=torch.float64) / 7)
    net[1].num_batches_tracked.fill_(11)
    freeze(net, FROZEN)
    return net


def still(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: v.clone() for n, v in net.state_dict().items() if n.startswith(("0.", "1."))}


def tune(comm: Any, config: TrainConfig, rows: list[int], due: int) -> Any:
    """What stays, all weights, the optimizer's state and bytes sent; and those of a resumed run."""
    sink, results = Keeper(steps=(due,)), []
    for attempt in range(2):
        net = tuned_net()
        point: ResumePoint | None = None
        if attempt:
            (point,) = sink.points.values()
        outcome = run(net, config, make_data(rows), comm=comm, sink=sink if not attempt else None,
                      resume=point)  # fmt: skip
        shared = {k: v for k, v in outcome.final.shared.items() if k != "state"}
        whole = copy.deepcopy({"weights": weights(net), **shared, "rank": outcome.final.rank_state})
        results.append((still(net), whole, outcome.bytes_sent))
    return results


def check(results: Any) -> None:
    (kept, whole, _), (kept_again, resumed, _) = results
    assert_equal_bits(kept, still(tuned_net()))
    assert_equal_bits(kept_again, kept)
    assert_equal_bits(whole, resumed)
    assert not torch.equal(whole["weights"], weights(tuned_net()))
    assert set(whole["optimizer"]["state"]) <= {0, 1, 2, 3}
    assert [g["lr"] for g in whole["optimizer"]["param_groups"]] == [0.01, 0.002]


@pytest.mark.gang
@pytest.mark.parametrize("name", [*TOGETHER, *APART, "streaming", "elastic threshold"])
def test_frozen_layers_keep_their_bits_and_runs_resume(gang: Gang, name: str) -> None:
    config = but(CONFIG, sync_strategy=FORMS[name])
    first, second = gang.run(tune, config, [22, 17], 3)
    check(first)
    check(second)
    assert torch.equal(first[0][1]["weights"], second[0][1]["weights"])


@pytest.mark.parametrize("name", FORMS)
def test_alone_too(name: str) -> None:
    check(tune(LocalCommunicator(), but(CONFIG, sync_strategy=FORMS[name]), [17], 3))


@pytest.mark.slow
@pytest.mark.gang
@pytest.mark.parametrize("name", ["all-reduce", "all-reduce, int8", "adasum", "async, not stale"])
def test_bytes_are_those_of_what_trains(gang3: Gang, name: str) -> None:
    strategy = FORMS[name]
    config = but(CONFIG, sync_strategy=strategy, epochs=1)
    sent = [results[0][2] for results in gang3.run(tune, config, ROWS, 3)]
    if name == "all-reduce":
        assert sent == pytest.approx([gradient_bytes(strategy, TRAINED, 3) * 9] * 3)
    everything = but(config, frozen_layers=())
    more = [results[2] for results in gang3.run(train_whole, everything, ROWS)]
    assert all(mine < 0.8 * whole for mine, whole in zip(sent, more, strict=True))


def train_whole(comm: Any, config: TrainConfig, rows: list[int]) -> Any:
    """The same without anything frozen."""
    net = tuned_net().requires_grad_(True)
    return None, None, run(net, config, make_data(rows), comm=comm).bytes_sent


@pytest.mark.slow
@pytest.mark.gang
def test_bytes_of_rounds_are_those_of_what_trains(gang3: Gang) -> None:
    from sparkdl.sync.averaging.local_sgd import LocalSGD

    strategy = LocalSGD(averaging_period=3, optimizer_state="reset")
    config = but(CONFIG, sync_strategy=strategy, epochs=1)
    for results in gang3.run(tune, config, ROWS, 3):
        expected = 9 * bytes_by_pattern(strategy, TRAINED, 3, more=SHARE_BYTES * 2)
        assert results[0][2] == pytest.approx(expected)


def by_hand(parameters: Any) -> torch.optim.Optimizer:
    *rest, bias = parameters
    return torch.optim.Adam(
        [{"params": rest}, {"params": [bias], "lr": 0.002, "weight_decay": 0.0}],
        lr=0.01, weight_decay=0.01, fused=True,
    )  # fmt: skip


@pytest.mark.gang
@pytest.mark.parametrize("name", ["all-reduce", "LocalSGD", "async, not stale"])
def test_groups_are_those_that_one_would_make_by_hand(gang: Gang, name: str) -> None:
    config = but(CONFIG, sync_strategy=FORMS[name])
    own = but(config, optimizer=by_hand, optimizer_params={}, learning_rate=None,
              parameter_groups={})  # fmt: skip
    first, second = (gang.run(tune, one, [22, 17], 3)[0][0][1] for one in (config, own))
    assert torch.equal(first["weights"], second["weights"])
