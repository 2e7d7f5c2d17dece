from __future__ import annotations

from typing import Any

import pytest
import torch

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.sync.asynchronous.batch_share import BatchShare
from tests.gang import Gang

CPU = torch.device("cpu")
ROWS = [(4, 2), (3, 3), (4, 0), (0, 2)]
"""Of two ranks in four steps."""


@pytest.mark.gang
def test_shares_are_exact_where_samples_count_alike(gang: Gang) -> None:
    for rank, shares in enumerate(gang.run(shares_of, [1.0, 1.0])):
        assert shares == pytest.approx([rows[rank] / sum(rows) for rows in ROWS] * 2, rel=1e-15)


@pytest.mark.gang
def test_weights_are_learnt_from_closed_rounds(gang: Gang) -> None:
    """So shares do not depend on the unit of the weights, and add up to 1 on the average."""
    both = gang.run(shares_of, [2.0, 50.0])
    per_sample = (2 * 11 + 50 * 7) / 18
    for rank, weight in enumerate([2.0, 50.0]):
        expected = [weight * rows[rank] / (sum(rows) * per_sample) for rows in ROWS]
        assert both[rank][4:] == pytest.approx(expected, rel=1e-15)
    assert both[0][0] + both[1][0] == pytest.approx(1)


def shares_of(comm: Any, weights: list[float]) -> list[float]:
    share, shares = BatchShare(comm, CPU), []
    for _ in range(2):
        for rows in ROWS:
            shares.append(share.of(weights[comm.rank] * rows[comm.rank], sum(rows)))
        share.close_round()
        other = BatchShare(comm, CPU)
        other.load_rank_state_dict(share.rank_state_dict())
        share = other
    return shares


def test_nobody_shares_with_a_rank_alone() -> None:
    share = BatchShare(LocalCommunicator(), CPU)
    assert [share.of(weight, 4.0) for weight in (0.5, 0.0, 12.0)] == [1.0, 0.0, 1.0]


@pytest.mark.gang
def test_without_any_weight_there_is_no_share_yet(gang: Gang) -> None:
    assert gang.run(shares_after_nothing) == [[0.0, 0.25], [0.0, 0.75]]


def shares_after_nothing(comm: Any) -> list[float]:
    share = BatchShare(comm, CPU)
    nothing = share.of(0.0, 3.0)
    share.close_round()
    return [nothing, share.of([1.0, 3.0][comm.rank], 8.0)]
