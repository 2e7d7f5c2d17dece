"""Where does a run in rounds leave its checkpoints? Where the user says; the driver writes them.

Without a ``checkpointDir`` there are none: the driver itself holds the state of the newest round,
and lost tasks are Spark's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkdl.data.shuffle_windows import WINDOWS, as_text
from sparkdl.runtime.process import cpu_model
from sparkdl.runtime.versions import versions
from sparkdl.spark.run.resume import find_checkpoint
from sparkdl.spark.run.run import Run
from sparkdl.storage.checkpoint_format import load_shared
from sparkdl.storage.checkpoint_writer import CheckpointManager


class RoundCheckpoints:
    """Decides when to write, and writes; all on the driver."""

    def __init__(self, run: Run) -> None:
        self.is_wanted = False
        """Whether a checkpoint has become due."""
        self._run = run
        self._storage = run.link.checkpoints if run.link.url is not None else None
        self._manager: CheckpointManager | None = None
        if self._storage is not None:
            self._manager = CheckpointManager(
                self._storage,
                run.config.checkpoint,
                rank=0,
                world_size=1,
                run_key=run.run_key,
                environment={
                    **versions(),
                    "cpu": cpu_model(),
                    "threads": str(run.slots.threads),
                    "shards": str(run.plan.world_size),
                    WINDOWS: as_text(run.plan.windows),
                },
                signal=_OwnKeys(),
                timeout_seconds=run.settings.collective_timeout_seconds,
            )

    def note(self, before: int, step: int) -> None:
        """Take note that the run has come from ``before`` to ``step`` steps."""
        if self._manager is not None:
            due = self._manager.due
            self.is_wanted |= any(due(number) for number in range(before + 1, step + 1))

    def save(self, step: int, shared: dict[str, Any]) -> None:
        """Copy the state and write it in the background.

        Raises:
            StorageError: the one before could not be written.
        """
        assert self._manager is not None
        self.is_wanted = False
        self._manager.save(step, shared, {})

    def final(self, step: int, shared: dict[str, Any]) -> None:
        """Write the checkpoint that ends the run, if there is a place for it.

        Raises:
            StorageError: it could not be written.
        """
        if self._manager is not None:
            self._manager.final(step, shared, {})

    def newest(self) -> dict[str, Any] | None:
        """The state of the newest checkpoint, or None."""
        if self._storage is None:
            return None
        found = find_checkpoint(self._run, self._storage)
        if found is None:
            return None
        shared: dict[str, Any] = load_shared(found)
        return shared

    def close(self, *, abort: bool) -> None:
        """End what is being written; with ``abort`` without waiting for it."""
        if self._manager is not None:
            self._manager.close(abort=abort)


class _OwnKeys:
    """Keys of a gang of one, which need no channel."""

    def __init__(self) -> None:
        self._keys: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._keys[key] = value

    def get(self, key: str) -> bytes | None:
        return self._keys.get(key)

    def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        missing = [key for key in keys if key not in self._keys]
        if missing:
            raise TimeoutError(f"{len(missing)} keys not set")
