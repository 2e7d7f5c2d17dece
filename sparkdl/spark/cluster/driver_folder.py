"""The driver's temporary folder of a run: weights on their way, and checkpoints that it keeps.

It lies where Python puts temporary files, which in a container is often memory, or small. So a run
says beforehand what it needs; and where the folder is full, checkpoints make room for what is new.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import shutil
import tempfile
import threading
from collections.abc import Iterator

from sparkdl.errors import StorageError
from sparkdl.spark.session.termination import removed_at_termination
from sparkdl.storage.checkpoint_format import MANIFEST, folders, run_keys
from sparkdl.storage.pruning import remove
from sparkdl.storage.storage import Data, Storage, is_full, open_storage

logger = logging.getLogger(__name__)

_REMEDY = "set checkpointDir, or TMPDIR to a folder with more space"


@contextlib.contextmanager
def driver_folder() -> Iterator[DriverFolder]:
    """A new one, which is removed in the end, also by SIGTERM and SIGHUP."""
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as path, removed_at_termination(path):
        yield DriverFolder(open_storage(path))


class DriverFolder:
    """A storage that gives up all but the newest whole checkpoint when it is full.

    Args:
        storage: the folder, on local disk.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._has_warned = False

    def __str__(self) -> str:
        return str(self._storage)

    def check_space(
        self, *, weights_bytes: int, checkpoint_bytes: int, num_checkpoints: int
    ) -> None:
        """Warn if a run will not find the space that it needs.

        Args:
            weights_bytes: of the model, which is here at the beginning and at the end.
            checkpoint_bytes: of one checkpoint, as far as it can be told.
            num_checkpoints: how many of them there are at a time, one of them being written.
        """
        needed = 2 * weights_bytes + num_checkpoints * checkpoint_bytes
        free = shutil.disk_usage(str(self)).free
        if free < needed:
            logger.warning(
                "the driver's temporary folder %s has %s free; this run needs about %s there: "
                "%d checkpoint(s) of about %s, and the weights twice. It keeps fewer if the "
                "folder is full; %s",
                self,
                _mib(free),
                _mib(needed),
                num_checkpoints,
                _mib(checkpoint_bytes),
                _REMEDY,
            )

    def write(self, path: str, data: Data) -> None:
        for is_last_try in (False, True):
            try:
                return self._storage.write(path, data)
            except StorageError as error:
                if not is_full(error):
                    raise
                has_room = not is_last_try and self._made_room(path)
                # Pieces are gone; who has sent them sends them again.
                if not has_room or not isinstance(data, bytes | bytearray | memoryview):
                    raise StorageError(f"{error}; {_REMEDY}") from error.__cause__

    def read(self, path: str) -> bytes:
        return self._storage.read(path)

    def list(self, path: str) -> builtins.list[str]:
        return self._storage.list(path)

    def remove(self, path: str) -> None:
        self._storage.remove(path)

    def exists(self, path: str) -> bool:
        return self._storage.exists(path)

    def _made_room(self, path: str) -> bool:
        """Remove checkpoints, but the newest whole one and the one that is being written."""
        with self._lock:
            gone = 0
            for key in run_keys(self._storage):
                steps = folders(self._storage, key)
                whole = [s for s in steps if self._storage.exists(f"{s.path}/{MANIFEST}")]
                written = [s for s in steps if path.startswith(f"{s.path}/")] or steps[-1:]
                for step in steps:
                    if step not in whole[-1:] + written:
                        remove(self._storage, step)
                        gone += 1
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "the driver's temporary folder %s is full, so it keeps one checkpoint only; %s",
                    self,
                    _REMEDY,
                )
            return gone > 0


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
