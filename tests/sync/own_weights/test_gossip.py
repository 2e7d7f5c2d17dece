from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from sparkdl.errors import ConfigError
from sparkdl.sync.own_weights.gossip import Gossip
from tests.gang import Gang
from tests.sync.apart import (
    ROWS,
    SGD,
    SHAPES,
    SHARE_BYTES,
    Replicas,
    assert_close,
    bytes_by_pattern,
    train_on_rank,
)
from tests.train.runs import but

NUM_BYTES = 8 * sum(torch.Size(shape).numel() for shape in SHAPES)


@pytest.mark.gang
@pytest.mark.parametrize("rows", [ROWS, [9, 0, 33], [1, 35, 12]])
def test_follows_the_paper(gang3: Gang, rows: list[int]) -> None:
    """Blot et al. 2016: both push half of their weight; sums of weights and of weighted x stay."""
    strategy = Gossip(probability=0.8, seed=3)
    reference = Replicas(SGD, rows)
    s, has_trained = torch.zeros(3, dtype=torch.float64), [False] * 3
    num_met = 0
    for step in range(9):
        reference.step()
        for rank in range(3):
            if reference.rows[rank] > 0 and not has_trained[rank]:
                has_trained[rank] = True
                s[rank] += 1
        for i, j in strategy.pairs(step, 3):
            num_met += 1
            mine, theirs = s[i] / 2, s[j] / 2
            mixed = mine * reference.x[i] + theirs * reference.x[j]
            reference.x[i] = reference.x[j] = mixed / (mine + theirs)
            s[i] = s[j] = mine + theirs
    assert num_met >= 3
    assert s.sum() == sum(has_trained)
    results = gang3.run(train_on_rank, but(SGD, sync_strategy=strategy), rows)
    for rank, (mine, state, _) in enumerate(results):
        assert_close(mine, s / s.sum() @ reference.x)
        own = torch.cat([one.flatten() for one in state["rank"]["strategy"]["own"]])
        assert_close(own, reference.x[rank])
        assert state["rank"]["strategy"]["weight"] == s[rank]


@pytest.mark.gang
@pytest.mark.parametrize("probability", [0.3, 1.0])
def test_bytes_are_those_of_the_pairs(gang3: Gang, probability: float) -> None:
    strategy = Gossip(probability=probability)
    met = list(itertools.chain(*(p for step in range(9) for p in strategy.pairs(step, 3))))
    results = gang3.run(train_on_rank, but(SGD, sync_strategy=strategy), ROWS)
    agreed = 2 * 2 * NUM_BYTES // 3 + 2 * SHARE_BYTES
    sent = [one - agreed for _, _, one in results]
    assert sent == [met.count(rank) * (NUM_BYTES + 8) for rank in range(3)]
    if probability == 1:  # nothing is left to chance but who stays alone
        assert sum(sent) == pytest.approx(
            3 * 9 * bytes_by_pattern(strategy, SHAPES, 3, more=8 * 2 / 3)
        )


@pytest.mark.gang
def test_two_that_always_meet_are_averaged_at_every_step(gang: Gang) -> None:
    reference = Replicas(SGD, [16, 16])
    for _ in range(4):
        reference.step()
        reference.x[:] = reference.x.mean(0)
    strategy = Gossip(probability=1.0)
    config = but(SGD, sync_strategy=strategy)
    for mine, state, sent in gang.run(train_on_rank, config, [16, 16]):
        assert_close(mine, reference.x[0])
        agreed = NUM_BYTES + SHARE_BYTES
        assert sent == 4 * bytes_by_pattern(strategy, SHAPES, 2, more=8) + agreed
        assert state["rank"]["strategy"]["weight"] == 1.0


def test_pairs_are_disjoint_and_come_as_often_as_asked() -> None:
    strategy = Gossip(probability=0.25, seed=1)
    counts = torch.zeros(5, 5)
    for step in range(4000):
        pairs = strategy.pairs(step, 5)
        ranks = list(itertools.chain(*pairs))
        assert len(set(ranks)) == len(ranks)
        for i, j in pairs:
            counts[i, j] += 1
            counts[j, i] += 1
    assert strategy.pairs(7, 5) == Gossip(probability=0.25, seed=1).pairs(7, 5)
    each = 4000 * 2 * 0.25 / 10
    others = counts[~torch.eye(5, dtype=torch.bool)]
    assert others.min() > each * 0.75
    assert others.max() < each * 1.25
    assert [s for s in range(50) if Gossip(seed=2).pairs(s, 4) != Gossip(seed=3).pairs(s, 4)]


def test_alone_there_is_nobody_to_meet() -> None:
    assert Gossip(probability=1.0).pairs(0, 1) == []


def test_it_needs_a_gang() -> None:
    assert "weights of its own" in Gossip().why_not_rounds()


@pytest.mark.parametrize("options", [{"probability": 0.0}, {"probability": 1.1}, {"seed": -1}])
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Gossip(**options)
