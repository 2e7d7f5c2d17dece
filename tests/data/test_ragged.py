"""Are the right rows picked where rows differ in length?"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from sparkdl.data.ragged import Ragged, gather, offsets_of


def rows_of(*rows: list[int], width: int = 1) -> Ragged:
    flat = np.array([v for row in rows for v in row], dtype=np.int64)
    values = np.repeat(flat[:, None], width, axis=1)
    return Ragged((flat, values), offsets_of(np.array([len(row) for row in rows])), (width,))


def listed(rows: Ragged) -> list[list[int]]:
    bounds = rows.offsets.tolist()
    flat, wide = rows.parts
    assert all((wide[:, i] == flat).all() for i in range(wide.shape[1]))
    return [flat[low:high].tolist() for low, high in pairwise(bounds)]


@pytest.mark.parametrize("width", [1, 200])  # small rows by an index, large ones one by one
def test_gathered_rows_are_those_of_the_concatenation(width: int) -> None:
    first = rows_of([1, 2, 3], [], [4], width=width)
    second = rows_of([5, 6], [7], width=width)
    whole = listed(first) + listed(second)
    positions = np.array([4, 0, 1, 3, 2, 0], dtype=np.int32)
    assert listed(gather([first, second], positions)) == [whole[p] for p in positions]
    assert listed(gather([first], np.array([2, 0]))) == [[4], [1, 2, 3]]
    assert listed(gather([first, second], np.array([], dtype=np.int64))) == []


def test_a_slice_shows_neighbours_and_a_mask_picks() -> None:
    rows = rows_of([1], [2, 3], [], [4, 5])
    assert rows[1:3].own()[0].tolist() == [2, 3]
    assert len(rows[3:9]) == 1 and len(rows[4:9]) == 0
    assert listed(rows[1:].where(np.array([True, False, True]))) == [[2, 3], [4, 5]]
    assert rows[1:2].num_bytes == 2 * 16
