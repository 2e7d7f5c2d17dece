"""How do several fits on the same rows use one spool?

Each asks for the table that it would make; the first that asks makes it, and all tables stay until
the last fit has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import cloudpickle

from sparkdl.data.plan import Role
from sparkdl.spark.cluster.slot_queue import Turns
from sparkdl.spark.frames.columns import Prepared
from sparkdl.spark.frames.shard_table import ShardTable


@dataclass(frozen=True)
class SpoolColumnKey:
    """What of a column decides about its files."""

    name: str
    role: Role
    expression: str
    dtype: str
    as_classes: bool
    argument: str | None
    specification: bytes
    """Pickled: callables that are made anew for each fit are unequal although they do the same."""

    @classmethod
    def of(cls, column: Prepared) -> SpoolColumnKey:
        """That of a prepared column."""
        return cls(
            name=column.name,
            role=column.role,
            expression=str(column.expression),
            dtype=column.dtype,
            as_classes=column.as_classes,
            argument=column.argument,
            specification=cloudpickle.dumps(column.specification),
        )


@dataclass(frozen=True)
class SpoolKey:
    """What decides about the spools of one DataFrame; equal keys mean equal files."""

    columns: tuple[SpoolColumnKey, ...]
    validation: str
    num_shards: int
    barrier: bool
    shares: tuple[float, ...] | None
    cpus_per_worker: int | None
    gpus_per_worker: float | None


class Spools:
    """The tables of several fits on one DataFrame, and their slots. Thread-safe."""

    def __init__(self) -> None:
        self.turns = Turns()
        self._lock = threading.Lock()
        self._tables: list[tuple[SpoolKey, ShardTable]] = []

    def take(self, key: SpoolKey, make: Callable[[], ShardTable]) -> ShardTable:
        """The table of that key; ``make`` describes it if there is none."""
        with self._lock:
            for known, table in self._tables:
                if known == key:
                    return table
            table = make()
            self._tables.append((key, table))
            return table

    def close(self) -> None:
        """Remove all spools."""
        with self._lock:
            tables, self._tables = self._tables, []
        for _, table in tables:
            table.close()
