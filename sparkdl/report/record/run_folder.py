"""The folder in which a run leaves its record, and a reader of such folders.

While the run goes on, its events lie there in numbered files of JSON lines, so any storage will do,
also one that cannot append. At its end ``run.json`` and ``report.html`` take their place.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from sparkdl.errors import StorageError
from sparkdl.report.record.run_record import Event, RecordBuilder, RunRecord, outline
from sparkdl.runtime.json_values import finite
from sparkdl.storage.hadoop_storage import open_place
from sparkdl.storage.storage import Folder, Storage

logger = logging.getLogger(__name__)

EVENTS, RECORD, PAGE = "events", "run.json", "report.html"

_MAX_BYTES = 1 << 24
"""The largest file that is taken for one of a run: JSON takes many times its size in memory."""
_MAX_EVENT_BYTES = 1 << 26
"""Most bytes of all events of a run that goes on."""
_ODD = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors that come of values that are JSON, but not those of a run."""
_MOST_WHOLE = 8
"""Records of runs that have ended, which a reader keeps whole: pages are asked for again."""
_LONGEST_NAME = 100
"""Characters of a run's name in that of its folder."""
_NAME = re.compile(r"[0-9]{8}-[0-9]{6}-[A-Za-z0-9_]+-[0-9a-f]+")


def folder_name(name: str, run_id: str, started: float) -> str:
    """A run's folder: when it began (UTC), what it was, or what the user calls it, which."""
    moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime(started))
    return f"{moment}-{re.sub('[^A-Za-z0-9_]', '_', name)[:_LONGEST_NAME]}-{run_id[:8]}"


class RunFolder:
    """A run's folder, to write to."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage = storage
        self.folder = folder
        self._num_parts = 0

    @property
    def page_path(self) -> str:
        """The path at which `finish` leaves the page."""
        return f"{str(self._storage).rstrip('/')}/{self.folder}/{PAGE}"

    def append(self, events: Iterable[Event]) -> None:
        """Write down what has happened since the last call."""
        lines = [json.dumps(finite(dict(event)), default=str) + "\n" for event in events]
        self._num_parts += 1
        path = f"{self.folder}/{EVENTS}/{self._num_parts:06d}.jsonl"
        self._storage.write(path, "".join(lines).encode())

    def finish(self, record: RunRecord, page: str) -> None:
        """Leave the record and its page; the events, which say no more, are removed."""
        self._storage.write(f"{self.folder}/{PAGE}", page.encode("utf-8", "replace"))
        data = json.dumps(finite(record.to_dict()), default=str)
        self._storage.write(f"{self.folder}/{RECORD}", data.encode())
        self._storage.remove(f"{self.folder}/{EVENTS}")


def read_runs(directory: str | os.PathLike[str], name: str = "*") -> dict[str, RunRecord]:
    """The runs that have left a record in a directory, also those that go on.

    Args:
        directory: path or URL, as ``reportDir`` had it.
        name: of the runs that are wanted, as ``runName`` had it; ``*`` stands for any text.

    Returns:
        The records by the names of their folders, the newest first. Those that cannot be read are
        left out, with a warning.

    Raises:
        StorageError: the directory cannot be read.
    """
    reader, found = RunReader(open_place(directory)), {}
    for folder in reader.names():
        try:
            record = reader.read(folder)
        except StorageError as error:
            logger.warning("%s", error)
            continue
        if record is not None and fnmatchcase(record.run_name, name):
            found[folder] = record
    return found


class RunReader:
    """Reads the records of all runs in a storage.

    Of a run that has ended it keeps what the list shows, and the whole only of the last few.
    """

    def __init__(self, storage: Folder) -> None:
        self._storage = storage
        self._outlines: dict[str, RunRecord] = {}
        self._ended: dict[str, RunRecord] = {}
        self._growing: dict[str, _Growing] = {}

    def names(self) -> list[str]:
        """Folders of runs, the newest first."""
        return sorted(filter(_NAME.fullmatch, self._storage.list("")), reverse=True)

    def outline(self, name: str) -> RunRecord | None:
        """What `read` gives; of a run that has ended perhaps without what only its page shows."""
        return self._outlines.get(name) or self.read(name)

    def read(self, name: str) -> RunRecord | None:
        """The record of the run in folder ``name``; None if there is none; raises StorageError."""
        if name in self._ended:
            return self._ended[name]
        if name not in self.names():
            return None
        if RECORD in self._storage.list(name):
            path = f"{name}/{RECORD}"
            values = self._parsed(path, self._content(path))
            try:
                record = RunRecord.from_dict(values)
            except StorageError as error:
                raise self._damaged(path, str(error)) from error
            self._growing.pop(name, None)
            self._outlines[name] = outline(record)
            self._ended[name] = record
            if len(self._ended) > _MOST_WHOLE:
                del self._ended[next(iter(self._ended))]
            return record
        return self._so_far(name)

    def _content(self, path: str, most: int = _MAX_BYTES) -> bytes:
        size = self._storage.size(path)
        if size > most:
            raise self._damaged(path, f"it has {size:,} bytes, too many for a run's record")
        return self._storage.read(path)

    def _parsed(self, path: str, text: bytes) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._damaged(path, f"it is no JSON: {error}") from error

    def _damaged(self, path: str, cause: str) -> StorageError:
        folder = path.partition("/")[0]
        remedy = f"remove the folder {folder} if nobody needs it"
        return StorageError(f"cannot read {path} in {self._storage}: {cause}; {remedy}")

    def _so_far(self, name: str) -> RunRecord | None:
        run = self._growing.setdefault(name, _Growing())
        if run.damage is not None:
            raise run.damage
        path = f"{name}/{EVENTS}"
        try:
            for part in self._storage.list(path)[run.num_parts :]:
                path = f"{name}/{EVENTS}/{part}"
                data = self._content(path, min(_MAX_BYTES, _MAX_EVENT_BYTES - run.num_bytes))
                if not data.endswith(b"\n"):  # it is still being written
                    break
                run.num_bytes += len(data)
                run.take([self._parsed(path, line) for line in data.splitlines()])
            return run.record()
        except StorageError:
            if RECORD in self._storage.list(name):  # it has ended meanwhile
                return self.read(name)
            raise
        except _ODD as error:
            # Some of the events are in the builder already, so they are not taken again.
            cause = f"it has no events of a run: {type(error).__name__}: {error}"
            run.damage = self._damaged(path, cause)
            raise run.damage from error
        finally:
            run.is_new = False


@dataclass(kw_only=True)
class _Growing:
    """A run that goes on, as far as it was read."""

    builder: RecordBuilder = field(default_factory=RecordBuilder)
    num_parts: int = 0
    num_bytes: int = 0
    is_new: bool = True
    """True if it is read for the first time; it may have ended long ago then."""
    first_read: float = field(default_factory=time.monotonic)
    damage: StorageError | None = None
    """Why nobody can make sense of it."""
    last_part: float | None = None
    """Time when a part was last new, by our own clock; None as long as none was."""

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            self.builder.take(event)
        self.num_parts += 1
        if not self.is_new:
            self.last_part = time.monotonic()

    def record(self) -> RunRecord | None:
        """Return what is known so far; None before the first event."""
        record = self.builder.record()
        if not record.run_id:
            return None
        is_lost = self.silence(record.heard) > record.silence_seconds
        return replace(record, status="lost") if is_lost else record

    def silence(self, alive_at: float) -> float:
        """Seconds since its driver last wrote, at ``alive_at`` by a clock that may differ."""
        now = time.monotonic()
        if self.last_part is not None:
            return now - self.last_part
        return max(time.time() - alive_at, now - self.first_read)
