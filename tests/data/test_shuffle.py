from __future__ import annotations

import numpy as np
import pytest

from sparkdl.data.shuffle import epoch_order


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
