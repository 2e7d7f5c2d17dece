"""Rows that do not fit into memory together, read piece by piece and mixed on the way.

The pieces of a rank come in random order. Those of a window are in memory together, where their
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
from sparkdl.data.gather import Buffer, gather_column
from sparkdl.data.plan import TrainPlan
from sparkdl.data.shuffle import Order, WindowedOrder, windowed_order
from sparkdl.errors import ConfigError, DataError

P = TypeVar("P")

Columns = Mapping[str, Rows]


@dataclass(frozen=True)
class StreamedRows(Generic[P]):
    """A rank's rows, in pieces that are read when they are needed; see `source.ShardRows`."""

    plan: TrainPlan
    pieces: Sequence[tuple[P, int]]
    """What `read` takes, and how many rows it gives for it; none without rows."""
    read: Callable[[P], Columns]
    """Gives a piece's rows, in memory of their own; called in one thread at a time."""
    _: KW_ONLY
    fingerprints: Sequence[str]
    """Content hash of each of the rank's shards."""
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
        order = windowed_order(seed, epoch, self.fingerprints, sizes, self.pieces_together)
        return StreamedEpoch(self.plan, order, self._load, self.row_bytes)

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

    first: int
    """Place of its first row in the epoch's order."""
    mixture: Order
    """The order of its rows, as places in the concatenation of the pieces."""
    pieces: Sequence[Columns]


@dataclass
class StreamedEpoch:
    """See `source.EpochRows`."""

    plan: TrainPlan
    order: WindowedOrder
    load: Callable[[int], Columns]
    """Reads the piece of that number."""
    row_bytes: int

    def __post_init__(self) -> None:
        self._ahead = _Prefetcher(self._load_window)
        self._windows: dict[int, _Window] = {}
        """The current one, and on its border the next; by number."""

    def read(self, start: int, stop: int, buffer: Buffer) -> dict[str, Rows]:
        """Gather rows from the windows that hold them, drop those that are used up."""
        if start == stop:
            return {column.key: no_rows(column) for column in self.plan.columns}
        order = self.order
        last = order.window_of(stop - 1)
        places: list[Order] = []
        sources: list[Columns] = []
        before = 0
        for number in range(order.window_of(start), last + 1):
            if number not in self._windows:
                self._windows[number] = self._ahead.take(number)
            window = self._windows[number]
            size = len(window.mixture)
            low, high = max(start - window.first, 0), min(stop - window.first, size)
            places.append(window.mixture[low:high] + window.mixture.dtype.type(before))
            sources += window.pieces
            before += size
        rows = {
            column.key: gather_column(
                column, [s[column.key] for s in sources], np.concatenate(places), buffer
            )
            for column in self.plan.columns
        }
        # Only now is there room for another window.
        self._windows = {last: self._windows[last]} if stop < order.bounds[last + 1] else {}
        if last + 1 < order.num_windows:
            self._ahead.prepare(last + 1)
        return rows

    def _load_window(self, number: int) -> _Window:
        window = _Window(
            first=int(self.order.bounds[number]),
            mixture=self.order.mixture(number),
            pieces=[self.load(piece) for piece in self.order.groups(number).tolist()],
        )
        pa.default_memory_pool().release_unused()  # which it keeps, for each thread that has read
        return window

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
