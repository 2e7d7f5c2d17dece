from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from sparkdl.sync.apart import OwnWeightsSynchronizer
from tests.sync.apart import make_net
from tests.train.runs import weights


class Halved(OwnWeightsSynchronizer):
    """All agree on half of what each has."""

    def show_agreed(self) -> None:
        for parameter in self.parameters:
            parameter.mul_(0.5)


def make() -> Halved:
    return Halved(make_net(), lambda parameters: torch.optim.SGD(parameters, 0.1))


def test_own_weights_come_back_with_the_next_step() -> None:
    one = make()
    own = weights(one.model)
    one.close_round()
    one.close_round()  # an epoch's end, and a checkpoint after it
    assert torch.equal(weights(one.model), own / 2)
    one.zero_gradients()
    assert torch.equal(weights(one.model), own)
    one.zero_gradients()
    assert torch.equal(weights(one.model), own)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda state: state])
def test_own_weights_survive(copied: Callable[[object], object]) -> None:
    first, second = make(), make()
    first.round_sums += 3
    with torch.no_grad():
        first.parameters[0].add_(1)
    own = weights(first.model)
    first.close_round()
    second.model.load_state_dict(first.model.state_dict())
    second.load_rank_state_dict(copied(first.rank_state_dict()))  # type: ignore[arg-type]
    assert torch.equal(weights(second.model), own / 2)
    second.zero_gradients()
    assert torch.equal(weights(second.model), own)
    assert second.round_sums.tolist() == [3, 3]


def test_without_own_weights_a_replica_begins_from_the_agreed() -> None:
    first, second = make(), make()
    first.close_round()
    second.model.load_state_dict(first.model.state_dict())
    second.zero_gradients()
    assert torch.equal(weights(second.model), weights(first.model))
