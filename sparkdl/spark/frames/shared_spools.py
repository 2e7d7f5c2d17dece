"""The spools and the cluster's slots, which several fits on the same rows share.

Each fit asks for the table that it would make; the first that asks makes it, and all tables stay
until the last fit has ended.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from sparkdl.errors import TrainingFailed
from sparkdl.spark.cluster.slots import Slots
from sparkdl.spark.frames.row_table import RowTable, TableSpec
from sparkdl.spark.session.interrupts import raise_if_asked

_LOOK_SECONDS = 0.2


class SlotQueue:
    """Has each of several fits wait until those before it leave it slots. Thread-safe.

    Left to Spark's queue, a gang would wait for the others with the patience that is meant for
    jobs of strangers (``spark.sparkdl.queueTimeout``).
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._held = 0
        self._is_over = False

    @contextlib.contextmanager
    def slots(self, num_slots: int, total: int | None) -> Iterator[None]:
        """Hold slots in the block, and begin it when they are free of the other fits.

        A block that wants more than there are at all has them alone. ``total`` None: not known, so
        nothing is waited for.

        Raises:
            TrainingFailed: nobody gets any more.
        """

        def is_free() -> bool:
            return total is None or not self._held or self._held + num_slots <= total

        with self._free:
            while not self._free.wait_for(lambda: self._is_over or is_free(), _LOOK_SECONDS):
                raise_if_asked()
            if self._is_over:
                raise TrainingFailed("the search that this fit belongs to was ended")
            self._held += num_slots
        try:
            yield
        finally:
            with self._free:
                self._held -= num_slots
                self._free.notify_all()

    def end(self) -> None:
        """Have those that wait, and whoever comes, fail."""
        with self._free:
            self._is_over = True
            self._free.notify_all()


class Spools:
    """The tables of several fits on the same rows, and their slots. Thread-safe."""

    def __init__(self) -> None:
        self.queue = SlotQueue()
        self._lock = threading.Lock()
        self._tables: list[tuple[Any, RowTable]] = []

    def take(self, spec: TableSpec, slots: Slots, make: Callable[[], RowTable]) -> RowTable:
        """The table for these columns and workers; ``make`` describes it if there is none."""
        key = _key(spec, slots)
        with self._lock:
            for known, table in self._tables:
                if known == key:
                    return table
            table = make()
            self._tables.append((key, table))
            return table

    def has(self, spec: TableSpec, slots: Slots) -> bool:
        """True if another fit has made the table for these columns and workers."""
        key = _key(spec, slots)
        with self._lock:
            return any(known == key and bool(table.known) for known, table in self._tables)

    def close(self) -> None:
        """Remove all spools."""
        with self._lock:
            tables, self._tables = self._tables, []
        for _, table in tables:
            table.close()


def _key(spec: TableSpec, slots: Slots) -> Any:
    """Return the key of the spools of one DataFrame: equal keys mean equal files.

    Specifications count by their pickles: callables that are made anew for each fit are unequal
    although they do the same.
    """
    columns = [
        (
            *(p.name, p.role, str(p.expression), p.dtype, p.as_classes, p.ignored, p.argument),
            cloudpickle.dumps(p.specification),
        )
        for p in spec.columns
    ]
    places = (spec.num_places, spec.at_once)
    workers = (slots.num_workers, slots.is_gang, slots.cpus_per_worker, slots.gpus_per_worker)
    return (columns, str(spec.validation), spec.pieces, spec.num_shards, places, workers)
