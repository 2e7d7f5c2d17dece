"""The checkpoints of a run: the name under which it keeps them, and those that it goes on from.

Equal data, equal module, equal configuration give an equal name, in another process too, so that
the same fit finds its own checkpoints and no other's.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.data.plan import HOMES, Column
from sparkdl.data.shuffle_windows import WINDOWS, Windows, from_text
from sparkdl.errors import CheckpointError, CheckpointLost, ShardLost, StorageError
from sparkdl.serialization.identity import identity
from sparkdl.serialization.recorded.recipe import RecordedWeights
from sparkdl.spark.cluster.attempt import Attempt
from sparkdl.spark.cluster.launch import Launch
from sparkdl.spark.cluster.slots import wait_again
from sparkdl.spark.frames.row_table import SourceTable
from sparkdl.spark.run.run import Run
from sparkdl.spark.session.interrupts import raise_if_asked
from sparkdl.storage.checkpoint_format import (
    CheckpointInfo,
    StepFolder,
    folders,
    has_other_runs,
    latest,
    read_manifest,
)
from sparkdl.storage.lease import Lease
from sparkdl.storage.storage import Storage, is_definite
from sparkdl.train.state import TrainState

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PATIENCE_SECONDS = 300.0
"""Time that a storage that does not answer is asked again while no training is under way."""
_PAUSES_SECONDS = (1.0, 3.0, 10.0)
"""Between these requests; the last pause is repeated."""
_LEFT_OUT = ("epochs", "max_steps", "checkpoint", "callbacks", "device", "parallelism")
"""Options that change nothing of what is learnt: how long to train, how to watch it, and where.

All others are in the run key, so that a new one changes all keys.
"""


def run_key(
    module: nn.Module,
    columns: Sequence[Column],
    config: TrainConfig,
    content: str,
    weights: RecordedWeights | None = None,
) -> str:
    """Name of a run's checkpoints, 16 hexadecimal digits.

    Args:
        module: with its initial weights, which count: a factory, being seeded, gives the same ones
            each time, and a module that was made elsewhere must be made from the same seed.
        columns: those of the plan; the number of workers does not count.
        config: all but the number of epochs and steps, checkpoints, callbacks and device.
        content: fingerprint of the rows.
        weights: those of the module's parameters that are on the meta device.
    """
    described = [
        [c.name, c.role, c.dtype, list(c.shape), c.argument, identity(c.specification)]
        for c in columns
    ]
    strategy = config.sync_strategy
    if getattr(strategy, "work_shares", None) is not None:  # the result does not depend on these
        config = replace(config, sync_strategy=replace(strategy, work_shares=None))
    options = {
        name: identity(getattr(config, name))
        for name in config.__dataclass_fields__
        if name not in _LEFT_OUT
    }
    described_module = identity(module, None if weights is None else weights.digest)
    text = json.dumps([described_module, described, options, content], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def windows_to_go_on(
    storage: Storage | None, run_key: str, choose: Callable[[], Windows | None]
) -> Windows | None:
    """The windows of a run's newest checkpoint; if there is none, those that ``choose`` gives.

    What was begun on hosts with more or less memory goes on in the same order of rows.
    """
    found = _newest(storage, run_key, WINDOWS, from_text)
    return choose() if found is None else found[0]


def table_to_go_on(storage: Storage | None, run_key: str, table: SourceTable) -> SourceTable:
    """The table with the shards of a run's newest checkpoint, if these followed from other homes.

    What was begun when blocks of HDFS lay elsewhere goes on with the same rows in each shard.
    """
    found = None if table.homes is None else _newest(storage, run_key, HOMES, str)
    if found is None or found[0] == table.homes:
        return table
    logger.info("the rows lie on other hosts than before; shards stay those of the checkpoint")
    return table.dealt_by(found[0])


def _newest(
    storage: Storage | None, run_key: str, name: str, read: Callable[[str], T]
) -> tuple[T] | None:
    """Return what the newest checkpoint says under a name; None: there is none, or no such note."""
    return None if storage is None else patiently(partial(_noted, storage, run_key, name, read))


def _noted(storage: Storage, run_key: str, name: str, read: Callable[[str], T]) -> tuple[T] | None:
    for folder in reversed(folders(storage, run_key)):
        try:
            text = read_manifest(storage, folder.path).environment.get(name)
            return None if text is None else (read(text),)
        except CheckpointError:  # `find_checkpoint` warns of it
            continue
    return None


def find_checkpoint(
    run: Run,
    storage: Storage,
    passed_over: Collection[str] = (),
    lease: Lease | None = None,
) -> CheckpointInfo | None:
    """The newest whole checkpoint of the run key that is not beyond the run's end, or None.

    Another fit of the same key may have trained for longer; its result is not this one's.

    Raises:
        StorageError: the storage cannot be read, or has lost what this run has written.
    """

    def fits(shared: Any) -> bool:
        try:
            state = TrainState.from_state_dict(shared["state"])
            if not all(type(n) is int for n in (state.epoch, state.step, state.step_in_epoch)):
                raise TypeError(f"odd numbers: {state}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"its state is of another form: {error!r}") from error
        return not state.exceeds(run.plan.end_epoch, run.plan.end_step)

    found = newest(storage, run.run_key, fits, passed_over=passed_over, lease=lease)
    if found is not None:
        logger.info("going on from the checkpoint of step %d (%s)", found.step, found.path)
    elif patiently(
        lambda: not folders(storage, run.run_key) and has_other_runs(storage, run.run_key)
    ):
        logger.info(
            "%s holds checkpoints of other runs, but none of these rows, module, initial weights "
            "and Params (run key %s): training begins at step 0; a module that a factory makes, "
            "or that is made after torch.manual_seed, has the same initial weights each time",
            storage,
            run.run_key,
        )
    return found


def newest(
    storage: Storage,
    run_key: str,
    fits: Callable[[Any], bool] | None = None,
    *,
    is_wanted: Callable[[StepFolder], bool] = lambda _: True,
    passed_over: Collection[str] = (),
    lease: Lease | None = None,
) -> CheckpointInfo | None:
    """Return what `checkpoint_format.latest` finds, with patience for the storage.

    That there is none counts only where the run's own lease is: an empty folder may be a mount
    point that has lost its file system. A checkpoint that still cannot be read when the patience is
    at its end is passed over.

    ``passed_over`` are those that workers could not read, taken only if there is no other;
    ``lease`` is the run's own, None if it has written nothing yet.

    Raises:
        StorageError: the storage cannot be listed, or has lost what this run has written.
    """

    def find(among: Callable[[StepFolder], bool]) -> CheckpointInfo | None:
        def look(*, is_last_try: bool = False) -> CheckpointInfo | None:
            found = latest(storage, run_key, fits, is_wanted=among, is_last_try=is_last_try)
            if found is None and lease is not None:
                lease.require_place()
            return found

        try:
            return patiently(look)
        except StorageError as error:
            logger.warning("%s; looking for an older checkpoint", error)
            return look(is_last_try=True)

    found = find(lambda folder: is_wanted(folder) and folder.path not in passed_over)
    if found is None and passed_over:
        found = find(is_wanted)
    return found


@dataclass
class Attempts:
    """The submissions of a gang: what one of them leaves for the next to know."""

    run: Launch
    after_loss: Callable[[Collection[int]], None]
    """Has shards that were lost written anew: those that no worker could read, or all if it is
    not known which."""
    lease: Lease | None = None
    """None: there is no place for checkpoints."""
    begun_from: list[str | None] = field(default_factory=list)
    """The checkpoint of each submission."""
    passed_over: set[str] = field(default_factory=set)
    """Checkpoints that workers could not read."""
    speeds: dict[str, float] = field(default_factory=dict)
    """Rows per second of a worker by its host, as the submissions before have measured them."""
    previous: Attempt | None = None
    limit: int | None = None
    """Workers of the next submission, at most; None: as many as there are slots for."""

    def heal(self, failed: Attempt) -> None:
        """Mend what would make the next submission fail too."""
        if failed.has_reported(ShardLost):  # the file is gone, although Spark still holds its row
            self.after_loss(failed.missing)
        path = self.begun_from[-1] if self.begun_from else None
        if failed.has_reported(CheckpointLost) and path is not None:
            self.passed_over.add(path)

    def take_at_most(self, num_workers: int) -> None:
        """Have the next submission wait for no more workers than these."""
        self.limit = num_workers

    def begin(
        self,
        attempt: Attempt,
        find: Callable[[Storage], CheckpointInfo | None],
        first_step: int = 0,
    ) -> str | None:
        """Wait for executors after a loss; give the path of the checkpoint to go on from, if any.

        ``find`` looks for it, and ``first_step`` is where the run begins without.
        """
        run, number = self.run, attempt.number
        if self.previous is not None:
            self.speeds |= by_host(self.previous)
        self.previous = attempt
        if number > 0:
            run.view.begun_again(number, None)
            attempt.world_size = wait_again(
                run.spark, run.slots, run.settings, attempt.restarts_left
            )
            attempt.world_size = min(attempt.world_size, self.limit or attempt.world_size)
            self.limit = None
        found = None if run.link.checkpoints is None else find(run.link.checkpoints)
        path = None if found is None else found.path
        self.begun_from.append(path)
        if self.lease is not None:
            self.lease.begin(number, path)
        attempt.start = first_step if found is None else found.step
        may_change = run.slots.max_workers is not None
        run.view.attempt(number, attempt.start, attempt.world_size if may_change else None)
        return path


def by_host(attempt: Attempt) -> dict[str, float]:
    """Rows per second of a worker on each host, the mean of its workers."""
    found: dict[str, list[float]] = {}
    for rank, speed in attempt.speeds.items():
        found.setdefault(attempt.hosts.get(rank, ""), []).append(speed)
    return {host: sum(speeds) / len(speeds) for host, speeds in found.items() if host}


@contextlib.contextmanager
def gang_attempts(
    run: Launch, key: str, after_loss: Callable[[Collection[int]], None]
) -> Iterator[Attempts]:
    """Yield the attempts of a gang that keeps its checkpoints under ``key``, with their lease."""
    checkpoints = run.link.checkpoints
    with contextlib.ExitStack() as stack:
        lease = None
        if checkpoints is not None:
            lease = stack.enter_context(Lease(checkpoints, key, run.run_id))
        yield Attempts(run, after_loss, lease)


def patiently(action: Callable[[], T]) -> T:
    """Ask a storage, for minutes, while no training is under way; raises StorageError."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    pauses = itertools.chain(_PAUSES_SECONDS, itertools.repeat(_PAUSES_SECONDS[-1]))
    for pause in pauses:
        try:
            return action()
        except StorageError as error:
            if is_definite(error) or time.monotonic() + pause > deadline:
                raise
            logger.warning("%s; training waits, and tries again in %g s", error, pause)
        time.sleep(pause)
        raise_if_asked()
    raise AssertionError("pauses do not end")
