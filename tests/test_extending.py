"""The examples of docs/extending.md: what users write works like what the package has."""

from __future__ import annotations

import pickle
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from sparkdl import sync
from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.sync.strategy import SyncStrategy
from tests.docs.blocks import blocks_of
from tests.explain.test_recommend import predictor
from tests.gang import Gang
from tests.sync.apart import SGD, train_on_rank
from tests.train.runs import but

(STRATEGY,) = (b.text for b in blocks_of("docs/extending.md") if "class SignVote(" in b.text)
MODULE = "module_of_a_user"


def strategy_of_the_page() -> SyncStrategy:
    """The page's strategy, from a module that this process can import."""
    module = ModuleType(MODULE)
    sys.modules[MODULE] = module
    exec(STRATEGY, vars(module))
    return sync.resolve(f"{MODULE}:SignVote")


def train(comm: Any, rows: list[int]) -> tuple[torch.Tensor, list[float]]:
    strategy = strategy_of_the_page()
    config = but(SGD, learning_rate=0.01, epochs=3, sync_strategy=strategy)
    mine, final, _ = train_on_rank(comm, config, rows)
    return mine, [record["loss"] for record in final["state"]["history"]]


def test_a_strategy_trains_alone_and_travels() -> None:
    _, losses = train(LocalCommunicator(), [22])
    assert losses[-1] < losses[0]
    strategy = strategy_of_the_page()
    assert pickle.loads(pickle.dumps(strategy)) == strategy


@pytest.mark.gang
@pytest.mark.parametrize("rows", [[22, 17], [9, 0]])
def test_a_strategy_trains_in_a_gang(gang: Gang, rows: list[int]) -> None:
    (first, losses), (second, _) = gang.run(train, rows)
    assert torch.equal(first, second)
    assert losses[-1] < losses[0]


def test_a_strategy_is_explained() -> None:
    found = predictor()
    own, *others = found.strategies(strategy_of_the_page(), 8, in_rounds=False)
    assert (own.strategy, own.mode, own.why_not) == ("SignVote()", "gang", None)
    assert own.sent_bytes_per_step == pytest.approx(2 * 7 / 8 * 1_000_000)
    plain = next(row for row in others if row.strategy == "AllReduce()")
    assert plain.step_seconds is not None
    assert own.step_seconds is not None
    assert 0.064 < own.step_seconds < plain.step_seconds
    scaling = found.scaling(strategy_of_the_page(), (1, 8), in_rounds=False, planned=8)
    assert [row.workers for row in scaling] == [1, 8]
