"""The writer of a gang's checkpoints, which lets training go on while it writes.

`save` copies the state on the training thread; a background thread writes it. Where memory is for
the model alone, it is not copied, and `save` waits for the thread. The ranks write their own files
and tell rank 0, through the run's key-value store, how large they are and what their checksums are;
rank 0 writes the manifest when it has heard from all, so a checkpoint is visible only when it is
whole.

Training outlives checkpoints that fail: it warns, and tries again at the next one.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

from sparkdl.config import CheckpointConfig
from sparkdl.errors import CommunicationError, GangError, StorageError
from sparkdl.storage import checkpoint_format as layout
from sparkdl.storage.checkpoint_format import CheckpointInfo, FileRecord, StepFolder, Writer
from sparkdl.storage.pruning import prune, remove
from sparkdl.storage.retried import PAUSES_SECONDS, again
from sparkdl.storage.storage import Storage, is_full
from sparkdl.storage.tensor_tree import Snapshot, snapshot

logger = logging.getLogger(__name__)

MAX_FAILURES = 5
"""Checkpoints that may fail in a row; with as many a place for checkpoints has become useless."""
_POLL_SECONDS = 2.0
"""Longest single wait for the peers, so that an abandoned save ends soon."""
_VANISHED = b'{"error": "its key vanished", "is_lost": true}'


class KeyValue(Protocol):
    """Keys shared by all ranks of one attempt."""

    def set(self, key: str, value: bytes) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes | None:
        """The value of a key, or None."""

    def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        """Return when all keys are set; TimeoutError if they are not in time."""

    def delete(self, key: str) -> bool:
        """Remove a key. Returns whether it was there."""


@dataclass(kw_only=True)
class _Save:
    """One checkpoint on its way to the storage."""

    folder: StepFolder
    world_size: int
    """Ranks that write a file."""
    abandoned: threading.Event = field(default_factory=threading.Event)
    """Set when the training thread no longer wants it."""
    failure: Exception | None = None
    thread: threading.Thread


class CheckpointManager:
    """Writes the checkpoints of one rank in one attempt. Every rank makes one.

    All ranks call `save` and `final` at the same steps. One save is under way at a time: the
    next one first waits for it, so storage that is slower than the interval slows training
    down rather than filling memory. ``stall_seconds`` is the time the training thread has
    spent in `save` so far: those waits and the copying of the state.

    A save that fails, or does not end in time, is a warning; `MAX_FAILURES` of them in a row are an
    error. The folder that it leaves is no checkpoint, and a later save removes it.

    Args:
        storage: the same place for all ranks.
        config: interval and number of checkpoints kept.
        writer: the attempt; it names the folder, and is equal on all ranks.
        rank: this rank.
        world_size: number of ranks.
        environment: versions, CPU type and threads, written into the manifest.
        signal: keys shared by the ranks of this attempt only.
        timeout_seconds: longest wait for a save under way, and for the other ranks' files.
        copies: False if training shall wait for each save rather than have memory for a copy of
            what it changes meanwhile.
        is_required: False if training shall go on without checkpoints, however many fail for
            want of space or the like; the loss of the way to them still ends it.
        on_written: is told on rank 0 the step of each checkpoint that is whole.
        pauses: seconds before each further try to write a file that goes in pieces; with the rest
            the storage is as patient as it is.
    """

    def __init__(
        self,
        storage: Storage,
        config: CheckpointConfig,
        *,
        writer: Writer,
        rank: int,
        world_size: int,
        environment: Mapping[str, str],
        signal: KeyValue,
        timeout_seconds: float = 600.0,
        copies: bool = True,
        is_required: bool = True,
        on_written: Callable[[int], None] = lambda _: None,
        pauses: Sequence[float] = PAUSES_SECONDS,
    ) -> None:
        self.stall_seconds = 0.0
        self._storage = storage
        self._config = config
        self._origin = writer
        self._rank = rank
        self._world_size = world_size
        self._environment = dict(environment)
        self._signal = signal
        self._timeout = timeout_seconds
        self._copies = copies
        self._is_required = is_required
        self._on_written = on_written
        self._pauses = pauses
        self._under_way: _Save | None = None
        self._num_failures = 0
        """In a row."""
        self._previous: tuple[str, int] | None = None
        """Name and ranks of the save before, whose keys rank 0 removes."""
        self._shared: Snapshot | None = None
        self._own: Snapshot | None = None

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End what was begun; after a failure abandon it."""
        self.close(abort=kind is not None)

    def due(self, step: int) -> bool:
        """Return True if a checkpoint is to be written after ``step`` steps."""
        return self._config.interval != -1 and step > 0 and step % self._config.interval == 0

    def save(
        self, step: int, shared: Any, rank_state: Any, *, world_size: int | None = None
    ) -> None:
        """Start a checkpoint after ``step`` steps. Collective.

        Returns when the state is copied, or without copies written.

        Of ``shared``, which is equal on all ranks, only rank 0's is read. Only the first
        ``world_size`` ranks take part, which all must say; None: all. StorageError or, where
        the way to the storage was lost, CommunicationError, if the last `MAX_FAILURES` saves
        failed, on this or another rank, or did not end in time; CheckpointError if the state holds
        something that cannot be stored.
        """
        began = time.perf_counter()
        try:
            self._settle()
            self._start(step, shared, rank_state, world_size, is_final=False)
            if not self._copies:
                self._settle()
        finally:
            self.stall_seconds += time.perf_counter() - began

    def final(self, step: int, shared: Any, rank_state: Any) -> None:
        """Write the last checkpoint of the run, marked as its end. Collective; waits for it.

        Rank 0 returns when the checkpoint is whole, the others when their files are written. If it
        fails, that is a warning only: the training is done.
        """
        self._conclude()
        try:
            self._start(step, shared, rank_state, is_final=True)
        except (StorageError, GangError) as error:
            logger.warning("the last checkpoint is missing: %s", error)
        self._conclude()

    def close(self, abort: bool = False) -> None:
        """Wait for the save under way; with ``abort`` abandon it without waiting."""
        if not abort:
            self._conclude()
        elif self._under_way is not None:
            self._under_way.abandoned.set()

    def _conclude(self) -> None:
        """Wait for the save under way; that it failed was logged, and is no error any more."""
        try:
            self._settle()
        except (StorageError, GangError) as error:
            logger.debug("not raised, since training is over: %s", error)

    def _start(
        self,
        step: int,
        shared: Any,
        rank_state: Any,
        world_size: int | None = None,
        *,
        is_final: bool,
    ) -> None:
        """Copy the state where it is to be copied, and begin to write it."""
        folder = StepFolder(writer=self._origin, step=step, is_final=is_final)
        if self._under_way is not None:  # it hangs, and its buffers must not change
            self._pass_over(folder, self._under_way)
            return
        copies = self._copies and not is_final  # nothing is trained after that
        if self._rank == 0:
            self._shared = snapshot(shared, self._shared, copies=copies)
        self._own = snapshot(rank_state, self._own, copies=copies)
        thread = threading.Thread(
            target=lambda: self._write_quietly(save),
            name=f"write-{folder.name}",
            daemon=True,  # a storage that hangs must not keep the process alive
        )
        self._under_way = save = _Save(
            folder=folder, world_size=world_size or self._world_size, thread=thread
        )
        thread.start()

    def _settle(self) -> None:
        """Wait for the save under way, and count it as a success or as a failure."""
        save = self._under_way
        if save is None:
            return
        if save.abandoned.is_set():  # its failure has been counted
            if not save.thread.is_alive():
                self._under_way = None
            return
        save.thread.join(self._timeout)
        if save.thread.is_alive():
            save.abandoned.set()
            self._count(
                save.folder,
                StorageError(
                    f"writing it to {self._storage} took more than {self._timeout:g} s; raise "
                    "checkpointInterval or choose faster storage"
                ),
            )
            return
        self._under_way = None
        if save.failure is None:
            self._num_failures = 0
        else:
            self._count(save.folder, save.failure)

    def _pass_over(self, folder: StepFolder, hung: _Save) -> None:
        """Do without a checkpoint, since an earlier one is still being written."""
        error = StorageError(f"{hung.folder.name} is still being written to {self._storage}")
        if self._rank != 0:
            try:
                self._tell(folder.name, {"error": str(error), "is_lost": False})
            except GangError as lost:
                logger.debug("rank 0 will wait in vain: %s", lost)
        self._count(folder, error)

    def _count(self, folder: StepFolder, error: Exception) -> None:
        """Log a failure, and raise if it is one too many."""
        self._num_failures += 1
        level = logging.WARNING if self._rank == 0 else logging.DEBUG
        logger.log(level, "there is no checkpoint %s: %s", folder.path, _shown(error))
        is_lost = isinstance(error, GangError)
        if self._num_failures < MAX_FAILURES or not (self._is_required or is_lost):
            return
        if is_lost:
            raise error
        raise StorageError(
            f"{self._num_failures} checkpoints in a row could not be written to {self._storage}; "
            f"the last one: {_shown(error)}"
        ) from error

    def _write_quietly(self, save: _Save) -> None:
        """The background thread: what goes wrong is kept for the training thread."""
        try:
            self._write(save)
        except _Abandoned:
            logger.debug("abandoned checkpoint %s", save.folder.name)
        except Exception as error:
            save.failure = error
            if self._rank == 0 and is_full(error):  # what is left would take the next one's space
                try:
                    remove(self._storage, save.folder)
                except (StorageError, GangError) as other:
                    logger.debug("%s is left: %s", save.folder.path, other)

    def _write(self, save: _Save) -> None:
        began = time.perf_counter()
        path = save.folder.path
        own_name = layout.rank_file(self._rank)
        assert self._own is not None
        if self._rank != 0:
            self._write_and_tell(save, f"{path}/{own_name}", self._own)
            return
        assert self._shared is not None
        self._forget_previous(save)
        files = {
            own_name: self._write_file(save, f"{path}/{own_name}", self._own),
            layout.SHARED: self._write_file(save, f"{path}/{layout.SHARED}", self._shared),
            **self._others(save),
        }
        info = CheckpointInfo(
            storage=self._storage,
            path=path,
            step=save.folder.step,
            world_size=save.world_size,
            run_key=self._origin.run_key,
            complete=save.folder.is_final,
            environment=self._environment,
            files=files,
        )
        if save.abandoned.is_set():
            raise _Abandoned
        layout.write_manifest(info)
        self._on_written(save.folder.step)
        size = sum(record.size_bytes for record in files.values())
        seconds = time.perf_counter() - began
        logger.debug("checkpoint %s: %.1f MB in %.2f s", path, size / 1e6, seconds)
        try:
            prune(self._storage, save.folder, self._config.keep)
        except (StorageError, GangError) as error:
            logger.warning("older checkpoints could not be removed: %s", error)

    def _write_and_tell(self, save: _Save, path: str, state: Snapshot) -> None:
        """Write this rank's file, and tell rank 0, which need not wait for its time-out."""
        try:
            record = self._write_file(save, path, state)
        except Exception as error:
            told = {"error": _shown(error), "is_lost": isinstance(error, GangError)}
            self._tell(save.folder.name, told)
            raise
        self._tell(save.folder.name, asdict(record))

    def _write_file(self, save: _Save, path: str, state: Snapshot) -> FileRecord:
        def write() -> FileRecord:
            pieces = _until(save.abandoned, layout.encode(state))
            record = layout.write_file(self._storage, path, pieces)
            if save.abandoned.is_set():  # what was written last may have changed meanwhile
                raise _Abandoned
            return record

        return again(write, self._pauses)

    def _tell(self, name: str, record: Mapping[str, Any]) -> None:
        value = json.dumps(record).encode()  # if it got lost, rank 0 would wait for its time-out
        again(partial(self._signal.set, _key(name, self._rank), value), self._pauses)

    def _forget_previous(self, save: _Save) -> None:
        """Remove the keys of the save before, or they would grow in number without end."""
        if self._previous is not None:
            name, world_size = self._previous
            for rank in range(1, world_size):
                again(partial(self._signal.delete, _key(name, rank)), self._pauses)
        self._previous = save.folder.name, save.world_size

    def _others(self, save: _Save) -> dict[str, FileRecord]:
        """Return the records of the files that the other ranks wrote, by file name."""
        keys = {rank: _key(save.folder.name, rank) for rank in range(1, save.world_size)}
        self._wait(save, list(keys.values()))
        files = {}
        for rank, key in keys.items():
            record = json.loads(again(partial(self._signal.get, key), self._pauses) or _VANISHED)
            if "error" in record:
                kind = CommunicationError if record["is_lost"] else StorageError
                raise kind(f"rank {rank} could not write {save.folder.name}: {record['error']}")
            files[layout.rank_file(rank)] = FileRecord(**record)
        return files

    def _wait(self, save: _Save, keys: list[str]) -> None:
        deadline = time.monotonic() + self._timeout
        while not save.abandoned.is_set():
            left = deadline - time.monotonic()
            try:
                seconds = max(0.0, min(_POLL_SECONDS, left))
                again(partial(self._signal.wait, keys, seconds), self._pauses)
            except TimeoutError as error:
                if left <= 0:
                    raise StorageError(
                        f"not all {self._world_size} ranks had written {save.folder.name} to "
                        f"{self._storage} after {self._timeout:g} s; the checkpoint was given up"
                    ) from error
            else:
                return
        raise _Abandoned


class _Abandoned(BaseException):
    """The training thread no longer wants this save. No storage takes it for an error."""


def _until(
    stop: threading.Event, chunks: Iterator[bytes | memoryview]
) -> Iterator[bytes | memoryview]:
    for chunk in chunks:
        if stop.is_set():
            raise _Abandoned
        yield chunk


def _key(name: str, rank: int) -> str:
    return f"checkpoint/{name}/{rank}"


def _shown(error: Exception) -> str:
    return str(error) if isinstance(error, StorageError | GangError) else repr(error)
