"""Random numbers and buffers of shards; test_equal_bits.py shows that all states wander."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.train import shard_states
from sparkdl.train.shard_states import ShardStates


def test_each_shard_has_random_numbers_and_buffers_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_states, "no_sums", lambda *_: torch.zeros(2))
    shards = [SimpleNamespace(num_rows=4) for _ in range(3)]
    replica: Any = SimpleNamespace(
        plan=SimpleNamespace(shards=shards, shards_by_rank=((0, 1, 2),)), module=nn.BatchNorm1d(1),
        loss=None, device="cpu", config=SimpleNamespace(seed=5), training_metrics=None,
    )  # fmt: skip
    states = ShardStates(replica, LocalCommunicator())

    def drawn() -> list[float]:
        found = []
        for number in states.numbers:
            with states.training(number):
                found.append(torch.rand(()).item())
        return found

    numbers = drawn() + drawn()
    states.begin(7)  # an epoch that begins anew draws others
    assert len({*numbers, *drawn()}) == 9
    module = replica.module
    with states.training(0):
        module.running_mean.fill_(3.0)
    for number, mean in ((1, 0.0), (0, 3.0)):
        with states.training(number):
            assert module.running_mean.item() == mean
