"""The cost model: seconds of the parts of a step, by formulae from measured numbers.

Tests compare them with steps that are played event by event; docs/explain_model.md derives them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import NormalDist

import numpy as np

MEETING_SECONDS = 0.8e-3
"""Time by which each further rank delays the moment when all have met, by
``benchmarks/rendezvous.py``: there 1,000 ranks have met in 0.83 s. What Spark takes to launch a
further task is not known."""


@dataclass(frozen=True, kw_only=True)
class NetworkLink:
    """A way on which ``n`` bytes take ``latency_seconds + n * byte_seconds`` (Hockney 1994)."""

    latency_seconds: float
    byte_seconds: float

    def seconds(self, num_bytes: float, num_messages: float = 1) -> float:
        """So many messages one after the other, with so many bytes in all."""
        return num_messages * self.latency_seconds + num_bytes * self.byte_seconds


@dataclass(frozen=True, kw_only=True)
class Compute:
    """A worker's own part of a step: reading the batch, forward, backward, update."""

    threads: float
    """Threads of each worker while it was measured."""
    fixed_seconds: float
    """Time of a step without rows: launches of operations, the update."""
    row_seconds: float
    step_spread: float = 0.0
    """Standard deviation of the logarithm of one worker's steps: these vary by themselves."""
    rank_spread: float = 0.0
    """The same of the workers' typical steps: some hosts are slower than others."""

    def median_seconds(self, rows: float) -> float:
        """Typical step of a typical worker on ``rows`` samples."""
        return self.fixed_seconds + rows * self.row_seconds

    def mean_seconds(self, rows: float) -> float:
        """Return the mean seconds of a step over steps and workers."""
        spread = self.step_spread**2 + self.rank_spread**2
        return self.median_seconds(rows) * math.exp(spread / 2)

    def slowest_seconds(
        self, rows: float, *, waited_for: int, world_size: int, steps: int = 1
    ) -> float:
        """Mean per step of the ``waited_for``-th of ``world_size`` workers to end ``steps`` steps.

        Steps are lognormal and independent; the sum of several is nearly lognormal too (Fenton
        1960), with the same mean and less spread. That of the hosts does not shrink. The worker's
        place among the others is turned into a quantile (Blom 1958).
        """
        own = math.log1p(math.expm1(self.step_spread**2) / steps)
        shift = (self.step_spread**2 - own) / 2
        spread = math.sqrt(own + self.rank_spread**2)
        quantile = NormalDist().inv_cdf((waited_for - 0.375) / (world_size + 0.25))
        return self.median_seconds(rows) * math.exp(shift + spread * quantile)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The places of workers, and how many of them run at a time."""

    world_size: int
    num_nodes: int
    num_slots: int | None = None
    """Tasks that run at a time, which may be fewer than workers in rounds only; None: all."""

    @property
    def at_once(self) -> int:
        """Workers that run at a time."""
        return min(self.world_size, self.num_slots or self.world_size)

    @property
    def num_waves(self) -> int:
        """Tasks that run one after the other in a slot, where slots are fewer than workers."""
        return -(-self.world_size // self.at_once)

    @property
    def ranks_per_node(self) -> int:
        """Workers that run at a time on the fullest machine."""
        return -(-self.at_once // self.num_nodes)


@dataclass(frozen=True, kw_only=True)
class Network:
    """The speed at which ranks exchange data."""

    messages: NetworkLink
    """Between two ranks, by messages."""
    shared: NetworkLink | None = None
    """A sum over ranks of one machine in shared memory, of what lies there; None: none."""
    shared_ranks: int = 2
    """Ranks of a machine among which it was measured."""

    def sum_seconds(self, num_bytes: float, layout: Layout, topology: str) -> float:
        """A sum of ``num_bytes`` over all ranks; every rank gets it.

        A tree has ``2 ceil(log2 W)`` messages of all bytes one after the other. In shared memory
        each rank reads and writes all bytes, whatever the number of ranks, until the memory is at
        its limit: it is taken to be there with as many ranks as it was measured with.

        Args:
            num_bytes: size of each rank's summand.
            layout: where the ranks are.
            topology: one of ``ring``, ``tree``, ``shared`` or ``hierarchical``.
        """
        if topology == "tree":
            depth = 2 * math.ceil(math.log2(layout.world_size))
            return self.messages.seconds(depth * num_bytes, depth)
        if topology == "ring" or self.shared is None:
            return ring_seconds(self.messages, num_bytes, layout.world_size)
        ranks = layout.ranks_per_node
        inside = self.shared.seconds(num_bytes) * max(1.0, ranks / self.shared_ranks)
        return inside * (ranks > 1) + between_nodes_seconds(self.messages, num_bytes, layout)


def ring_seconds(link: NetworkLink, num_bytes: float, world_size: int) -> float:
    """A sum along a ring: ``2 (W - 1)`` messages of a ``W``-th each (Patarasu & Yuan 2009)."""
    num_messages = 2 * (world_size - 1)
    return link.seconds(num_messages / world_size * num_bytes, num_messages)


def between_nodes_seconds(link: NetworkLink, num_bytes: float, layout: Layout) -> float:
    """The sum over machines, once each has its own: every worker has a part of it, if it can."""
    is_even = layout.world_size % layout.num_nodes == 0
    share = num_bytes / layout.ranks_per_node if is_even else num_bytes
    return ring_seconds(link, share, layout.num_nodes)


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of ``(x, y)``, neither negative, with the least relative squared error.

    Small messages count as much as large ones: what is wanted of both is a factor.
    """
    x, y = np.array(points, dtype=np.float64).T
    if np.ptp(x) > 0:
        slope, intercept = np.polyfit(x, y, 1, w=1 / y)
        if slope <= 0:
            return float(np.sum(1 / y) / np.sum(1 / y**2)), 0.0
        if intercept >= 0:
            return float(intercept), float(slope)
    return 0.0, float(np.sum(x / y) / np.sum((x / y) ** 2))


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """The costs of rounds on plain Spark stages."""

    fixed_seconds: float
    """Time of a round, beyond its steps."""
    byte_seconds: float
    """Time of a round, per byte of one shard's state, which goes to it and comes back."""
    step_seconds: float = 0.0
    """Time of a step in a task, with batches of the size that was asked for."""
    first_seconds: float = 0.0
    """Time that the first round takes more than others."""


@dataclass(frozen=True, kw_only=True)
class Gang:
    """The measurements that a gang of ranks has made."""

    levels: Mapping[tuple[int, int], Compute]
    """Workers of a machine that are at work at the same time, and their threads -> their steps."""
    network: Network | None
    """None: there was one rank only."""
    num_nodes: int = 1
    device: str = "cpu"
    copy_byte_seconds: float = 0.0
    codec_seconds: Mapping[str, float] = field(default_factory=dict)
    """Compression -> seconds that it computes for one exchange of all gradients."""
    optimizer_bytes: int = 0
    peak_bytes: int = 0
    launch_seconds: float = 0.0
    """Time of its launch and its end."""
    num_ranks: int = 1
    """Workers with which that was measured."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """All that was measured."""

    gang: Gang | None
    """None: the cluster runs none."""
    levels: Mapping[int, Compute] = field(default_factory=dict)
    """Workers of a gang that are on one machine -> their steps."""
    task_levels: Mapping[int, Compute]
    """Tasks of rounds that run on one machine at a time -> their steps."""
    stages: StageCosts | None
    """None: rounds were not measured."""
    link_seconds: float = 0.0
    """Time of the checks before anything is launched."""
    spool_seconds: float = 0.0
    """Time of a spool without rows."""
    spool_row_seconds: float = 0.0
    """Time of one slot for a row, which is read, moved, sorted and written."""

    def compute(self, layout: Layout, *, in_rounds: bool) -> Compute:
        """Return the cost of a step for a worker, or for a task of a round."""
        levels = self.task_levels if in_rounds else self.levels
        return interpolated(levels, layout.ranks_per_node)

    def start_seconds(self, *, in_rounds: bool, world_size: int) -> float:
        """Return the seconds of a fit before its first step and at its end, without the spool."""
        if in_rounds:
            return self.link_seconds + (0.0 if self.stages is None else self.stages.first_seconds)
        if self.gang is None:
            return self.link_seconds
        more = max(0, world_size - self.gang.num_ranks)
        return self.link_seconds + self.gang.launch_seconds + more * MEETING_SECONDS


def interpolated(measured: Mapping[int, Compute], number: int) -> Compute:
    """The numbers measured for ``number``, or between its neighbours, or of the nearest."""
    numbers = sorted(measured)
    values = {
        one.name: [getattr(measured[known], one.name) for known in numbers]
        for one in fields(Compute)
    }
    return Compute(**{name: float(np.interp(number, numbers, y)) for name, y in values.items()})
