"""The writer of a gang's checkpoints, which lets training go on while it writes.

`save` copies the state on the training thread; a background thread writes it. The ranks write
their own files and tell rank 0, through the run's key-value store, how large they are and what
their checksums are; rank 0 writes the manifest when it has heard from all, so a checkpoint is
visible only when it is whole.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from sparkdl.config import CheckpointConfig
from sparkdl.errors import CommunicationError, GangError, StorageError
from sparkdl.storage import checkpoint_format as layout
from sparkdl.storage.checkpoint_format import CheckpointInfo, FileRecord
from sparkdl.storage.storage import Storage
from sparkdl.storage.tensor_tree import Snapshot, snapshot

logger = logging.getLogger(__name__)

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


class CheckpointManager:
    """Writes the checkpoints of one rank in one attempt. Every rank makes one.

    All ranks call `save` and `final` at the same steps. One save is under way at a time: the
    next one first waits for it, so storage that is slower than the interval slows training
    down rather than filling memory. ``stall_seconds`` is the time the training thread has
    spent in `save` so far: those waits and the copying of the state.

    Args:
        storage: the same place for all ranks.
        config: interval and number of checkpoints kept.
        rank: this rank.
        world_size: number of ranks.
        run_key: names the run's folder; equal on all ranks and over restarts.
        environment: versions, CPU type and threads, written into the manifest.
        signal: keys shared by the ranks of this attempt only.
        timeout_seconds: longest wait for a save under way, and for the other ranks' files.
    """

    def __init__(
        self,
        storage: Storage,
        config: CheckpointConfig,
        *,
        rank: int,
        world_size: int,
        run_key: str,
        environment: Mapping[str, str],
        signal: KeyValue,
        timeout_seconds: float = 600.0,
    ) -> None:
        self.stall_seconds = 0.0
        self._storage = storage
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._run_key = layout.check_run_key(run_key)
        self._environment = dict(environment)
        self._signal = signal
        self._timeout = timeout_seconds
        self._writer: threading.Thread | None = None
        self._abandoned = threading.Event()
        self._failure: Exception | None = None
        self._shared: Snapshot | None = None
        self._own: Snapshot | None = None

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End what was begun; after a failure abandon it."""
        self.close(abort=kind is not None)

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after ``step`` steps."""
        return self._config.interval != -1 and step > 0 and step % self._config.interval == 0

    def save(self, step: int, shared: Any, rank_state: Any) -> None:
        """Start a checkpoint. Collective; returns when the state is copied.

        Args:
            step: optimizer steps taken.
            shared: the state that is equal on all ranks; only rank 0's is read.
            rank_state: what only this rank must remember.

        Raises:
            StorageError: the previous save failed, or did not end in time.
            CommunicationError: the way to the storage was lost, on this or another rank.
            CheckpointError: the state holds something that cannot be stored.
        """
        self._start(step, shared, rank_state, is_final=False)

    def final(self, step: int, shared: Any, rank_state: Any) -> None:
        """Write the last checkpoint of the run, marked as its end. Collective; waits for it.

        Rank 0 returns when the checkpoint is whole, the others when their files are written.

        Raises:
            StorageError: this save or the previous one failed or did not end in time.
        """
        self._start(step, shared, rank_state, is_final=True)
        self._finish()

    def close(self, abort: bool = False) -> None:
        """Wait for the save under way; with ``abort`` abandon it without waiting.

        Raises:
            StorageError: the save failed or did not end in time (never with ``abort``).
        """
        if abort:
            self._abandoned.set()
        else:
            self._finish()

    def _start(self, step: int, shared: Any, rank_state: Any, *, is_final: bool) -> None:
        began = time.perf_counter()
        self._finish()
        if self._rank == 0:
            self._shared = snapshot(shared, self._shared)
        self._own = snapshot(rank_state, self._own)
        name = layout.folder_name(step, is_final=is_final)
        self._writer = threading.Thread(
            target=self._write_quietly, args=(step, name, is_final), name=f"write-{name}"
        )
        self._writer.daemon = True  # a storage that hangs must not keep the process alive
        self._writer.start()
        self.stall_seconds += time.perf_counter() - began

    def _finish(self) -> None:
        """Wait for the save under way, and raise what went wrong in it."""
        if self._writer is not None:
            self._writer.join(self._timeout)
            if self._writer.is_alive():
                raise StorageError(
                    f"writing a checkpoint to {self._storage} took more than {self._timeout:g} s; "
                    f"raise checkpointInterval or choose faster storage"
                )
            self._writer = None
        failure, self._failure = self._failure, None
        if isinstance(failure, GangError | StorageError):
            raise failure
        if failure is not None:
            raise StorageError(
                f"writing a checkpoint to {self._storage} failed: {failure!r}"
            ) from (failure)

    def _write_quietly(self, step: int, name: str, is_final: bool) -> None:
        """The background thread: what goes wrong is kept for the training thread."""
        try:
            self._write(step, name, is_final)
        except _Abandoned:
            logger.debug("abandoned checkpoint %s", name)
        except Exception as error:
            self._failure = error

    def _write(self, step: int, name: str, is_final: bool) -> None:
        began = time.perf_counter()
        path = f"{self._run_key}/{name}"
        own_name = layout.rank_file(self._rank)
        assert self._own is not None
        try:
            own = self._write_file(f"{path}/{own_name}", self._own)
        except Exception as error:
            # Rank 0 need not wait for its time-out.
            self._tell(name, {"error": str(error), "is_lost": isinstance(error, GangError)})
            raise
        self._tell(name, asdict(own))
        if self._rank != 0:
            return
        assert self._shared is not None
        files = {layout.SHARED: self._write_file(f"{path}/{layout.SHARED}", self._shared)}
        files.update(self._others(name))
        info = CheckpointInfo(
            storage=self._storage,
            path=path,
            step=step,
            world_size=self._world_size,
            run_key=self._run_key,
            complete=is_final,
            environment=self._environment,
            files=files,
        )
        layout.write_manifest(info)
        size = sum(record.size_bytes for record in files.values())
        seconds = time.perf_counter() - began
        logger.debug("checkpoint %s: %.1f MB in %.2f s", path, size / 1e6, seconds)
        self._prune(path)

    def _write_file(self, path: str, state: Snapshot) -> FileRecord:
        pieces = _until(self._abandoned, layout.encode(state))
        return layout.write_file(self._storage, path, pieces)

    def _tell(self, name: str, record: Mapping[str, Any]) -> None:
        self._signal.set(_key(name, self._rank), json.dumps(record).encode())

    def _others(self, name: str) -> dict[str, FileRecord]:
        """What all ranks wrote, by file name."""
        keys = {rank: _key(name, rank) for rank in range(self._world_size)}
        self._wait(name, list(keys.values()))
        files = {}
        for rank, key in keys.items():
            record = json.loads(self._signal.get(key) or _VANISHED)
            if "error" in record:
                kind = CommunicationError if record["is_lost"] else StorageError
                raise kind(f"rank {rank} could not write {name}: {record['error']}")
            files[layout.rank_file(rank)] = FileRecord(**record)
        return files

    def _wait(self, name: str, keys: list[str]) -> None:
        deadline = time.monotonic() + self._timeout
        while not self._abandoned.is_set():
            left = deadline - time.monotonic()
            try:
                self._signal.wait(keys, max(0.0, min(_POLL_SECONDS, left)))
            except TimeoutError as error:
                if left <= 0:
                    raise StorageError(
                        f"not all {self._world_size} ranks had written {name} to {self._storage} "
                        f"after {self._timeout:g} s; the checkpoint was given up"
                    ) from error
            else:
                return
        raise _Abandoned

    def _prune(self, newest: str) -> None:
        """Remove all but the newest whole checkpoints, and what older writers left behind."""
        paths = layout.folders(self._storage, self._run_key)
        older = paths[: paths.index(newest)]
        whole = [p for p in older if self._storage.exists(f"{p}/{layout.MANIFEST}")]
        num_kept = self._config.keep - 1  # besides the newest
        kept = set(whole[len(whole) - num_kept :] if num_kept else [])
        for path in older:
            if path not in kept:
                # The manifest goes first: a folder half removed must not look like a checkpoint.
                self._storage.remove(f"{path}/{layout.MANIFEST}")
                self._storage.remove(path)


class _Abandoned(Exception):
    """The training thread no longer wants this save."""


def _until(
    stop: threading.Event, chunks: Iterator[bytes | memoryview]
) -> Iterator[bytes | memoryview]:
    for chunk in chunks:
        if stop.is_set():
            raise _Abandoned
        yield chunk


def _key(name: str, rank: int) -> str:
    return f"checkpoint/{name}/{rank}"
