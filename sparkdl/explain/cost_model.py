"""The cost model: seconds of the parts of a step, by formulae from measured numbers.

A CPU, a GPU, shared memory or a network differ in the numbers only. Tests compare the formulae
with steps that are played event by event; docs/explain.md derives each of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from statistics import NormalDist
from typing import TypeVar

_POINTS = 256
"""Places at which the expectation of a maximum is summed up; its error is far below 1 %."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way on which ``n`` bytes take ``latency_seconds + n * byte_seconds`` (Hockney 1994)."""

    latency_seconds: float
    byte_seconds: float

    def seconds(self, num_bytes: float) -> float:
        """One message."""
        return self.latency_seconds + num_bytes * self.byte_seconds


@dataclass(frozen=True, kw_only=True)
class Compute:
    """A worker's own part of a step: reading the batch, forward, backward, update."""

    fixed_seconds: float
    """Of a step without rows: launches of operations, the update."""
    row_seconds: float
    step_spread: float = 0.0
    """Standard deviation of the logarithm of one worker's steps: these vary by themselves."""
    rank_spread: float = 0.0
    """The same of the workers' typical steps: some hosts are slower than others."""

    def median_seconds(self, rows: float) -> float:
        """Typical step of a typical worker on ``rows`` samples."""
        return self.fixed_seconds + rows * self.row_seconds

    def mean_seconds(self, rows: float) -> float:
        """What steps take on the average over steps and workers."""
        spread = self.step_spread**2 + self.rank_spread**2
        return self.median_seconds(rows) * math.exp(spread / 2)

    def slowest_seconds(
        self, rows: float, *, waited_for: int, world_size: int, steps: int = 1
    ) -> float:
        """Mean per step of the ``waited_for``-th of ``world_size`` workers to end ``steps`` steps.

        Steps are lognormal and independent; the sum of several is nearly lognormal too (Fenton
        1960), with the same mean and less spread. That of the hosts does not shrink.
        """
        own = math.log1p(math.expm1(self.step_spread**2) / steps)
        shift = (self.step_spread**2 - own) / 2
        spread = math.sqrt(own + self.rank_spread**2)
        factor = expected_order(waited_for, world_size, spread)
        return self.median_seconds(rows) * math.exp(shift) * factor


@lru_cache(maxsize=4096)
def expected_order(place: int, count: int, spread: float) -> float:
    """Expectation of the ``place``-th smallest of ``count`` lognormal numbers of median 1.

    The largest by summing up the quantiles of the maximum, others at the quantile of Blom (1958).
    """
    if spread == 0 or count < 1:
        return 1.0
    normal = NormalDist()
    if place < count:
        quantile = normal.inv_cdf((place - 0.375) / (count + 0.25))
        return math.exp(spread * quantile)
    total = 0.0
    for point in range(_POINTS):
        share = ((point + 0.5) / _POINTS) ** (1 / count)
        total += math.exp(spread * normal.inv_cdf(min(share, 1 - 1e-15)))
    return total / _POINTS


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where workers are: ``num_nodes`` machines with up to ``ranks_per_node`` of them each."""

    world_size: int
    num_nodes: int

    @property
    def ranks_per_node(self) -> int:
        """Workers of the fullest machine."""
        return -(-self.world_size // self.num_nodes)

    @property
    def is_even(self) -> bool:
        """Whether all machines have as many workers."""
        return self.world_size % self.num_nodes == 0


@dataclass(frozen=True, kw_only=True)
class Network:
    """How fast ranks exchange."""

    messages: Link
    """Between two ranks, by messages."""
    shared: Link | None = None
    """A sum over ranks of one machine in shared memory, of what lies there; None: none."""
    staged: Link | None = None
    """The same of what must be copied there and back."""
    shared_ranks: int = 2
    """Ranks of a machine among which the two were measured."""

    def sum_seconds(
        self, num_bytes: float, layout: Layout, topology: str, *, in_place: bool = True
    ) -> float:
        """A sum of ``num_bytes`` over all ranks; every rank gets it.

        Args:
            num_bytes: size of each rank's summand.
            layout: where the ranks are.
            topology: one of ``ring``, ``tree``, ``shared`` or ``hierarchical``.
            in_place: whether the summands lie in shared memory, where there is one.
        """
        if layout.world_size == 1:
            return 0.0
        inside = self.shared if in_place else self.staged
        if topology == "tree":
            return tree_seconds(self.messages, num_bytes, layout.world_size)
        if topology == "ring" or inside is None:
            return ring_seconds(self.messages, num_bytes, layout.world_size)
        found = shared_seconds(inside, num_bytes, layout.ranks_per_node, self.shared_ranks)
        if layout.num_nodes > 1:
            share = num_bytes / layout.ranks_per_node if layout.is_even else num_bytes
            found += ring_seconds(self.messages, share, layout.num_nodes)
        return found


def ring_seconds(link: Link, num_bytes: float, world_size: int) -> float:
    """A sum along a ring: ``2 (W - 1)`` messages of a ``W``-th each (Patarasu & Yuan 2009)."""
    if world_size < 2:
        return 0.0
    return 2 * (world_size - 1) * link.seconds(num_bytes / world_size)


def tree_seconds(link: Link, num_bytes: float, world_size: int) -> float:
    """A sum up a binomial tree and down again: ``2 ceil(log2 W)`` messages of it all."""
    return 2 * math.ceil(math.log2(max(1, world_size))) * link.seconds(num_bytes)


def shared_seconds(link: Link, num_bytes: float, ranks: int, measured_ranks: int) -> float:
    """A sum in the memory of one machine.

    Each rank reads and writes ``num_bytes``, whatever their number, until the memory is at its
    limit: it is taken to be there with as many ranks as it was measured with.
    """
    return link.seconds(num_bytes) * max(1.0, ranks / measured_ranks) if ranks > 1 else 0.0


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope, neither negative, with the least relative squared error.

    Small messages count as much as large ones: what is wanted of both is a factor.

    Args:
        points: ``(x, y)`` with positive y; of a single x the slope takes it all.
    """
    weights = [1 / (y * y) for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    if spread > 0:
        pairs = zip(weights, points, strict=True)
        slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in pairs) / spread
        if slope <= 0:
            return mean_y, 0.0
        if (intercept := mean_y - slope * mean_x) >= 0:
            return intercept, slope
    # Through the origin.
    pairs = zip(weights, points, strict=True)
    squares = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
    return 0.0, sum(w * x * y for w, (x, y) in pairs) / squares


@dataclass(frozen=True, kw_only=True)
class Level:
    """Workers at work on one machine at the same time, and what a step takes each then."""

    ranks_per_node: int
    threads: int
    compute: Compute


@dataclass(frozen=True, kw_only=True)
class Stages:
    """What a round on plain Spark stages costs beyond its steps."""

    fixed_seconds: float
    byte_seconds: float
    """Per byte of one shard's state, which goes to it and comes back."""

    def seconds(self, num_bytes: float, num_shards: int) -> float:
        """One round."""
        return self.fixed_seconds + num_shards * num_bytes * self.byte_seconds


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What a fit takes besides its steps."""

    start_seconds: float = 0.0
    """Checks, launch of a gang, and the end."""
    stage_start_seconds: float = 0.0
    """The same of rounds on plain stages."""
    spool_seconds: float = 0.0
    """Of a spool without rows."""
    spool_row_seconds: float = 0.0
    """Of one slot: one row is read, moved, sorted and written."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """All that was measured."""

    levels: tuple[Level, ...]
    """Of gangs, whose workers share the cores of a machine."""
    stage_levels: tuple[Level, ...] = ()
    """Of rounds on plain stages, whose tasks have the threads of a task."""
    network: Network | None
    """None: there was one rank only."""
    device: str = "cpu"
    copy_byte_seconds: float = 0.0
    codec_seconds: Mapping[str, float] = field(default_factory=dict)
    """Compression -> seconds that it computes for one exchange of all gradients."""
    stages: Mapping[int, Stages] = field(default_factory=dict)
    """Tasks at a time, which share machines with each other and the driver -> their rounds."""
    fixed: Fixed = field(default_factory=Fixed)

    def compute(self, layout: Layout, kind: str, num_slots: int | None = None) -> Compute:
        """What a step takes a worker, or a task of a round: measured, or between two of them."""
        if kind != "stages":
            levels, ranks_per_node = self.levels, layout.ranks_per_node
        else:
            at_once = _at_once(layout, num_slots)
            levels, ranks_per_node = self.stage_levels, -(-at_once // layout.num_nodes)
        return interpolated(
            {level.ranks_per_node: level.compute for level in levels}, ranks_per_node
        )

    def round_seconds(
        self, num_bytes: float, layout: Layout, num_slots: int | None = None
    ) -> float:
        """What a round on plain stages takes beyond its steps; ``num_bytes`` of a shard's state."""
        stages = interpolated(self.stages, _at_once(layout, num_slots))
        return stages.seconds(num_bytes, layout.world_size)


T = TypeVar("T", Compute, Stages)


def _at_once(layout: Layout, num_slots: int | None) -> int:
    """Tasks of a round that run at a time."""
    return min(layout.world_size, num_slots or layout.world_size)


def interpolated(measured: Mapping[int, T], number: int) -> T:
    """The numbers measured for ``number``, or between its neighbours, or of the nearest."""
    number = min(max(number, min(measured)), max(measured))
    below = max(one for one in measured if one <= number)
    above = min(one for one in measured if one >= number)
    if below == above:
        return measured[below]
    low, high = measured[below], measured[above]
    part = (number - below) / (above - below)
    mixed = {
        one.name: (1 - part) * getattr(low, one.name) + part * getattr(high, one.name)
        for one in fields(low)
    }
    return replace(low, **mixed)
