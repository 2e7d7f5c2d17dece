"""A storage whose requests are tried again, since one that failed may succeed a second later.

Only what can be repeated: a file that comes in pieces is gone once they are read, so whoever makes
the pieces makes them again (`again`).
"""

from __future__ import annotations

import builtins
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from sparkdl.errors import CommunicationError, StorageError
from sparkdl.storage.storage import Data, Storage, is_definite

logger = logging.getLogger(__name__)

T = TypeVar("T")

PAUSES_SECONDS = (0.2, 1.0, 4.0)
"""Before the second, third and fourth try."""
OUTAGE_SECONDS = (0.2, 5.0, 10.0, 20.0)
"""The same where a failure costs a restart: longer than a network is mostly away."""


def again(action: Callable[[], T], pauses: Sequence[float] = PAUSES_SECONDS) -> T:
    """Do what may be repeated until it succeeds, once more than there are pauses.

    StorageError if it has failed each time, or would do so (see `is_definite`); CommunicationError
    if each time the way to the storage was lost.
    """
    for pause in pauses:
        try:
            return action()
        except (StorageError, CommunicationError) as error:
            if is_definite(error):
                raise
            logger.info("%s; trying again in %g s", error, pause)
        time.sleep(pause)
    return action()


class Retried:
    """A storage that tries again what failed and may be repeated.

    Args:
        storage: where everything lies.
        pauses: seconds before each further try.
    """

    def __init__(self, storage: Storage, pauses: Sequence[float] = PAUSES_SECONDS) -> None:
        self._storage = storage
        self._pauses = pauses

    def __str__(self) -> str:
        return str(self._storage)

    def write(self, path: str, data: Data) -> None:
        if isinstance(data, bytes | bytearray | memoryview):
            again(partial(self._storage.write, path, data), self._pauses)
        else:
            self._storage.write(path, data)

    def read(self, path: str) -> bytes:
        return again(partial(self._storage.read, path), self._pauses)

    def list(self, path: str) -> builtins.list[str]:
        return again(partial(self._storage.list, path), self._pauses)

    def remove(self, path: str) -> None:
        again(partial(self._storage.remove, path), self._pauses)

    def exists(self, path: str) -> bool:
        return again(partial(self._storage.exists, path), self._pauses)
