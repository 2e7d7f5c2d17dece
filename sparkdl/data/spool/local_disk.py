"""The choice of a local disk for a spool, and the errors of a full one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sparkdl.errors import StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_PIECE_BYTES = 8 << 20


class DiskFull(StorageError):
    """A spool does not fit on its disk. Its writer does not know how much was still to come."""


def local_dirs() -> list[str]:
    """Spark's local directories of the executor that runs this task."""
    return [name for name in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if name]


def run_folder(run_id: str) -> str:
    """Name of the folder of one run's spools, in every local directory."""
    return f"sparkdl-{run_id}"


@contextlib.contextmanager
def disk_errors(directory: Path, what: str = "the spool") -> Iterator[None]:
    """Raise errors of the operating system as ours.

    Raises:
        DiskFull: no space is left.
        StorageError: the disk cannot be written for another reason.
    """
    try:
        yield
    except OSError as error:
        raise disk_error(error, "write", directory, what) from error


def disk_error(error: OSError, doing: str, path: Path, what: str = "the spool") -> StorageError:
    """An error of the operating system as one of ours; see `disk_errors`.

    Args:
        error: what has happened.
        doing: to ``write`` or ``read``.
        path: the spool, or one of its files.
        what: that is, if it is none of a spool.
    """
    kind = DiskFull if error.errno in _FULL else StorageError
    remedy = ""
    if error.errno == errno.EMFILE:
        remedy = (
            "; each column is a file of its own: put columns together into arrays "
            "(VectorAssembler), or raise the limit of open files on the executors (ulimit -n)"
        )
    return kind(f"cannot {doing} {what} {path}: {error}{remedy}")


def full_disk(
    place: Path, shard_id: int, *, needed: int, free: int, is_kept: bool = False
) -> StorageError:
    """The error for a full disk.

    Args:
        place: the local directory of Spark's.
        shard_id: the shard that did not fit.
        needed: bytes that it takes, as far as its rows tell.
        free: bytes that were free before it was begun.
        is_kept: whether the directory is the fit's ``cacheDir``.
    """
    remedy = "free space there, name a larger disk as cacheDir, or leave it unset"
    return StorageError(
        f"the disk of {place} is full: the spool of shard {shard_id} takes about {_mib(needed)} "
        f"MiB, and {_mib(free)} MiB were free there for this and the other shards of the host "
        f"when it was begun; {remedy if is_kept else DISK_REMEDY}"
    )


DISK_REMEDY = (
    "free space there, give Spark larger local directories (spark.local.dir, or SPARK_LOCAL_DIRS "
    "or yarn.nodemanager.local-dirs where the cluster sets them), or spread the rows over more "
    "hosts"
)
"""Remedy for a full local disk."""


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"


def free_bytes(directory: Path) -> int:
    """Free space on the disk of ``directory``.

    Raises:
        StorageError: there is no such directory.
    """
    with disk_errors(directory):
        return shutil.disk_usage(directory).free


def roomiest(directories: Sequence[str]) -> Path:
    """The directory with the most free space.

    Raises:
        StorageError: none of them exists.
    """
    free = {}
    for name in directories:
        with contextlib.suppress(OSError):
            free[name] = shutil.disk_usage(name).free
    if not free:
        raise StorageError(f"none of Spark's local directories exists: {list(directories)}")
    return Path(max(free, key=lambda name: free[name]))


class ScratchFile:
    """A file without a name on the roomiest local disk; it is gone when it is closed.

    Raises, from its making and from `write`:
        DiskFull: no space is left.
        StorageError: there is no such disk, or it cannot be written.
    """

    def __init__(self) -> None:
        self._root = roomiest(local_dirs() or [tempfile.gettempdir()])
        with disk_errors(self._root, "a file of weights in"):
            self.file = tempfile.TemporaryFile(dir=self._root)  # noqa: SIM115 # see close

    def write(self, pieces: Iterable[Any]) -> None:
        """Have these bytes in it, in place of what it has."""
        self.file.seek(0)
        self.file.truncate()
        for piece in pieces:
            with disk_errors(self._root, "a file of weights in"):
                self.file.write(piece)

    def pieces(self) -> Iterator[bytes]:
        """Yield the file's contents."""
        self.file.seek(0)
        while piece := self.file.read(_PIECE_BYTES):
            yield piece

    def close(self) -> None:
        """Give the disk's space back."""
        self.file.close()


def make_private(directory: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone."""
    for folder in reversed(directory.parents):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
    directory.mkdir(mode=0o700)


def open_private(path: str, flags: int) -> int:
    """Open a file that this user alone may read and write, whatever the umask allows."""
    descriptor = os.open(path, flags, 0o600)
    lock(descriptor)
    return descriptor


def lock(descriptor: int) -> None:
    """Say that a file is in use until it is closed, so that nobody removes it as an old one."""
    with contextlib.suppress(OSError):  # being removed, or a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def remove_spool(directory: Path) -> bool:
    """Delete a spool if it is there. Returns whether it was, and is not any more."""
    if not directory.is_dir():
        return False
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):  # the run's folder goes with its last shard
        os.rmdir(directory.parent)  # noqa: PTH106 - must fail when not empty
    return not directory.exists()
