"""Backup workers: each step takes the first gradients that are ready, and drops the others.

Synchronous training with backup workers (Chen et al., "Revisiting Distributed Synchronous SGD",
2016): of ``W`` ranks a step needs the gradients of ``W - k``; whatever is ready by then is used,
and what comes later is dropped, with its rows. The gradient is that of the united batch of the
ranks in use, whose weights travel with it.

A thread on each rank exchanges messages with those of the others while the main thread computes.
Towards the end of a step all threads gather one `Readiness` from each rank, again and again:

============  ===================================================  ============================
a rank says   when                                                 its part of the sum
============  ===================================================  ============================
`NOT_READY`   its main thread computes, or lags behind             zeros
`READY`       its gradients of this step are in the buckets        the buckets
`EMPTY`       as `READY`, but its batch has no samples             the buckets, which are zero
`FULL`        it has `MAX_LAG` results that it has not yet taken   (the others wait for it)
`LEAVING`     it ends, after the run or after a failure            (the others fail)
============  ===================================================  ============================

Once enough ranks are ready, all threads sum what there is and keep the result. A late rank finds
it when it is done, throws away its own gradient, and takes the step that everyone has taken:
replicas stay equal, bit for bit. Batches of steps that were concluded meanwhile are passed over.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from sparkdl.comm.communicator import Communicator
from sparkdl.config import TrainConfig
from sparkdl.errors import CommunicationError, ConfigError
from sparkdl.sync.collective import CollectiveStrategy
from sparkdl.sync.gradient_buckets import BucketSums
from sparkdl.sync.gradients.gradient_sums import AllReduceSynchronizer
from sparkdl.sync.strategy import Reduced, SetupArguments, Synchronizer

MAX_LAG = 4
"""Concluded steps that a late rank may not have taken yet."""
_FIRST_REPORT, _REPORT_AGAIN = 0.8, 0.1
"""A rank that is not ready reports nothing for so much of a usual step, and then each time that a
step has taken so much longer: by that much the others wait longer than needed."""
_SHORTEST_SECONDS, _LONGEST_SECONDS = 1e-3, 0.1
"""Shortest and longest time until it reports."""
_NUM_RECENT = 8
"""Steps of which the shortest is the usual one."""


def check_backup_workers(
    strategy: CollectiveStrategy, num_backup: int, config: TrainConfig, world_size: int
) -> None:
    """Raise ConfigError for what backup workers do not go together with."""
    if num_backup > world_size - 2:
        raise ConfigError(
            f"num_backup_workers={num_backup} of {world_size} worker(s) would leave steps with one "
            f"worker's gradient or none; set at most {max(world_size - 2, 0)}, or numWorkers to at "
            f"least {num_backup + 2}"
        )
    compression = strategy.resolved_compression()
    if compression is not None and compression.keeps_residual:
        raise ConfigError(
            f"{type(compression).__name__} keeps what it has not sent for the next step, and with "
            "num_backup_workers it would be lost whenever a gradient is dropped; use compression "
            "'bf16' or 'fp16'"
        )
    if strategy.topology not in ("auto", "ring"):
        raise ConfigError(
            f"topology {strategy.topology!r} sums when all workers are there, and with "
            "num_backup_workers some are not; use topology 'ring'"
        )
    if config.device == "cuda":
        raise ConfigError(_NO_CUDA)
    if config.sync_batch_norm:
        raise ConfigError(
            "syncBatchNorm lets workers wait for each other in every layer, and with "
            "num_backup_workers late workers leave out steps; unset one of the two"
        )


_NO_CUDA = (
    "num_backup_workers is for CPU workers: a thread exchanges while the rank computes, which "
    "NCCL does not allow; leave it out, or set device to 'cpu'"
)


class BackupWorkersSynchronizer(AllReduceSynchronizer):
    """Sums the gradients of those that are ready; see the module."""

    sends_early = False

    def __init__(self, *setup: *SetupArguments, num_backup_workers: int, **options: Any) -> None:
        """Build it; ConfigError if the model is on a CUDA device."""
        # A group of its own: the main thread may speak with its peers at the same time.
        model, make_optimizer, comm = setup
        own = comm.split([range(comm.world_size)])
        super().__init__(model, make_optimizer, own, **options)
        if self._buckets[0].flat.device.type == "cuda":
            raise ConfigError(_NO_CUDA)
        flats = [bucket.flat for bucket in self._buckets]
        quorum = comm.world_size - num_backup_workers
        num_sums = len(self._with_marks(torch.zeros(2, dtype=torch.float64)))
        self._thread = StepThread(self._comm, quorum, flats, self._messages, num_sums)
        self._has_samples = False

    def zero_gradients(self) -> None:
        super().zero_gradients()
        self._has_samples = False
        self.is_late = self._thread.is_ahead()

    def start_sums(self, sums: torch.Tensor) -> None:
        """Note that there are samples; the sums travel with the gradients."""
        self._has_samples = True

    def early_sums(self, sums: torch.Tensor, *, waits: bool) -> None:
        """None: the sums travel with the gradients."""

    def reduce_gradients(self, sums: torch.Tensor, divisor: float) -> Reduced:
        self._gradients.settle()
        readiness = Readiness.READY if self._has_samples else Readiness.EMPTY
        result = self._thread.contribute(readiness, self._with_marks(sums))
        for bucket, flat in zip(self._buckets, result.flats, strict=True):
            if bucket.flat is not flat:
                bucket.flat.copy_(flat)
        self._gradients.drop_unused(self._marks_of(result.sums, sums))
        return Reduced(result.sums[: len(sums)], divisor, result.ranks)

    def follow_freezing(self) -> None:
        """See `Synchronizer.follow_freezing`: others may take steps meanwhile."""
        Synchronizer.follow_freezing(self)

    def close(self) -> None:
        """See `Synchronizer.close`; peers that still train are told."""
        self._thread.leave()
        super().close()


class Readiness(IntEnum):
    """The message of a rank to the others about the next step to conclude."""

    NOT_READY = 0
    READY = 1
    EMPTY = 2
    """Ready, without samples in this step."""
    FULL = 3
    """Not ready, and too far behind for the others to go on."""
    LEAVING = 4


class ConcludedStep(NamedTuple):
    """A concluded step."""

    sums: torch.Tensor
    flats: Sequence[torch.Tensor]
    """The summed gradients: the buckets themselves if this rank's own were among them."""
    ranks: tuple[int, ...] | None
    """Ranks whose gradients were used; None: everyone's."""


class StepThread(threading.Thread):
    """Concludes steps with the threads of the other ranks, whatever its main thread does.

    ``quorum`` ranks conclude a step; nobody else uses ``comm``.
    """

    def __init__(
        self,
        comm: Communicator,
        quorum: int,
        flats: Sequence[torch.Tensor],
        messages: BucketSums,
        num_sums: int,
    ) -> None:
        super().__init__(name="sparkdl backup workers", daemon=True)
        self._comm = comm
        self._quorum = quorum
        self._flats = flats
        self._messages = messages
        self._changed = threading.Condition()
        self._readiness = Readiness.NOT_READY
        self._sums = torch.zeros(num_sums, dtype=torch.float64)
        self._results: deque[ConcludedStep] = deque()
        self._is_leaving = False
        self._failure: Exception | None = None
        self._since = time.monotonic()
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)

    def is_ahead(self) -> bool:
        """True if the main thread's next step was concluded already; the first call begins all."""
        if self.ident is None:
            self.start()
        with self._changed:
            return bool(self._results)

    def contribute(self, readiness: Readiness, sums: torch.Tensor) -> ConcludedStep:
        """Give this rank's part of the next step, from the buckets, and get what came of the step.

        CommunicationError if a peer was lost, or has left.
        """
        with self._changed:
            if not self._results:
                self._readiness, self._sums = readiness, sums
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._results or self._failure)
            if not self._results:
                assert self._failure is not None
                raise self._failure
            self._changed.notify_all()
            return self._results.popleft()

    def leave(self) -> None:
        """Tell the others, and end."""
        with self._changed:
            self._is_leaving = True
            self._changed.notify_all()
        if self.ident is not None:
            self.join()

    def run(self) -> None:
        """Conclude steps until someone leaves or is lost."""
        try:
            while True:
                mine = self._report()
                gathered = self._comm.all_gather(torch.tensor([mine], dtype=torch.uint8))
                everyone = [Readiness(one) for one in gathered.flatten().tolist()]
                if Readiness.LEAVING in everyone:
                    who = everyone.index(Readiness.LEAVING)
                    raise CommunicationError(f"rank {who} has left the gang")
                if is_quorum(everyone, self._quorum):
                    self._conclude(mine, everyone)
        except Exception as error:  # raised again in the main thread, by `contribute`
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _report(self) -> Readiness:
        """Wait until there is something to report, but not for long."""
        with self._changed:
            is_full = len(self._results) >= MAX_LAG
            elapsed = time.monotonic() - self._since
            self._changed.wait_for(
                lambda: (
                    self._readiness is not Readiness.NOT_READY
                    or self._is_leaving
                    or (is_full and len(self._results) < MAX_LAG)
                ),
                report_delay(elapsed, min(self._recent, default=0.0)),
            )
            if self._is_leaving:
                return Readiness.LEAVING
            if self._readiness is Readiness.NOT_READY and len(self._results) >= MAX_LAG:
                return Readiness.FULL
            return self._readiness

    def _conclude(self, mine: Readiness, everyone: Sequence[Readiness]) -> None:
        """Sum the gradients of those that were ready; collective."""
        ranks = tuple(rank for rank, one in enumerate(everyone) if one is not Readiness.NOT_READY)
        # A rank that is done by now counts as late too: the others know no better.
        if mine is Readiness.NOT_READY:
            flats = [torch.zeros_like(flat) for flat in self._flats]
            sums = torch.zeros_like(self._sums)
        else:
            flats, sums = list(self._flats), self._sums
        self._messages.start_plain(sums)
        for number, flat in enumerate(flats):
            self._messages.start(number, flat)
        self._messages.wait()
        is_all = len(ranks) == len(everyone)
        with self._changed:
            self._readiness = Readiness.NOT_READY
            self._results.append(ConcludedStep(sums, flats, None if is_all else ranks))
            now = time.monotonic()
            self._recent.append(now - self._since)
            self._since = now
            self._changed.notify_all()


def report_delay(elapsed_seconds: float, usual_seconds: float) -> float:
    """Seconds until a rank that is not ready says so, given the time of this step and of others."""
    wanted = max(_FIRST_REPORT * usual_seconds - elapsed_seconds, _REPORT_AGAIN * elapsed_seconds)
    return min(max(wanted, _SHORTEST_SECONDS), _LONGEST_SECONDS)


def is_quorum(everyone: Sequence[Readiness], quorum: int) -> bool:
    """Return True if the next step can be concluded.

    Ranks without samples do not make a step by themselves, as long as others may have samples.
    """
    if Readiness.FULL in everyone:
        return False
    num_ready = everyone.count(Readiness.READY)
    num_done = num_ready + everyone.count(Readiness.EMPTY)
    return num_done == len(everyone) or (num_done >= quorum and num_ready > 0)
