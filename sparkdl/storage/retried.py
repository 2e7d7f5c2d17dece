"""A storage whose requests are tried again, since one that failed may succeed a second later.

Only what can be repeated: a file that comes in pieces is gone once they are read, so whoever makes
the pieces makes them again (`again`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from sparkdl.errors import CommunicationError, StorageError
from sparkdl.storage.mounted import Forwarding
from sparkdl.storage.storage import Storage, is_definite

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


class Retried(Forwarding):
    """A storage that tries again what failed and may be repeated, after ``pauses`` in seconds."""

    def __init__(self, base: Storage, pauses: Sequence[float] = PAUSES_SECONDS) -> None:
        super().__init__(base)
        self._pauses = pauses

    def _ask(self, method: str, path: str, *arguments: Any) -> Any:
        ask = partial(super()._ask, method, path, *arguments)
        if all(isinstance(one, bytes | bytearray | memoryview) for one in arguments):
            return again(ask, self._pauses)
        return ask()
