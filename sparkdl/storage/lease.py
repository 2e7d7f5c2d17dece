"""Notes beside checkpoints that say which runs are alive, so that no run removes another's.

The driver of a run renews its lease, a small file, about once a minute, and removes it at the end.
A run without a lease, or whose lease is old, has ended, and others may remove its checkpoints.
Nothing waits for a lease or is refused for lack of one: what it prevents is only removal. Besides,
a run that misses its own lease knows that the place has lost what it has written there.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sparkdl.errors import GangError, StorageError
from sparkdl.storage.storage import Storage, is_definite

logger = logging.getLogger(__name__)

RENEW_SECONDS = 60.0
STALE_SECONDS = 600.0
"""Age from which on a lease counts no more; larger than clocks of hosts differ."""
_END_SECONDS = 5.0
"""Longest wait for a renewal that is under way at the end."""
_NAME = re.compile(r"lease-(.+)\.json")


@dataclass(frozen=True, kw_only=True)
class Note:
    """The content of a lease."""

    run_id: str
    host: str
    process: str
    """The driver's, see `process_identity`; empty if that is unknown here."""
    attempt: int
    """The newest of the run. Earlier ones, which may still write, must remove nothing any more."""
    begun_from: str | None
    """The checkpoint that this attempt began from, which others leave alone."""
    renewed: float
    """Time of the last renewal by the driver's clock, in seconds since 1970."""

    def is_alive(self) -> bool:
        """True unless the lease is old, or its process is one of this host's and has ended.

        Nor is one of a time that no clock of a host can have now.
        """
        return abs(self.seconds_since_renewal()) < STALE_SECONDS and not _has_ended(self.process)

    def seconds_since_renewal(self) -> float:
        """Negative if the other host's clock is ahead."""
        return time.time() - self.renewed


class Lease:
    """A run's lease. The driver holds it, as a context manager, while the run trains.

    It lies beside the checkpoints of ``run_id``, in the folder ``run_key``. That it cannot be
    written or removed is logged, and ends nothing.
    """

    def __init__(
        self, storage: Storage, run_key: str, run_id: str, *, renew_seconds: float = RENEW_SECONDS
    ) -> None:
        self._storage = storage
        self._path = f"{run_key}/{lease_name(run_id)}"
        self._renew_seconds = renew_seconds
        self._note = Note(
            run_id=run_id,
            host=socket.gethostname(),
            process=process_identity(os.getpid()) or "",
            attempt=0,
            begun_from=None,
            renewed=0.0,
        )
        self._is_written = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="sparkdl-lease", daemon=True)

    def __enter__(self) -> Lease:
        self._renew()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            logger.warning("%s does not answer; %s is left there", self._storage, self._path)
            return
        try:
            self._storage.remove(self._path)
        except (StorageError, GangError) as error:
            logger.warning("the lease of this run is left: %s", error)

    def begin(self, attempt: int, begun_from: str | None) -> None:
        """Say which attempt writes from now on, and what it goes on from."""
        with self._lock:
            self._note = replace(self._note, attempt=attempt, begun_from=begun_from)
        self._renew()

    def require_place(self) -> None:
        """Make sure that the place still has what this run has written to it.

        StorageError if not, as where its file system is no longer mounted; this may pass.
        """
        if self._is_written and not self._storage.exists(self._path):
            raise StorageError(
                f"{self._storage} has lost {self._path}, which this run has written there, and "
                "with it perhaps the checkpoints: the folder was removed, or is not mounted any "
                "more; bring it back"
            ) from OSError(errno.ESTALE, "vanished")

    def _keep(self) -> None:
        while not self._ended.wait(self._renew_seconds):
            self._renew()

    def _renew(self) -> None:
        with self._lock:
            note = replace(self._note, renewed=time.time())
            try:
                self.require_place()  # a lease in a folder made anew would say that nothing is lost
                self._storage.write(self._path, json.dumps(asdict(note)).encode())
                self._is_written = True
            except (StorageError, GangError) as error:
                logger.warning("the lease of this run could not be renewed: %s", error)


def lease_name(run_id: str) -> str:
    """Name of a run's lease in the folder of its run key."""
    return f"lease-{run_id}.json"


def read_leases(storage: Storage, run_key: str, names: Iterable[str]) -> dict[str, Note]:
    """The leases in the folder of a run key, given the names in it, by run.

    One that is just being written says nothing, and counts as renewed now. StorageError if the
    storage failed, in a way that may pass.
    """
    found = {}
    for match in filter(None, map(_NAME.fullmatch, names)):
        run_id = match[1]
        try:
            found[run_id] = _parsed(storage.read(f"{run_key}/{match[0]}"))
        except StorageError as error:
            if not is_definite(error):
                raise  # else the run has ended meanwhile
        except (ValueError, TypeError, RecursionError, OverflowError):
            found[run_id] = Note(
                run_id=run_id, host="?", process="", attempt=0, begun_from=None,
                renewed=time.time(),
            )  # fmt: skip
    return found


def _parsed(data: bytes) -> Note:
    """Parse a lease; the errors that `read_leases` knows if the file is damaged."""
    note = Note(**json.loads(data))
    texts = (note.run_id, note.host, note.process, note.begun_from or "")
    if not all(type(text) is str for text in texts) or type(note.attempt) is not int:
        raise TypeError(f"values of wrong types: {note}")
    note.is_alive()  # raises where the time or the process is malformed
    return note


def process_identity(pid: int) -> str | None:
    """Return a process's identity: no other of this host has it, nor a later one of its number.

    None if there is no such process, or where the system does not say (outside Linux).
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *_, started = text.rpartition(")")[2].split()[:20]
        return None if state in "ZX" else f"{_place()}/{pid}/{started}"
    except OSError:
        return None


def _place() -> str:
    """This host, and its numbers of processes, of which containers have their own; or OSError."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def _has_ended(process: str) -> bool:
    """True if it was one of this host's, and is no more."""
    place, _, rest = process.rpartition("/")
    place, _, pid = place.rpartition("/")
    try:
        is_here = bool(rest) and place == _place()
    except OSError:
        return False
    return is_here and process_identity(int(pid)) != process
