from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from sparkdl.data.shuffle import epoch_order, group_by_length


def test_order_is_a_permutation() -> None:
    order = epoch_order(0, 0, ["a", "b"], [60, 40])
    assert sorted(order.tolist()) == list(range(100))
    assert order.tolist() != list(range(100))
    assert order.dtype == np.int32


def test_order_is_known_for_ever() -> None:
    # A change here breaks the resuming of every checkpoint.
    assert epoch_order(1, 2, ["a"], [8]).tolist() == [2, 0, 6, 4, 7, 5, 1, 3]


@pytest.mark.parametrize(
    "changed", [(1, 0, ["a"], [100]), (0, 1, ["a"], [100]), (0, 0, ["b"], [100])]
)
def test_order_depends_on_seed_epoch_and_content(changed: tuple[int, int, list[str], list[int]]):
    base = epoch_order(0, 0, ["a"], [100])
    assert base.tolist() == epoch_order(0, 0, ["a"], [100]).tolist()
    assert base.tolist() != epoch_order(*changed).tolist()


def test_parts_of_the_seed_do_not_run_together() -> None:
    first = epoch_order(1, 11, ["a"], [50])
    assert first.tolist() != epoch_order(11, 1, ["a"], [50]).tolist()
    assert first.tolist() != epoch_order(1, 1, ["1a"], [50]).tolist()


def test_no_rows() -> None:
    assert epoch_order(0, 0, [], []).tolist() == []
    assert epoch_order(0, 0, ["a"], [0]).tolist() == []


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_rows_of_similar_length_meet(rows: int) -> None:
    order = epoch_order(3, 0, ["a"], [rows])
    lengths = np.random.default_rng(1).integers(1, 50, rows)
    grouped = group_by_length(order, lengths, 8, 4, seed=3, epoch=0)
    assert sorted(grouped.tolist()) == list(range(rows))
    bounds = [rows * step // 8 for step in range(9)]

    def padding(positions: np.ndarray) -> int:
        steps = [lengths[positions[low:high]] for low, high in pairwise(bounds)]
        return sum(int((step.max(initial=0) - step).sum()) for step in steps)

    assert padding(grouped) <= padding(order)
    other = group_by_length(order, lengths, 8, 4, seed=3, epoch=1)
    assert rows < 40 or grouped.tolist() != other.tolist()
    # Within the steps that are sorted together, and nowhere else.
    half = bounds[4]
    assert sorted(grouped[:half].tolist()) == sorted(order[:half].tolist())
