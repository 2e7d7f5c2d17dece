"""Random numbers and buffers of shards; test_equal_bits.py shows that all states wander."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.data.batches import Batch
from sparkdl.train import shard_states
from sparkdl.train.shard_states import ShardStates


class Sums:
    """In place of metrics: what was added up."""

    def __init__(self) -> None:
        self.total = 0.0

    of = classmethod(lambda cls, *_: cls())

    def reset(self) -> None:
        self.total = 0.0

    def packed(self) -> bytes:
        return b""

    def compute_over(self, ranks: list[bytes]) -> dict[str, float]:
        assert ranks == [b""] * 4
        return {}

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.total = state["total"]


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> ShardStates:
    """Of four shards, of which the first has no rows, on one rank."""
    monkeypatch.setattr(shard_states, "no_sums", lambda *_: torch.zeros(2))
    monkeypatch.setattr(shard_states, "Metrics", Sums)
    shards = [SimpleNamespace(num_rows=count) for count in (0, 4, 4, 4)]
    replica: Any = SimpleNamespace(
        plan=SimpleNamespace(shards=shards, shards_by_rank=((0, 1, 2, 3),)),
        module=nn.BatchNorm1d(1), loss=None, device=torch.device("cpu"),
        config=SimpleNamespace(seed=5), training_metrics=Sums(),
    )  # fmt: skip
    return ShardStates(replica, LocalCommunicator())


def train(states: ShardStates) -> list[tuple[float, float, int, float]]:
    """What each shard draws, has in its buffers, and has added up, before it adds to them."""
    module: Any = states._replica.module
    found: list[tuple[float, float, int, float]] = []
    for number in states.numbers:
        with states.training(number) as metrics:
            assert isinstance(metrics, Sums)
            counted = int(module.num_batches_tracked)
            drawn, mean = torch.rand(()).item(), module.running_mean.item()
            found.append((drawn, mean, counted, metrics.total))
            module.running_mean.add_(10.0**number)
            module.running_var.add_((0.0, 1e8, 3.0, -1e8)[number])
            module.num_batches_tracked.add_(number + 1)
            metrics.total += number + 1
    return found


def test_each_shard_has_random_numbers_and_buffers_of_its_own(states: ShardStates) -> None:
    first, second = train(states), train(states)
    assert [own[1:] for own in first] == [(0.0, 0, 0.0)] * 4
    assert [own[1:] for own in second] == [(10.0**n, n + 1, n + 1.0) for n in range(4)]
    module: Any = states._replica.module
    with states.training(0):
        module.running_mean = module.running_mean * module.weight
    assert not any(
        value.requires_grad for value in states.state_dict()["shards"]["0"]["buffers"].values()
    )
    states.begin(7)  # an epoch that begins anew draws others
    numbers = [own[0] for own in first + second + train(states)]
    assert len({*numbers}) == 12


@pytest.mark.parametrize("for_good", [False, True])
def test_buffers_are_averaged_over_shards_with_rows(states: ShardStates, for_good: bool) -> None:
    train(states)
    states.average_buffers(for_good=for_good)
    module = states._replica.module
    assert module.running_mean == 370.0
    assert module.running_var.item() == pytest.approx(4 / 3)  # in float32 it would be 0
    assert module.num_batches_tracked == 2  # of the first shard with rows
    after = [own[1:3] for own in train(states)]
    assert after == ([(370.0, 2)] * 4 if for_good else [(10.0**n, n + 1) for n in range(4)])


def test_what_is_restored_goes_on_as_what_was_saved(states: ShardStates) -> None:
    train(states)
    states.epoch_sums += torch.arange(8.0).reshape(4, 2)
    saved = copy.deepcopy(states.state_dict())
    expected, sums = train(states), states.epoch_sums.clone()
    assert states.totals(torch.tensor([5.0])).tolist() == [12, 16, 5]
    states.begin_epoch()
    assert not states.epoch_sums.any() and [own[3] for own in train(states)] == [0.0] * 4
    train(states)
    states.load_state_dict(saved)
    assert torch.equal(states.epoch_sums, sums) and train(states) == expected


def test_shards_are_evaluated_with_what_is_their_own(
    states: ShardStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, seen = torch.zeros(3), []
    batch = Batch(inputs=(value,), target=value, weight=None, num_rows=3)

    def measure(_: object, batches: Iterator[Batch]) -> torch.Tensor:
        (own,) = batches
        seen.append(torch.rand(()).item())
        assert own.inputs[0].data_ptr() != value.data_ptr()
        return torch.tensor([len(seen), 1.0])

    monkeypatch.setattr(shard_states, "measure", measure)
    monkeypatch.setattr(shard_states, "sequential_batches", lambda *_: [batch])
    monkeypatch.setattr(shard_states, "record", lambda sums, *_: {"sums": sums.tolist()})
    replica: Any = states._replica
    replica.metrics, replica.labels = Sums(), ()
    rows: Any = [None] * 4
    assert states.evaluate(rows) == {"sums": [10.0, 4.0]}
    states.evaluate(rows)
    drawn = [own[0] for own in train(states)]
    assert len({*seen, *drawn}) == 12
    states.begin()
    states.evaluate(rows)
    assert seen[-4:] == seen[:4]


def test_batches_are_of_shards_with_rows_and_in_memory_of_their_own(states: ShardStates) -> None:
    value = torch.zeros(3)
    batch = Batch(inputs=(value,), target=value, weight=None, num_rows=3)
    found = states.batch(iter([batch] * 3))
    assert list(found) == [1, 2, 3]
    assert len({value.data_ptr(), *(own.inputs[0].data_ptr() for own in found.values())}) == 4
