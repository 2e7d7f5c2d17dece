"""How does an estimator try several Param maps on the same rows?

pyspark's CrossValidator and TrainValidationSplit take models from `Fits` in as many threads as
their ``parallelism``; each begins when the others leave it slots enough.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from sparkdl.errors import TrainingFailed
from sparkdl.spark.frames.shared_spools import Spools
from sparkdl.spark.session import interrupts

M = TypeVar("M")


class Fits(Generic[M], Iterator[tuple[int, M]]):
    """Gives ``(index, model)`` for each Param map. Thread-safe.

    The spools stay until the last model is there, or nobody can ask for one any more. Once the
    user has interrupted the search, which goes on in the threads that pyspark has made for it,
    there are no more models.
    """

    def __init__(self, fits: Sequence[Callable[[Spools], M]]) -> None:
        self._fits = tuple(fits)
        self._next = 0
        self._ended = 0
        self._lock = threading.Lock()
        interrupts.listen()
        self._presses = interrupts.presses()
        spools = Spools()
        self._spools = spools
        self._close = weakref.finalize(self, spools.close)

    def __iter__(self) -> Fits[M]:
        return self

    def __next__(self) -> tuple[int, M]:
        """Train the next one.

        Raises:
            StopIteration: all have been given out.
            TrainingFailed: the user has interrupted the search.
        """
        with self._lock:
            index = self._next
            if index == len(self._fits):
                raise StopIteration
            self._next += 1
        try:
            if interrupts.presses() > self._presses:
                raise TrainingFailed("the search that this fit belongs to was interrupted")
            return index, self._fits[index](self._spools)
        finally:
            self._end_one()

    def _end_one(self) -> None:
        with self._lock:
            self._ended += 1
            is_last = self._ended == len(self._fits)
        if is_last:
            self._close()
