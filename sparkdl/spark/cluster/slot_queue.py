"""When may each of several fits at the same time have its slots? When those before it leave room.

Left to Spark's queue, a gang would wait for the others with the patience that is meant for jobs of
strangers (``spark.sparkdl.queueTimeout``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from sparkdl.errors import TrainingFailed
from sparkdl.spark.session.interrupts import raise_if_asked

_LOOK_SECONDS = 0.2


class Turns:
    """Who of several fits holds how many slots. Thread-safe."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._held = 0
        self._is_over = False

    @contextlib.contextmanager
    def slots(self, num_slots: int, total: int | None) -> Iterator[None]:
        """Hold slots in the block, and begin it when they are free of the other fits.

        Args:
            num_slots: how many; if there are not so many at all, the block has them alone.
            total: slots of the cluster; None: not known, so nothing is waited for.

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
