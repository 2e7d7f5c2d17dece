"""What does a strategy make its workers send, how often, and for whom do they wait?

`pattern_of` reads it off the strategy's options, once; `predict` and `simulate` know patterns only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sparkdl.sync.asynchronous.async_sgd import AsyncSGD
from sparkdl.sync.asynchronous.hogwild import Hogwild
from sparkdl.sync.averaging.adasum import Adasum
from sparkdl.sync.averaging.averaging import AveragingStrategy
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.collective import CollectiveStrategy
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.gradients.buckets import bucket_shapes
from sparkdl.sync.own_weights.elastic_averaging import ElasticAveraging
from sparkdl.sync.own_weights.gossip import Gossip
from sparkdl.sync.population.population import Competition, PopulationStrategy
from sparkdl.sync.strategy import SyncStrategy

Kind = Literal["sum", "server", "pairs", "stages", "nodes"]
Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What a module's tensors take; all sizes in bytes."""

    shapes: tuple[tuple[int, ...], ...]
    """Of the trained parameters."""
    element_size: int
    """Of one number of them."""
    replica_bytes: int
    """All parameters and buffers."""
    buffer_bytes: int
    """The buffers that move, which averaging sends too."""
    optimizer_bytes: int
    """State of the optimizer."""

    @property
    def gradient_bytes(self) -> int:
        """The trained parameters' gradients, which are as large as these."""
        return self.element_size * sum(math.prod(shape) for shape in self.shapes)

    @property
    def checkpoint_bytes(self) -> int:
        """What a checkpoint holds of tensors."""
        return self.replica_bytes + self.optimizer_bytes

    @property
    def worker_bytes(self) -> int:
        """A worker's tensors: replica, gradients, optimizer, and a checkpoint's copy of these."""
        return (
            self.replica_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + (self.checkpoint_bytes)
        )


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """How a strategy's workers exchange and wait."""

    kind: Kind
    """``sum``: over all ranks. ``server``: push to and pull from slices that all ranks serve.
    ``pairs``: two ranks swap. ``stages``: through the driver, a Spark job for each round.
    ``nodes``: a sum over machines, inside which weights are shared."""
    num_bytes: float
    """Size of what is summed, pushed, swapped or sent to the driver at a time."""
    period: float | None = 1
    """Steps between exchanges; None: so many that agreeing takes ``target_share`` of the time."""
    target_share: float = 0.05
    topology: str = "auto"
    in_place: bool = False
    """Whether what is summed lies in shared memory already, where there is one."""
    wire_ratio: float | None = 1.0
    """Bytes on the wire over those of a sum without compression; None: it depends on the data."""
    codec: str | None = None
    """The compression, by the name of its class."""
    copies: float = 0.0
    """How often ``num_bytes`` are copied for an exchange, besides what travels."""
    hidden_share: float = 0.0
    """Part of the bytes that may travel while the backward pass goes on."""
    num_messages: int = 1
    """Exchanges one after the other into which one is cut (buckets)."""
    lead: float = 0
    """Steps that a worker may be ahead of the slowest; infinite: it never waits."""
    num_backup_workers: int = 0
    pull_period: int = 1

    @property
    def waits_every(self) -> float:
        """Steps in which one worker's slow steps and its quick ones make up for each other."""
        return max(self.period or 1, 1) + self.lead


def pattern_of(
    strategy: SyncStrategy, size: ModelSize, world_size: int, *, in_rounds: bool
) -> Pattern:
    """The pattern of a strategy among ``world_size`` workers.

    Strategies of users, of which only `SyncStrategy.bytes_per_step` is known, are taken to sum
    at every step.
    """
    if in_rounds:
        return _stages(strategy, size)
    if isinstance(strategy, AllReduce):
        return _all_reduce(strategy, size, world_size)
    if isinstance(strategy, AveragingStrategy):
        return _averaging(strategy, size, world_size)
    if isinstance(strategy, ElasticAveraging):
        ratio, codec = _compressed(strategy, size, world_size)
        return Pattern(
            kind="sum", num_bytes=size.gradient_bytes, period=strategy.averaging_period,
            topology=strategy.topology, wire_ratio=ratio, codec=codec, copies=3,
        )  # fmt: skip
    if isinstance(strategy, AsyncSGD):
        lead = math.inf if strategy.staleness_bound is None else strategy.staleness_bound
        return Pattern(
            kind="server", num_bytes=size.gradient_bytes, lead=lead,
            pull_period=strategy.pull_period, copies=2,
        )  # fmt: skip
    if isinstance(strategy, Gossip):
        return Pattern(
            kind="pairs", num_bytes=size.gradient_bytes, period=1 / strategy.probability, copies=3
        )
    if isinstance(strategy, Hogwild):
        return Pattern(
            kind="nodes", num_bytes=size.gradient_bytes, period=strategy.averaging_period, copies=3
        )
    period = 1.0
    if isinstance(strategy, Adasum | PopulationStrategy):
        period = strategy.averaging_period if isinstance(strategy, Adasum) else math.inf
    plain = sent_by_sum(size, world_size)
    sent = strategy.bytes_per_step(size.shapes, size.element_size, world_size)
    ratio = 1.0 if sent is None or not plain or math.isinf(period) else sent * period / plain
    return Pattern(
        kind="sum", num_bytes=size.gradient_bytes, period=period, topology="ring",
        wire_ratio=ratio, copies=3,
    )  # fmt: skip


def sent_by_sum(size: ModelSize, world_size: int) -> float:
    """What one rank sends for a sum of all gradients without compression."""
    return 2 * (world_size - 1) / world_size * size.gradient_bytes


def _all_reduce(strategy: AllReduce, size: ModelSize, world_size: int) -> Pattern:
    ratio, codec = _compressed(strategy, size, world_size)
    buckets = bucket_shapes(size.shapes, size.element_size, strategy.bucket_bytes)
    last = size.element_size * sum(math.prod(shape) for shape in buckets[-1]) if buckets else 0
    early = 1.0 if strategy.double_buffering else 1 - last / max(1, size.gradient_bytes)
    return Pattern(
        kind="sum",
        num_bytes=size.gradient_bytes,
        topology=strategy.topology,
        in_place=codec is None,
        wire_ratio=ratio,
        codec=codec,
        hidden_share=early,
        num_messages=len(buckets),
        num_backup_workers=strategy.num_backup_workers,
    )


def _averaging(strategy: AveragingStrategy, size: ModelSize, world_size: int) -> Pattern:
    ratio, codec = _compressed(strategy, size, world_size)
    extra = size.buffer_bytes
    if strategy.optimizer_state == "average":
        extra += size.optimizer_bytes
    num_bytes = size.gradient_bytes + extra
    if ratio is not None:  # only the parameters are compressed
        ratio = (ratio * size.gradient_bytes + extra) / max(1, num_bytes)
    return Pattern(
        kind="sum",
        num_bytes=num_bytes,
        period=_period(strategy),
        target_share=_share(strategy),
        topology=strategy.topology,
        wire_ratio=ratio,
        codec=codec,
        copies=3,
        num_messages=1 + (extra > 0),
    )


def _stages(strategy: SyncStrategy, size: ModelSize) -> Pattern:
    period: float | None = math.inf
    if isinstance(strategy, AveragingStrategy):
        period = _period(strategy)
    elif isinstance(strategy, Competition):
        period = strategy.period
    return Pattern(
        kind="stages",
        num_bytes=size.checkpoint_bytes,
        period=period,
        target_share=_share(strategy),
    )


def _period(strategy: AveragingStrategy) -> float | None:
    if isinstance(strategy, ParameterAveraging) and strategy.averaging_period == "auto":
        return None
    return strategy.make_period().steps(0)  # of periods that adapt, the first round's


def _share(strategy: SyncStrategy) -> float:
    return strategy.target_share if isinstance(strategy, ParameterAveraging) else 0.05


def _compressed(
    strategy: CollectiveStrategy, size: ModelSize, world_size: int
) -> tuple[float | None, str | None]:
    """What is left of the bytes of a sum, and the compression's name."""
    compression = strategy.resolved_compression()
    if compression is None or world_size == 1:
        return 1.0, None
    sent = compression.wire_bytes(size.shapes, size.element_size, world_size)
    name = type(compression).__name__
    plain = sent_by_sum(size, world_size)
    return (None if sent is None else sent / plain if plain else 1.0), name
