"""Rows that do not fit into memory together, read piece by piece and mixed on the way.

The pieces of a shard come in random order. Those of a window are in memory together, where their
rows are mixed, while a thread reads the next window's (see `shuffle.WindowedOrder`). So memory
holds two windows, whatever the size of the data, and a run that goes on in the middle of an epoch
reads at most one window whose rows it has used already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa

from sparkdl.data.collate import Rows, no_rows
from sparkdl.data.gather import Buffer, gather_column, sum_of_lengths
from sparkdl.data.plan import TrainPlan
from sparkdl.data.shuffle import (
    DealtByLength,
    LengthGroups,
    Order,
    WindowedOrder,
    windowed_order,
)
from sparkdl.errors import ConfigError, DataError

P = TypeVar("P")

Columns = Mapping[str, Rows]


@dataclass(frozen=True)
class StreamedRows(Generic[P]):
    """A shard's rows, in pieces that are read when they are needed; see `source.ShardRows`."""

    plan: TrainPlan
    pieces: Sequence[tuple[P, int]]
    """Pairs of what `read` takes and the number of rows that it gives for it; none without rows."""
    read: Callable[[P], Columns]
    """Gives a piece's rows, in memory of their own; called in one thread at a time."""
    _: KW_ONLY
    fingerprint: str
    """The shard's: a hash of its rows in their order."""
    pieces_together: int
    """Pieces whose rows are mixed."""
    row_bytes: int
    """About the memory of a row."""

    @property
    def num_rows(self) -> int:
        """Rows of all pieces."""
        return sum(rows for _, rows in self.pieces)

    def epoch(self, seed: int, epoch: int, *, num_together: int | None = None) -> StreamedEpoch:
        if num_together is not None:
            raise ConfigError("groupByLength needs a DataFrame; a source's lengths are not known")
        sizes = [rows for _, rows in self.pieces]
        order = windowed_order(seed, epoch, self.fingerprint, sizes, self.pieces_together)
        return StreamedEpoch(
            self.plan, order, lambda numbers: [self._load(n) for n in numbers], self.row_bytes
        )

    def in_order(self, batch_size: int) -> Iterator[Columns]:
        """Piece after piece; see `source.ShardRows.in_order`."""
        with contextlib.closing(_Prefetcher(self._load)) as ahead:
            for number, (_, num_rows) in enumerate(self.pieces):
                columns = ahead.take(number)
                if number + 1 < len(self.pieces):
                    ahead.prepare(number + 1)
                for start in range(0, num_rows, batch_size):
                    yield {name: rows[start : start + batch_size] for name, rows in columns.items()}

    def _load(self, number: int) -> Columns:
        piece, num_rows = self.pieces[number]
        columns = self.read(piece)
        found = len(next(iter(columns.values())))
        if found != num_rows:
            raise DataError(f"{piece} has {found} rows, not {num_rows} as when fit began")
        return columns


@dataclass(frozen=True)
class _Window:
    """Rows that are mixed."""

    mixture: Order
    """The order of its rows, as places in the concatenation of the pieces."""
    pieces: Sequence[Columns]


@dataclass
class StreamedEpoch:
    """The rows of an epoch that is read in windows; see `source.EpochRows`.

    A row's place is where it lies if all windows stand one after the other, unmixed.
    """

    plan: TrainPlan
    order: WindowedOrder
    load: Callable[[Sequence[int]], Sequence[Columns]]
    """Reads the row groups of these numbers: their columns, which may be joined to fewer."""
    row_bytes: int
    groups: LengthGroups | None = None
    """Groups of steps whose rows are exchanged by their length; None: none."""

    def __post_init__(self) -> None:
        self._ahead = _Prefetcher(self._load_window)
        self._windows: dict[int, _Window] = {}
        """The current one, and on its border the next; by number."""
        self._by_length = (
            None if self.groups is None else DealtByLength(self.groups, self._places, self._lengths)
        )

    def read(self, start: int, stop: int, buffer: Buffer) -> dict[str, Rows]:
        """Gather rows from the windows that hold them, drop those that are used up."""
        if start == stop:
            return {column.key: no_rows(column) for column in self.plan.columns}
        dealt, order = self._by_length, self.order
        places = self._places(start, stop) if dealt is None else dealt.rows(start, stop)
        rows = self._gathered(places, buffer)
        following = max(self._windows) + 1
        # Only now, when nothing refers to them any more, is there room for another window.
        needed = order.window_of(stop if dealt is None else dealt.first_needed(stop))
        self._windows = {n: window for n, window in self._windows.items() if n >= needed}
        if following < order.num_windows:
            self._ahead.prepare(following)
        return rows

    def _gathered(self, places: Order, buffer: Buffer) -> dict[str, Rows]:
        sources, positions = self._found(places)
        return {
            column.key: gather_column(column, [s[column.key] for s in sources], positions, buffer)
            for column in self.plan.columns
        }

    def _places(self, start: int, stop: int) -> Order:
        """The places of the rows from ``start`` to ``stop`` of the epoch's order."""
        found = []
        for number in range(self.order.window_of(start), self.order.window_of(stop - 1) + 1):
            low, high = self.order.bounds[number : number + 2].tolist()
            mixture = self._window(number).mixture
            found.append(low + mixture[max(start, low) - low : min(stop, high) - low].astype("i8"))
        return np.concatenate(found)

    def _found(self, places: Order) -> tuple[list[Columns], Order]:
        """Pieces, and the positions in their concatenation at which the rows of ``places`` are."""
        first, last = (self.order.window_of(int(end)) for end in (places.min(), places.max()))
        windows = [self._window(number) for number in range(first, last + 1)]
        begin, end = int(self.order.bounds[first]), int(self.order.bounds[last + 1])
        dtype = np.int32 if end - begin <= np.iinfo(np.int32).max else np.int64
        return [p for window in windows for p in window.pieces], (places - begin).astype(dtype)

    def _lengths(self, places: Order) -> Order:
        sources, positions = self._found(places)
        return sum_of_lengths(self.plan.columns, sources, positions)

    def _window(self, number: int) -> _Window:
        if number not in self._windows:
            self._windows[number] = self._ahead.take(number)
        return self._windows[number]

    def _load_window(self, number: int) -> _Window:
        pieces = self.load(self.order.groups(number).tolist())
        pa.default_memory_pool().release_unused()  # which it keeps, for each thread that has read
        return _Window(self.order.mixture(number), pieces)

    def close(self) -> None:
        """Let the thread that reads ahead end."""
        self._windows = {}
        self._ahead.close()


T = TypeVar("T")


class _Prefetcher(Generic[T]):
    """Loads numbered things in a thread, before they are wanted."""

    def __init__(self, load: Callable[[int], T]) -> None:
        self._load = load
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sparkdl-read")
        self._begun: dict[int, Future[T]] = {}

    def prepare(self, number: int) -> None:
        """Begin to load a thing."""
        if number not in self._begun:
            self._begun[number] = self._pool.submit(self._load, number)

    def take(self, number: int) -> T:
        """The thing, when it is loaded."""
        self.prepare(number)
        return self._begun.pop(number).result()

    def close(self) -> None:
        """Wait for what is being loaded; it is not used."""
        self._pool.shutdown(cancel_futures=True)
        self._begun.clear()
