"""How are the rows of shards that are mapped into memory read in an epoch's order?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparkdl.data import assemble
from sparkdl.data.assemble import Rows
from sparkdl.data.gather import Buffer, gather_column
from sparkdl.data.ragged import Ragged
from sparkdl.data.shuffle import Order, epoch_order, group_by_length
from sparkdl.inputs import Sequence as SequenceInput
from sparkdl.plan import TrainPlan


@dataclass(frozen=True)
class ShardData:
    """One shard as memory-mapped tensors."""

    fingerprint: str
    columns: Mapping[str, Rows]
    """Key of the plan's column -> ``(rows, *shape)``, or ragged rows."""

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
        """Some of the rows of the only shard."""
        (shard,) = self._shards
        columns = {name: rows[start:stop] for name, rows in shard.columns.items()}
        return MappedRows([ShardData(shard.fingerprint, columns)], self._plan)

    def epoch(self, seed: int, epoch: int, *, num_together: int | None = None) -> MappedEpoch:
        """The order of `shuffle.epoch_order`, over all shards; see `source.ShardRows.epoch`."""
        rows = [shard.num_rows for shard in self._shards]
        fingerprints = [shard.fingerprint for shard in self._shards]
        order = epoch_order(seed, epoch, fingerprints, rows)
        if num_together is not None and self._shards:
            lengths = np.concatenate([_lengths(shard, self._plan) for shard in self._shards])
            order = group_by_length(
                order, lengths, self._plan.steps_per_epoch, num_together, seed=seed, epoch=epoch
            )
        return MappedEpoch(self._shards, self._plan, order)

    def in_order(self, batch_size: int) -> Iterator[Mapping[str, Rows]]:
        """Shard after shard; see `source.ShardRows.in_order`."""
        for shard in self._shards:
            for start in range(0, shard.num_rows, batch_size):
                stop = min(start + batch_size, shard.num_rows)
                # Copies: a model that changes its input in place must not reach the spool's pages.
                yield {
                    column.key: assemble.copied(shard.columns[column.key][start:stop])
                    for column in self._plan.columns
                }


class MappedEpoch:
    """See `source.EpochRows`."""

    def __init__(self, shards: Sequence[ShardData], plan: TrainPlan, order: Order) -> None:
        self._shards = shards
        self._plan = plan
        self._order = order

    @property
    def row_bytes(self) -> int:
        """Of the first shard's."""
        return sum(
            _row_bytes(rows) for shard in self._shards[:1] for rows in shard.columns.values()
        )

    def read(self, start: int, stop: int, buffer: Buffer) -> dict[str, Rows]:
        """Gather the rows at these places of the order."""
        positions = self._order[start:stop]
        return {
            column.key: gather_column(
                column, [shard.columns[column.key] for shard in self._shards], positions, buffer
            )
            for column in self._plan.columns
        }

    def close(self) -> None:
        """Nothing is held: the files stay mapped."""


def _lengths(shard: ShardData, plan: TrainPlan) -> Order:
    """Length of each row: the sum over its sequences."""
    total = np.zeros(shard.num_rows, dtype=np.int64)
    for column in plan.columns:
        rows = shard.columns[column.key]
        if isinstance(column.kind, SequenceInput) and isinstance(rows, Ragged):
            total += rows.lengths
    return total


def _row_bytes(rows: Rows) -> int:
    if isinstance(rows, Ragged):
        return rows.num_bytes // max(1, len(rows))
    return rows[:1].numel() * rows.element_size()
