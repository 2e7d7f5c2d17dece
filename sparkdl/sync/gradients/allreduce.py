"""All-reduce: replicas agree after every step, by the mean of their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sparkdl.comm.compression.compression import Shapes
from sparkdl.config import TrainConfig, require
from sparkdl.errors import ConfigError
from sparkdl.mesh import Mesh
from sparkdl.sync.collective import CollectiveStrategy
from sparkdl.sync.exchange_pattern import ModelSize, Pattern
from sparkdl.sync.gradient_buckets import bucket_shapes
from sparkdl.sync.gradients.backup_workers import BackupWorkersSynchronizer, check_backup_workers
from sparkdl.sync.gradients.double_buffering import DoubleBufferingSynchronizer
from sparkdl.sync.gradients.gradient_sums import AllReduceSynchronizer
from sparkdl.sync.gradients.shard_tree import ShardTreeSynchronizer
from sparkdl.sync.strategy import SetupArguments, SyncStrategy


@dataclass(frozen=True, kw_only=True)
class AllReduce(CollectiveStrategy):
    """Average gradients over all ranks after every batch: equal to training on the united batch."""

    bucket_bytes: int = 25 << 20
    """Size from which on a bucket of gradients is sent."""
    double_buffering: bool = False
    """True if a step applies the gradients of the one before while its own travel.

    Sums are then formed in a ring: the other topologies work while they are waited for.
    """
    num_backup_workers: int = 0
    """Workers that no step waits for: gradients that come after those of the others are dropped."""
    work_shares: Mapping[str, float] | None = None
    """Relative speeds of workers by their hosts, such as ``{"gpu-*": 3, "old-node-7": 1}``.

    A worker on a faster host gets more shards, for which ``numShards`` must be more than the
    workers. Patterns are those of shells, the first that fits counts, and hosts without one have
    speed 1. Measured speeds replace these. After MXNet's ``work_load_list``.
    """

    def __post_init__(self) -> None:
        num_backup = self.num_backup_workers
        require(self.bucket_bytes >= 1, "bucket_bytes must be at least 1", self.bucket_bytes)
        require(num_backup >= 0, "num_backup_workers must not be negative", num_backup)
        if self.double_buffering and num_backup:
            raise ConfigError(
                "double_buffering and num_backup_workers exclude each other: the first lets no "
                "step wait for its gradients, so that nobody is late; set one of them"
            )
        if self.double_buffering and self.topology == "auto":
            object.__setattr__(self, "topology", "ring")
        if self.work_shares is not None:
            require(
                isinstance(self.work_shares, Mapping)
                and len(self.work_shares) > 0
                and all(isinstance(name, str) for name in self.work_shares)
                and all(_is_speed(speed) for speed in self.work_shares.values()),
                "work_shares must map patterns of host names to speeds of 1e-6 to 1e6, such as "
                "{'gpu-*': 3}; hosts without a match count 1",
                self.work_shares,
            )

    @property
    def deterministic(self) -> bool:
        """See `SyncStrategy.deterministic`; who comes too late is another one each time."""
        return self.num_backup_workers == 0

    @property
    def is_elastic(self) -> bool:
        """See `SyncStrategy.is_elastic`: unless something is left out, or kept for later."""
        return self.compression is None and self.num_backup_workers == 0

    def why_not_divided(self, mesh: Mesh) -> str | None:
        if self.num_backup_workers:
            return (
                "each worker of a replica would tell by its own clock who comes too late; leave "
                "num_backup_workers at 0"
            )
        if self.work_shares is not None:
            return (
                "the workers of a replica wait for each other, whatever their speeds; leave "
                "work_shares out"
            )
        return None

    def check(self, config: TrainConfig, world_size: int) -> None:
        super().check(config, world_size)
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
            check_backup_workers(self, self.num_backup_workers, config, world_size)

    def messages(self, shapes: Shapes, element_size: int) -> Sequence[Shapes]:
        return bucket_shapes(shapes, element_size, self.bucket_bytes)

    @classmethod
    def examples(cls) -> tuple[AllReduce, ...]:
        return cls(), cls(compression="bf16"), cls(compression="powersgd")

    def pattern(self, size: ModelSize, world_size: int) -> Pattern:
        """See `SyncStrategy.pattern`: in buckets, of which the last one cannot be hidden."""
        pattern = super().pattern(size, world_size)
        buckets = self.messages(size.shapes, size.element_size)
        last = size.element_size * sum(map(math.prod, buckets[-1])) if buckets else 0
        hidden = 1.0 if self.double_buffering else 1 - last / max(1, size.gradient_bytes)
        return replace(
            pattern,
            copies=0,
            in_place=pattern.codec is None,
            hidden_share=hidden,
            num_messages=len(buckets),
            num_backup_workers=self.num_backup_workers,
        )

    def setup(self, *setup: *SetupArguments) -> AllReduceSynchronizer:
        kind: Callable[..., AllReduceSynchronizer] = AllReduceSynchronizer
        if self.double_buffering:
            kind = DoubleBufferingSynchronizer
        elif self.num_backup_workers:
            kind = partial(BackupWorkersSynchronizer, num_backup_workers=self.num_backup_workers)
        compression = self.resolved_compression()
        return kind(*setup, bucket_bytes=self.bucket_bytes, compression=compression)


_SLOWEST = 1e-6
"""Relative speed of a host; the fastest has the inverse of it, so ratios are finite."""


def _is_speed(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return _SLOWEST <= value <= 1 / _SLOWEST


def tree_synchronizer(
    strategy: SyncStrategy, shards_by_rank: Sequence[Sequence[int]], *setup: *SetupArguments
) -> ShardTreeSynchronizer:
    """Make the synchronizer of ``elasticity="bits"``; the driver has refused other strategies."""
    assert isinstance(strategy, AllReduce)
    size = strategy.bucket_bytes
    return ShardTreeSynchronizer(*setup, bucket_bytes=size, shards_by_rank=shards_by_rank)
