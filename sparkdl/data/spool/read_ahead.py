"""Which rows does each step of a rank's epoch take, and when are they brought into memory?

The order says where the rows of places ``start`` to ``stop`` of an epoch lie. Whoever asks goes
forward only; what lies behind is given back, and what comes next is read ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from sparkdl.data.shuffle import LengthGroups, Order, WindowedOrder
from sparkdl.data.spool.page_cache import Pages


class Places(Protocol):
    """The rows of an epoch in their order."""

    def positions(self, start: int, stop: int) -> Order:
        """Positions, in the concatenation of the rank's shards, of places ``start`` to ``stop``."""

    def used(self, place: int) -> None:
        """Take note that nobody will ask for rows before ``place`` again."""

    def close(self) -> None:
        """Give back what is kept in memory."""


class WholePlaces:
    """Rows that are in memory, or will be after the first epoch."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def positions(self, start: int, stop: int) -> Order:
        return self._order[start:stop]

    def used(self, place: int) -> None:
        """See `Places`."""

    def close(self) -> None:
        """See `Places`."""


class WindowedPlaces:
    """Rows of which a window is in memory, and a growing part of the next one.

    Args:
        order: the epoch's order.
        shards: pages and number of rows of each shard; no pages where it is in memory anyhow.
    """

    def __init__(self, order: WindowedOrder, shards: Sequence[tuple[Pages | None, int]]) -> None:
        self._order = order
        self._shards = tuple(shards)
        self._mixed: dict[int, Order] = {}
        self._groups: list[int] = []
        for window in range(order.num_windows):
            self._groups += order.groups(window).tolist()
        self._behind, self._ahead = 0, 0
        """The part of these row groups that is in memory, or being read."""
        self._is_begun, self._is_over = False, False

    def positions(self, start: int, stop: int) -> Order:
        if stop <= start:
            return np.empty(0, dtype=np.int64)
        first, last = self._order.window_of(start), self._order.window_of(stop - 1)
        if not self._is_begun:  # perhaps in the middle of an epoch
            self._behind = self._ahead = int(self._order.cuts[first])
        self._is_begun, self._is_over = True, stop == len(self._order)
        self._read_ahead(last, stop)
        pieces = []
        for window in range(first, last + 1):
            if window not in self._mixed:
                self._mixed[window] = self._order.positions(window)
            low, high = self._order.bounds[window : window + 2].tolist()
            pieces.append(self._mixed[window][max(start, low) - low : min(stop, high) - low])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def used(self, place: int) -> None:
        if not self._is_begun or place >= len(self._order):
            return  # at the end `close` follows
        window = self._order.window_of(place)
        end = int(self._order.cuts[window])
        if end > self._behind:
            self._drop_before(end)
        self._mixed = {number: rows for number, rows in self._mixed.items() if number >= window}

    def close(self) -> None:
        """Give memory back; what was not used up stays in the page cache for whoever goes on."""
        self._drop_before(self._ahead if self._is_over else self._behind)
        self._mixed.clear()

    def _drop_before(self, end: int) -> None:
        for pages, _ in self._shards:
            if pages is not None:
                pages.leave()
        for group in self._groups[self._behind : end]:
            for pages, first, last in self._where(group):
                pages.drop(first, last)
        self._behind = end

    def _read_ahead(self, window: int, stop: int) -> None:
        """The whole window, and of the next one as much as has been used of this one.

        So the disk reads steadily, instead of all that comes next when a window begins.
        """
        low, high = self._order.bounds[window : window + 2].tolist()
        upto = int(self._order.cuts[window + 1])
        if window + 1 < self._order.num_windows:
            following = int(self._order.cuts[window + 2]) - upto
            upto += -(-following * (stop - low) // (high - low))
        for group in self._groups[self._ahead : upto]:
            for pages, first, last in self._where(group):
                pages.expect(first, last)
        self._ahead = max(self._ahead, upto)

    def _where(self, group: int) -> Iterator[tuple[Pages, int, int]]:
        """The pages, and the rows in them, of a row group."""
        low, high = self._order.starts[group : group + 2].tolist()
        begin = 0
        for pages, rows in self._shards:
            first, last = max(low - begin, 0), min(high - begin, rows)
            if pages is not None and first < last:
                yield pages, first, last
            begin += rows


class PlacesByLength:
    """The rows of other places, those of some steps together exchanged by their length.

    Args:
        places: the others.
        groups: which steps are grouped.
        lengths: gives the length of the row at each position.
    """

    def __init__(
        self, places: Places, groups: LengthGroups, lengths: Callable[[Order], Order]
    ) -> None:
        self._places = places
        self._groups = groups
        self._lengths = lengths
        self._start, self._dealt = 0, np.empty(0, dtype=np.int64)
        """First place of the group at hand, and its rows."""

    def positions(self, start: int, stop: int) -> Order:
        pieces = []
        while start < stop:
            if not 0 <= start - self._start < len(self._dealt):
                self._deal(start)
            offset = start - self._start
            pieces.append(self._dealt[offset : offset + stop - start])
            start += len(pieces[-1])
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def used(self, place: int) -> None:
        if self._start <= place < self._start + len(self._dealt):
            place = self._start  # the whole group was read, and is still needed
        self._places.used(place)

    def close(self) -> None:
        self._places.close()

    def _deal(self, place: int) -> None:
        self._start, stop = self._groups.span(place)
        rows = self._places.positions(self._start, stop)
        self._dealt = self._groups.deal(self._start, rows, self._lengths(rows))
