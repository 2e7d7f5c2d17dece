from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from sparkdl.data.shuffle import LengthGroups, cut_rows, epoch_order, windowed_order
from tests.data.row_windows import rows_of, whole


def test_order_is_a_permutation() -> None:
    order = epoch_order(0, 0, "a", 100)
    assert sorted(order.tolist()) == list(range(100))
    assert order.tolist() != list(range(100))
    assert order.dtype == np.int32


def test_order_is_known_for_ever() -> None:
    # A change here breaks the resuming of every checkpoint.
    assert epoch_order(1, 2, "a", 8).tolist() == [2, 0, 6, 4, 7, 5, 1, 3]


@pytest.mark.parametrize("changed", [(1, 0, "a", 100), (0, 1, "a", 100), (0, 0, "b", 100)])
def test_order_depends_on_seed_epoch_and_content(changed: tuple[int, int, str, int]) -> None:
    base = epoch_order(0, 0, "a", 100)
    assert base.tolist() == epoch_order(0, 0, "a", 100).tolist()
    assert base.tolist() != epoch_order(*changed).tolist()


def test_parts_of_the_seed_do_not_run_together() -> None:
    first = epoch_order(1, 11, "a", 50)
    assert first.tolist() != epoch_order(11, 1, "a", 50).tolist()
    assert first.tolist() != epoch_order(1, 1, "1a", 50).tolist()


def test_no_rows() -> None:
    assert epoch_order(0, 0, "a", 0).tolist() == []


def group_by_length(order: np.ndarray, lengths: np.ndarray, epoch: int) -> np.ndarray:
    """All groups of an epoch of 8 steps, 4 of them together."""
    groups, dealt, start = LengthGroups(len(order), 8, 4, seed=3, epoch=epoch), [], 0
    while start < len(order):
        begin, stop = groups.span(start)
        assert begin == start < stop
        assert groups.span(stop - 1) == (start, stop)
        dealt.append(groups.deal(start, order[start:stop], lengths[order[start:stop]]))
        start = stop
    return np.concatenate(dealt)


def test_groups_are_known_for_ever() -> None:
    # A change here breaks the resuming of every checkpoint.
    grouped = group_by_length(np.arange(16), np.arange(16) % 5, 0)
    assert grouped.tolist() == [2, 7, 0, 5, 1, 6, 3, 4, 9, 14, 8, 13, 10, 15, 11, 12]


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_rows_of_similar_length_meet(rows: int) -> None:
    order = epoch_order(3, 0, "a", rows)
    lengths = np.random.default_rng(1).integers(1, 50, rows)
    grouped = group_by_length(order, lengths, 0)
    assert sorted(grouped.tolist()) == list(range(rows))
    bounds = [rows * step // 8 for step in range(9)]

    def padding(positions: np.ndarray) -> int:
        steps = [lengths[positions[low:high]] for low, high in pairwise(bounds)]
        return sum(int((step.max(initial=0) - step).sum()) for step in steps)

    assert padding(grouped) <= padding(order)
    other = group_by_length(order, lengths, 1)
    assert rows < 40 or grouped.tolist() != other.tolist()
    # Within the steps that are sorted together, and nowhere else.
    half = bounds[4]
    assert sorted(grouped[:half].tolist()) == sorted(order[:half].tolist())


def test_shards_are_cut_into_row_groups() -> None:
    assert [cut_rows(rows, 3) for rows in (7, 0, 6, 2)] == [[3, 3, 1], [], [3, 3], [2]]


@pytest.mark.parametrize("together", [1, 3, 4, 100])
@pytest.mark.parametrize("sizes", [[5], [4, 4, 4, 4, 4, 4, 4], [3, 9, 1, 1, 20, 2, 8, 0, 5]])
def test_windows_are_a_permutation_of_the_rows(sizes: list[int], together: int) -> None:
    order = windowed_order(1, 0, "a", sizes, together)
    assert sorted(whole(order)) == list(range(sum(sizes)))
    assert len(order) == sum(sizes)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    for window in range(order.num_windows):
        low, high = order.bounds[window : window + 2].tolist()
        positions = np.array(rows_of(order, window), dtype=np.int64)
        assert len(positions) == high - low
        assert set(groups[positions]) <= set(order.groups(window).tolist())
        assert len(order.groups(window)) <= together
        assert {order.window_of(place) for place in range(low, high)} <= {window}
        rows = np.flatnonzero(np.isin(groups, order.groups(window)))
        assert positions.tolist() == rows[order.mixture(window)].tolist()


def test_windows_are_nearly_equal() -> None:
    order = windowed_order(0, 0, "a", [10] * 11, 5)
    assert np.diff(order.cuts).tolist() in ([3, 4, 4], [4, 3, 4], [4, 4, 3])


def test_windowed_order_is_known_for_ever() -> None:
    # A change here breaks the resuming of every checkpoint.
    order = windowed_order(1, 2, "a", [2, 2, 2, 2], 2)
    assert whole(order) == [2, 4, 5, 3, 6, 0, 7, 1]
    assert order.mixture(0).dtype == np.int32


@pytest.mark.parametrize("changed", [(1, 0, "a"), (0, 1, "a"), (0, 0, "b")])
def test_windows_depend_on_seed_epoch_and_content(changed: tuple[int, int, str]) -> None:
    base = windowed_order(0, 0, "a", [10] * 10, 3)
    other = windowed_order(*changed, [10] * 10, 3)
    assert whole(base) == whole(windowed_order(0, 0, "a", [10] * 10, 3))
    assert base.sequence.tolist() != other.sequence.tolist()
    assert base.mixture(0)[:20].tolist() != other.mixture(0)[:20].tolist()
    assert base.mixture(0).tolist() != base.mixture(1).tolist()


def test_no_windows_without_rows() -> None:
    order = windowed_order(0, 0, "a", [], 3)
    assert (len(order), order.num_windows, whole(order)) == (0, 0, [])
    with pytest.raises(ValueError, match="at least 1"):
        windowed_order(0, 0, "a", [], 0)
