"""Shards that are mapped into memory, and their rows in an epoch's order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparkdl.data import collate
from sparkdl.data.collate import Rows
from sparkdl.data.gather import Buffer, gather_column
from sparkdl.data.plan import TrainPlan
from sparkdl.data.ragged import Ragged, lengths_at
from sparkdl.data.shuffle import LengthGroups, Order, cut_rows, epoch_order, windowed_order
from sparkdl.data.spool.page_cache import Pages
from sparkdl.data.spool.read_ahead import Places, PlacesByLength, WholePlaces, WindowedPlaces
from sparkdl.inputs import Sequence as SequenceInput


@dataclass(frozen=True)
class ShardData:
    """One shard as memory-mapped tensors."""

    fingerprint: str
    columns: Mapping[str, Rows]
    """Key of the plan's column -> ``(rows, *shape)``, or ragged rows."""
    pages: Pages | None = None
    """Which of it is in memory; None: all of it is, whatever the plan says."""

    @property
    def num_rows(self) -> int:
        """Rows of the shard."""
        return len(next(iter(self.columns.values())))


class MappedRows:
    """A rank's shards; any row can be read at any time. See `source.ShardRows`."""

    def __init__(self, shards: Sequence[ShardData], plan: TrainPlan) -> None:
        self._shards = [shard for shard in shards if shard.num_rows]
        self._plan = plan

    @property
    def num_rows(self) -> int:
        """Rows of all shards."""
        return sum(shard.num_rows for shard in self._shards)

    def part(self, start: int, stop: int) -> MappedRows:
        """Some of the rows of the only shard, from its begin or up to its end."""
        (shard,) = self._shards
        columns = {name: rows[start:stop] for name, rows in shard.columns.items()}
        pages = shard.pages.after(start) if start and shard.pages is not None else shard.pages
        return MappedRows([ShardData(shard.fingerprint, columns, pages)], self._plan)

    def begin(self) -> MappedRows:
        """The same, of which nothing is held in memory yet, if the plan has windows."""
        for shard in self._shards:
            if self._plan.windows is not None and shard.pages is not None:
                shard.pages.begin()
        return self

    def epoch(self, seed: int, epoch: int, *, num_together: int | None = None) -> MappedEpoch:
        places = self._places(seed, epoch)
        if num_together is not None:
            steps = self._plan.steps_per_epoch
            groups = LengthGroups(self.num_rows, steps, num_together, seed=seed, epoch=epoch)
            places = PlacesByLength(places, groups, self._lengths)
        return MappedEpoch(self._shards, self._plan, places)

    def _places(self, seed: int, epoch: int) -> Places:
        """The rows of the epoch, step by step."""
        rows = [shard.num_rows for shard in self._shards]
        known = (seed, epoch, [shard.fingerprint for shard in self._shards])
        windows = self._plan.windows
        if windows is None:
            return WholePlaces(epoch_order(*known, rows))
        sizes = cut_rows(rows, windows.group_rows)
        order = windowed_order(*known, sizes, windows.groups_together)
        pages = [shard.pages for shard in self._shards]
        return WindowedPlaces(order, list(zip(pages, rows, strict=True)))

    def _lengths(self, positions: Order) -> Order:
        """Length of the row at each position: the sum over its sequences."""
        total = np.zeros(len(positions), dtype=np.int64)
        for column in self._plan.columns:
            sources = [shard.columns[column.key] for shard in self._shards]
            if isinstance(column.kind, SequenceInput):
                total += lengths_at(
                    [rows for rows in sources if isinstance(rows, Ragged)], positions
                )
        return total

    def in_order(self, batch_size: int) -> Iterator[Mapping[str, Rows]]:
        """Shard after shard; see `source.ShardRows.in_order`."""
        for shard in self._shards:
            behind = 0
            for start in range(0, shard.num_rows, batch_size):
                stop = min(start + batch_size, shard.num_rows)
                behind = _move_on(shard, self._plan, behind, start, stop)
                # Copies: a model that changes its input in place must not reach the spool's pages.
                yield {
                    column.key: collate.copied(shard.columns[column.key][start:stop])
                    for column in self._plan.columns
                }
            if self._plan.windows is not None and shard.pages is not None:
                shard.pages.leave()
                shard.pages.drop(behind, shard.num_rows)


class MappedEpoch:
    """See `source.EpochRows`."""

    def __init__(self, shards: Sequence[ShardData], plan: TrainPlan, places: Places) -> None:
        self._shards = shards
        self._plan = plan
        self._places = places

    @property
    def row_bytes(self) -> int:
        """Of the first shard's."""
        return sum(
            _row_bytes(rows) for shard in self._shards[:1] for rows in shard.columns.values()
        )

    def read(self, start: int, stop: int, buffer: Buffer) -> dict[str, Rows]:
        """Gather the rows at these places of the order."""
        positions = self._places.positions(start, stop)
        rows = {
            column.key: gather_column(
                column, [shard.columns[column.key] for shard in self._shards], positions, buffer
            )
            for column in self._plan.columns
        }
        self._places.used(stop)
        return rows

    def close(self) -> None:
        """Give back what is kept in memory."""
        self._places.close()


def _row_bytes(rows: Rows) -> int:
    if isinstance(rows, Ragged):
        return rows.num_bytes // max(1, len(rows))
    return rows[:1].numel() * rows.element_size()


def _move_on(shard: ShardData, plan: TrainPlan, behind: int, start: int, stop: int) -> int:
    """Read a row group ahead of rows ``start`` to ``stop``, forget those from ``behind`` on.

    Returns:
        First row that was not forgotten.
    """
    windows, pages = plan.windows, shard.pages
    if windows is None or pages is None:
        return behind
    group = windows.group_rows
    if start == 0:
        pages.expect(0, min(2 * group, shard.num_rows))
    reached, before = stop // group, start // group
    if reached > before:
        first = min((before + 2) * group, shard.num_rows)
        pages.expect(first, min((reached + 2) * group, shard.num_rows))
        pages.leave()
        pages.drop(behind, start)
        return start
    return behind
