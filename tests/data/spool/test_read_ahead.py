"""Row groups are read before they are needed, forgotten after, and few are kept at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkdl.data.shuffle import LengthGroups, cut_rows, epoch_order, windowed_order
from sparkdl.data.spool.page_cache import Pages
from sparkdl.data.spool.read_ahead import (
    Positions,
    PositionsByLength,
    WholePositions,
    WindowedPositions,
)


class Watched(Pages):
    """Rows that are or will be in memory, and those that were forgotten."""

    def __init__(self) -> None:
        super().__init__([])
        self.here: set[int] = set()
        self.dropped: set[int] = set()
        self.is_left = True

    def prefetch(self, start: int, stop: int) -> None:
        assert not self.here & set(range(start, stop)), "read twice"
        self.here |= set(range(start, stop))

    def release(self) -> None:
        self.is_left = True

    def drop(self, start: int, stop: int) -> None:
        rows = set(range(start, stop))
        assert rows <= self.here
        assert self.is_left, "the kernel drops nothing that is mapped"
        self.here -= rows
        self.dropped |= rows


ROWS = (70, 50)
SHARDS = ["a", "b"]


def windowed(watched: list[Watched]) -> WindowedPositions:
    order = windowed_order(1, 0, SHARDS, cut_rows(ROWS, 4), 5)
    return WindowedPositions(order, list(zip(watched, ROWS, strict=True)))


def walk(
    places: Positions, watched: list[Watched], start: int, stop: int, step: int, most: int = 120
) -> list[int]:
    """Rows of ``step`` places at a time, in memory when they are told, never more than ``most``."""
    seen: list[int] = []
    for low in range(start, stop, step):
        rows = places.positions(low, min(low + step, stop)).tolist()
        for row in rows:
            shard = int(row >= ROWS[0])
            assert row - ROWS[0] * shard in watched[shard].here
            watched[shard].is_left = False
        assert sum(len(one.here) for one in watched) <= most
        places.used(min(low + step, stop))
        seen += rows
    return seen


@pytest.mark.parametrize("step", [1, 7, 20, 33, 120])
def test_rows_are_in_memory_when_they_are_used(step: int) -> None:
    watched = [Watched(), Watched()]
    places = windowed(watched)
    # Two windows of at most 5 groups of 4 rows, and what a step that ends in the second one reads.
    most = min(2 * 20 + -(-step // 4) * 4, 120)
    assert sorted(walk(places, watched, 0, 120, step, most)) == list(range(120))
    places.close()
    assert not any(one.here for one in watched)
    assert [len(one.dropped) for one in watched] == list(ROWS)
    assert all(one.is_left for one in watched)


def test_an_epoch_goes_on_in_the_middle() -> None:
    whole = walk(windowed(first := [Watched(), Watched()]), first, 0, 120, 6)
    watched = [Watched(), Watched()]
    places = windowed(watched)
    assert walk(places, watched, 66, 90, 6, most=48) == whole[66:90]
    before = [len(one.dropped) for one in watched]
    places.close()
    assert all(one.is_left for one in watched)
    # Left early: what was read is soon used by whoever goes on, so the kernel may keep it.
    assert [len(one.dropped) for one in watched] == before


def test_the_next_window_is_read_little_by_little() -> None:
    watched = [Watched(), Watched()]
    places = windowed(watched)
    sizes = []
    for place in range(15):
        places.positions(place, place + 1)
        sizes.append(sum(len(one.here) for one in watched))
    assert max(np.diff(sizes)) <= 4
    assert sizes[-1] > sizes[0]


def test_without_steps_nothing_is_read() -> None:
    watched = [Watched(), Watched()]
    places = windowed(watched)
    assert len(places.positions(120, 120)) == 0
    places.used(120)
    places.close()
    assert not any(one.dropped for one in watched)


@pytest.mark.parametrize("step", [5, 30, 50])
def test_groups_by_length_keep_their_rows_in_memory(step: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 99, 120)

    def by_length(places: Positions) -> PositionsByLength:
        groups = LengthGroups(120, 24, 3, seed=1, epoch=0)
        return PositionsByLength(places, groups, lambda positions: lengths[positions])

    watched = [Watched(), Watched()]
    places = by_length(windowed(watched))
    seen = walk(places, watched, 0, 120, step)
    assert sorted(seen) == list(range(120))
    places.close()
    assert not any(one.here for one in watched)
    middle = by_length(windowed(again := [Watched(), Watched()]))
    assert walk(middle, again, 40, 120, 5) == seen[40:]  # 40 is inside of a group of 15 rows


def test_places_of_rows_in_memory() -> None:
    order = epoch_order(0, 0, ["a"], [10])
    places = WholePositions(order)
    assert places.positions(3, 7).tolist() == order[3:7].tolist()


def test_shards_without_pages_are_in_memory() -> None:
    order: Any = windowed_order(1, 0, ["a"], [4, 4], 1)
    places = WindowedPositions(order, [(None, 8)])
    assert sorted(places.positions(0, 8).tolist()) == list(range(8))
    places.close()
