from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.sync.averaging.mean import MeanOfReplicas
from sparkdl.sync.gradient_buckets import Changes
from tests.gang import Gang
from tests.sync.apart import make_net


def parameters(value: float) -> list[nn.Parameter]:
    return [
        nn.Parameter(torch.full((3, 2), value)),
        nn.Parameter(torch.full((4,), value, dtype=torch.float64)),
        nn.Parameter(torch.full((2,), 2 * value)),
    ]


@pytest.mark.gang
def test_changes_are_summed_by_shares(gang: Gang) -> None:
    for sums in gang.run(sum_changes, [0.25, 0.75]):
        for one, factor in zip(sums, (1, 1, 2), strict=True):
            assert torch.equal(one, torch.full_like(one, factor * (0.25 * 1 + 0.75 * 2)))


@pytest.mark.gang
def test_who_does_not_count_may_hold_infinities(gang: Gang) -> None:
    for sums in gang.run(sum_changes, [1.0, 0.0], math.inf):
        assert all(one.isfinite().all() for one in sums)


def sum_changes(comm: Any, shares: list[float], change: float = 2.0) -> list[torch.Tensor]:
    mine = parameters([1.0, change][comm.rank])
    changes = Changes(mine, comm, None)
    changes.take(mine, [one.detach() for one in parameters(0.0)])
    changes.start_all(shares[comm.rank])
    changes.wait()
    changes.wait()  # again: nothing is under way
    return [one.clone() for one in changes.tensors]


def test_what_has_arrived_survives() -> None:
    mine = parameters(1.5)
    first, second = (Changes(mine, LocalCommunicator(), None) for _ in range(2))
    first.take(mine, [one.detach() for one in parameters(1.0)])
    first.start_all()
    first.wait()
    second.set_sums([one.clone() for one in first.sums()])
    for one, other in zip(first.tensors, second.tensors, strict=True):
        assert torch.equal(one, other)
        assert one.abs().sum() > 0


@pytest.mark.gang
@pytest.mark.parametrize(("weights", "expected"), [([0, 3], 0.2), ([1, 3], 0.1), ([0, 0], 0.1)])
def test_ranks_agree_on_one_learning_rate(
    gang: Gang, weights: list[float], expected: float
) -> None:
    """That of the first that counts: fp16 lets a rank skip steps, and then its schedule lags."""
    assert gang.run(agreed_learning_rate, weights) == [expected] * 2


def agreed_learning_rate(comm: Any, weights: list[float]) -> float:
    net = make_net()
    mean = MeanOfReplicas(net, torch.optim.SGD(net.parameters(), 0.1), comm)
    mean.shares(weights[comm.rank], [0.1, 0.2][comm.rank])
    return mean.learning_rate
