"""Values that a Python worker process of Spark keeps from one task to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class KeptBetweenTasks:
    """At most one value, so that a run's memory is free when the next run begins."""

    def __init__(self) -> None:
        self.value: Any = None
        self._key: Hashable = None
        self._resources = contextlib.ExitStack()

    def get(self, key: Hashable, make: Callable[[contextlib.ExitStack], T]) -> T:
        """The value kept under ``key``; if there is none, release what is kept and make it.

        What ``make`` enters into the stack is closed when the value is released.
        """
        if key != self._key:
            self.release()
            self.value, self._key = make(self._resources), key
        value: T = self.value
        return value

    def release(self) -> None:
        """Give back what is kept; done when the files of a run are removed."""
        self.value = self._key = None
        self._resources.close()


KEPT = KeptBetweenTasks()
"""The value that this process keeps."""
