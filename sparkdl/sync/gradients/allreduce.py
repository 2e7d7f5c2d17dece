"""How do replicas agree after every step? Their gradients are summed while backward still runs.

A bucket whose gradients are all there is sent at once, so that communication overlaps with the
rest of the backward pass (Li et al., "PyTorch Distributed", VLDB 2020). Buckets are always sent
in the same order: ranks that have no samples, or in which a parameter took no part, send theirs,
with zeros, at the end.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from sparkdl.comm.communicator import Communicator, Pending
from sparkdl.errors import ConfigError
from sparkdl.sync.collective import CollectiveStrategy, counting_anew
from sparkdl.sync.gradients.buckets import Bucket, FlatGradients, bucket_shapes
from sparkdl.sync.strategy import MakeOptimizer, Reduced, Synchronizer

if TYPE_CHECKING:
    from sparkdl.comm.compression.compression import Compression
    from sparkdl.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class AllReduce(CollectiveStrategy):
    """Average gradients over all ranks after every batch: equal to training on the united batch."""

    bucket_bytes: int = 25 << 20
    """Size from which on a bucket of gradients is sent."""
    double_buffering: bool = False
    """Whether a step applies the gradients of the one before while its own travel.

    Sums are then formed in a ring: the other topologies work while they are waited for.
    """
    num_backup_workers: int = 0
    """Workers that no step waits for: gradients that come after those of the others are dropped."""
    work_shares: tuple[float, ...] | None = None
    """The ranks' parts of the rows, in proportion, such as ``(2, 1)``; None: equal parts.

    After MXNet's ``work_load_list``. ``batchSize`` is the batch of the rank with the largest part.
    Gradients stay those of the united batch. Spark decides which executor runs which rank.
    """

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes must be at least 1; received {self.bucket_bytes}")
        if self.num_backup_workers < 0:
            raise ConfigError(
                f"num_backup_workers must not be negative; received {self.num_backup_workers}"
            )
        if self.double_buffering and self.num_backup_workers:
            raise ConfigError(
                "double_buffering and num_backup_workers exclude each other: the first lets no "
                "step wait for its gradients, so that nobody is late; set one of them"
            )
        if self.double_buffering and self.topology == "auto":
            object.__setattr__(self, "topology", "ring")
        if self.work_shares is not None:
            object.__setattr__(self, "work_shares", tuple(self.work_shares))  # lists, from files
            if not all(0 < share < math.inf for share in self.work_shares):
                raise ConfigError(f"work_shares must be positive; received {self.work_shares}")

    @property
    def deterministic(self) -> bool:
        """See `SyncStrategy.deterministic`; who comes too late is another one each time."""
        return self.num_backup_workers == 0

    def check(self, config: TrainConfig, world_size: int) -> None:
        """See `SyncStrategy.check`."""
        super().check(config, world_size)
        if self.work_shares is not None and len(self.work_shares) != world_size:
            raise ConfigError(
                f"work_shares must have one part per worker; received {len(self.work_shares)} "
                f"for {world_size} worker(s); set numWorkers to {len(self.work_shares)}"
            )
        if self.double_buffering and self.topology != "ring":
            raise ConfigError(
                f"topology {self.topology!r} sums while it is waited for, and double_buffering "
                "wants sums while the next step is computed; use topology 'ring'"
            )
        if self.double_buffering and config.precision == "fp16":
            raise ConfigError(
                "double_buffering applies gradients a step later, when precision 'fp16' may have "
                "another loss scale; use precision 'bf16' or 'fp32'"
            )
        if self.num_backup_workers:
            from sparkdl.sync.gradients.backup_workers import check

            check(self, config, world_size)

    def row_shares(self, world_size: int) -> tuple[float, ...] | None:
        """See `SyncStrategy.row_shares`."""
        if self.work_shares is None:
            return None
        return tuple(share / sum(self.work_shares) for share in self.work_shares)

    def bytes_per_step(
        self, shapes: Sequence[tuple[int, ...]], element_size: int, world_size: int
    ) -> float | None:
        """See `SyncStrategy.bytes_per_step`: a ring's or the compression's, and the step's sums.

        With backup workers it depends on time how often the ranks ask each other who is ready.
        """
        if self.num_backup_workers:
            return None
        compression = self.resolved_compression()
        sent = [
            exchange_bytes(compression, bucket, element_size, world_size)
            for bucket in bucket_shapes(shapes, element_size, self.bucket_bytes)
        ]
        if any(number is None for number in sent):
            return None
        return sum(filter(None, sent)) + exchange_bytes(None, [(2,)], 8, world_size)

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, comm: Communicator
    ) -> AllReduceSynchronizer:
        """See `SyncStrategy.setup`."""
        options = (self.bucket_bytes, self.resolved_compression())
        if self.double_buffering:
            from sparkdl.sync.gradients.double_buffering import DoubleBufferingSynchronizer

            return DoubleBufferingSynchronizer(model, make_optimizer, comm, *options)
        if self.num_backup_workers:
            from sparkdl.sync.gradients.backup_workers import BackupWorkersSynchronizer

            quorum = comm.world_size - self.num_backup_workers
            return BackupWorkersSynchronizer(model, make_optimizer, comm, *options, quorum=quorum)
        return AllReduceSynchronizer(model, make_optimizer, comm, *options)


@overload
def exchange_bytes(
    compression: None, shapes: Sequence[tuple[int, ...]], element_size: int, world_size: int
) -> int: ...
@overload
def exchange_bytes(
    compression: Compression | None,
    shapes: Sequence[tuple[int, ...]],
    element_size: int,
    world_size: int,
) -> int | None: ...
def exchange_bytes(
    compression: Compression | None,
    shapes: Sequence[tuple[int, ...]],
    element_size: int,
    world_size: int,
) -> int | None:
    """Bytes that one rank sends when tensors of ``shapes`` are summed over all ranks once."""
    if compression is not None and world_size > 1:
        return compression.wire_bytes(shapes, element_size, world_size)
    num_bytes = element_size * sum(torch.Size(shape).numel() for shape in shapes)
    return 2 * (world_size - 1) * num_bytes // world_size


class AllReduceSynchronizer(Synchronizer):
    """See `AllReduce`; what its variants do otherwise is in files of their own."""

    sends_early = True
    """Whether buckets are sent while the backward pass runs."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        comm: Communicator,
        bucket_bytes: int,
        compression: Compression | None = None,
    ) -> None:
        self.model = model
        self._comm = counting_anew(comm)
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(parameters)
        self._gradients = FlatGradients(parameters, bucket_bytes, self._comm.allocate)
        self._buckets = self._gradients.buckets
        self._compressors = []
        if compression is not None and comm.world_size > 1:
            self._compressors = [
                compression.make(bucket.gradients, self._comm) for bucket in self._buckets
            ]
        self._pending: list[Pending] = []
        self._sums: torch.Tensor | None = None
        self._num_sent = 0
        self._is_syncing = True
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        if self.sends_early and comm.world_size > 1:
            self._attach_hooks()

    @property
    def bytes_sent(self) -> int:
        """See `Synchronizer.bytes_sent`."""
        return self._comm.bytes_sent

    def zero_gradients(self) -> None:
        """See `Synchronizer.zero_gradients`."""
        self._gradients.zero()
        self._num_sent = 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Synchronizer.no_sync`."""
        self._is_syncing = False
        try:
            yield
        finally:
            self._is_syncing = True

    def start_sums(self, sums: torch.Tensor) -> None:
        """See `Synchronizer.start_sums`."""
        if self._comm.world_size == 1:
            return
        # A message of its own: float32 buckets would round the sums. It travels during the
        # backward pass; after it, all ranks would wait once more.
        self._sums = sums
        self._pending.append(self._comm.all_reduce_async(sums))

    def reduce_gradients(self, sums: torch.Tensor, divisor: float) -> Reduced:
        """See `Synchronizer.reduce_gradients`."""
        if self._comm.world_size == 1:
            return Reduced(sums, divisor)
        if self._sums is None:  # an empty batch; before the buckets, as on the other ranks
            self.start_sums(sums)
        while self._num_sent < len(self._buckets):
            self._send_next()
        pending, self._pending = self._pending, []
        for message in pending:
            message.wait()
        shared, self._sums = self._sums, None
        assert shared is not None
        return Reduced(shared, divisor)

    def after_step(self, step: int) -> bool:
        """Replicas are equal after every step."""
        return True

    def close_round(self) -> None:
        """Nothing to do: every step closes its round."""

    def state_dict(self) -> dict[str, Any]:
        """See `Synchronizer.state_dict`."""
        return {"compressors": [one.state_dict() for one in self._compressors]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Synchronizer.load_state_dict`."""
        if self._compressors and state["compressors"]:  # a gang of one has none
            for one, values in zip(self._compressors, state["compressors"], strict=True):
                one.load_state_dict(values)

    def rank_state_dict(self) -> dict[str, Any]:
        """See `Synchronizer.rank_state_dict`."""
        return {"compressors": [one.rank_state_dict() for one in self._compressors]}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """See `Synchronizer.load_rank_state_dict`."""
        for one, values in zip(self._compressors, state["compressors"], strict=True):
            one.load_rank_state_dict(values)

    def close(self) -> None:
        """See `Synchronizer.close`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._gradients.release()

    def _attach_hooks(self) -> None:
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                hook = _Arrival(self, bucket)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooks.append(handle)

    def _arrived(self, bucket: Bucket) -> None:
        if not self._is_syncing:
            return
        bucket.num_missing -= 1
        if bucket.num_missing < 0:
            raise RuntimeError(
                "a parameter received its gradient twice in one backward pass, after it was sent; "
                "with activation checkpointing use torch.utils.checkpoint(use_reentrant=False)"
            )
        while self._num_sent < len(self._buckets) and not self._buckets[self._num_sent].num_missing:
            self._send_next()

    def _send_next(self) -> None:
        number = self._num_sent
        self._num_sent += 1
        self._pending.append(self._start(number, self._buckets[number].flat))

    def _start(self, number: int, flat: torch.Tensor) -> Pending:
        """Start to sum bucket ``number`` over the ranks."""
        if self._compressors:
            return self._compressors[number].start(flat)
        return self._comm.all_reduce_async(flat)


class _Arrival:
    """Tells the synchronizer that one gradient of a bucket is there."""

    def __init__(self, synchronizer: AllReduceSynchronizer, bucket: Bucket) -> None:
        self._synchronizer = synchronizer
        self._bucket = bucket

    def __call__(self, parameter: torch.Tensor) -> None:
        self._synchronizer._arrived(self._bucket)
