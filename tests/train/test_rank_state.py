"""What ranks have, put together for a gang of another size, and taken up by its ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from sparkdl.config import CUSTOM
from sparkdl.train.objective.loss import resolve_loss
from sparkdl.train.random_state import random_state
from sparkdl.train.rank_epoch import RankEpoch
from sparkdl.train.rank_state import RankState, ResumePoint, united


class Sums:
    """Collects numbers, as metrics do."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> list[int]:
        return self.seen

    def load_state_dict(self, seen: list[int]) -> None:
        self.seen = list(seen)

    def joined(self, states: list[list[int]]) -> list[int]:
        return [number for seen in states for number in seen]


def rank_of(number: int) -> RankState:
    """A rank in the middle of an epoch; all have the same norms."""
    replica, book = MagicMock(), MagicMock()
    replica.module = nn.BatchNorm1d(1)
    replica.module.running_mean.fill_(number)
    replica.collector, replica.config.callbacks = Sums(), ()
    replica.synchronizer.trains_apart = False
    replica.synchronizer.divided = None
    replica.synchronizer.rank_state_dict.return_value = {"sent": 5}
    replica.state_dict.return_value = book.state_dict.return_value = {"best_model": None}
    replica.collector.seen = [number]
    book.state.step = 7
    step, requests = MagicMock(), MagicMock()
    step.gradient_norms = torch.tensor([6.0, 2.0])
    step.watch.state_dict.return_value = {"best": 1.0}
    requests.state_dict.return_value = {"stop": False}
    replica.loss, replica.device = resolve_loss("mse", CUSTOM), torch.device("cpu")
    replica.plan.world_size = 1
    epoch = RankEpoch(replica, MagicMock())
    epoch.epoch_sums += torch.tensor([10.0 + number, 1.0])
    return RankState(replica=replica, book=book, epoch=epoch, step=step, requests=requests)


@pytest.fixture
def point() -> ResumePoint:
    """Of three ranks, for two."""
    states: list[Any] = [rank_of(number).snapshot().rank_state for number in range(3)]
    return ResumePoint(step=7, shared={"best_model": None}, rank_state=united(states))


def test_what_adds_up_goes_to_one_rank_and_the_rest_to_all(point: ResumePoint) -> None:
    drawn = []
    for rank, (sums, collected) in enumerate([([33.0, 3.0], [0, 1, 2]), ([0.0, 0.0], [])]):
        state: Any = rank_of(9)
        state.epoch.epoch_sums.zero_()
        state.step.gradient_norms.zero_()
        state.replica.collector.seen = []
        state.restore(point, seed=3, rank=rank)
        drawn.append(torch.rand(4).tolist())
        assert state.epoch.epoch_sums.tolist() == sums
        assert state.replica.collector.seen == collected
        assert state.step.gradient_norms.tolist() == [6.0, 2.0]  # of two steps, on any rank
        assert state.replica.module.running_mean.tolist() == [1.0]
        state.step.watch.load_state_dict.assert_called_once_with({"best": 1.0})
        state.requests.load_state_dict.assert_called_once_with({"stop": False})
        state.replica.synchronizer.load_rank_state_dict.assert_not_called()
    assert drawn[0] != drawn[1]


def test_a_rank_of_as_many_takes_up_its_own() -> None:
    before = rank_of(1)
    point, drawn = before.snapshot(), torch.rand(4)
    state: Any = rank_of(9)
    state.restore(point, seed=3, rank=1)
    assert torch.equal(torch.rand(4), drawn)
    assert state.epoch.epoch_sums.tolist() == [11.0, 1.0]
    assert state.replica.collector.seen == [1]


def test_of_other_rows_the_epoch_begins_anew_with_numbers_that_nobody_has_drawn() -> None:
    state: Any = rank_of(1)
    state = RankState(**{**vars(state), "epoch": MagicMock()})
    state.restore(ResumePoint(step=7, shared={"best_model": None}, rank_state=None), seed=3, rank=1)
    state.book.state.begin_epoch_anew.assert_called_once_with()
    state.epoch.begin.assert_called_once_with(7)
    drawn = random_state()["torch"]
    state.restore(ResumePoint(step=7, shared={"best_model": None}, rank_state=None), seed=3, rank=0)
    assert not torch.equal(random_state()["torch"], drawn)
