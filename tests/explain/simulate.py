"""Steps of many workers, played event by event, for gangs that nobody has at hand.

Every worker has a clock. Its steps take lognormal times; messages leave when sender and receiver
are ready and the link is free. This knows nothing of the formulae in `cost_model` and
`predict_times`, which are compared with it for 8 to 1,000 workers.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparkdl.explain.cost_model import Compute, Layout, Network, NetworkLink, StageCosts
from sparkdl.sync.exchange_pattern import Pattern

Clocks = npt.NDArray[np.float64]

_FORWARD_SHARE = 0.3
_BACKWARD_SHARE = 0.6
"""When in a step gradients come: forward, then backward, then the update."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What is simulated."""

    compute: Compute
    network: Network
    layout: Layout
    stages: StageCosts | None = None


def simulate(
    cluster: Cluster, pattern: Pattern, topology: str, *, rows: int, num_steps: int, seed: int
) -> float:
    """Seconds per step of a run, from its beginning until all workers are done.

    Args:
        cluster: machines and workers.
        pattern: what the strategy does; with a period.
        topology: ``ring``, ``tree``, ``shared`` or ``hierarchical``.
        rows: samples of a worker's batch.
        num_steps: steps to play; whole rounds.
        seed: of the workers' times.
    """
    run = _Run(cluster, pattern, topology, rows, np.random.default_rng(seed))
    play = {"sum": run.sums, "messages": run.server, "stages": run.stages}[pattern.kind]
    if pattern.in_pairs:
        play = run.pairs
    play(num_steps)
    return float(run.clocks.max()) / num_steps


class _Run:
    def __init__(
        self,
        cluster: Cluster,
        pattern: Pattern,
        topology: str,
        rows: int,
        generator: np.random.Generator,
    ) -> None:
        self._cluster = cluster
        self._pattern = pattern
        self._topology = topology
        self._generator = generator
        self._world_size = cluster.layout.world_size
        self.clocks: Clocks = np.zeros(self._world_size)
        spread = cluster.compute.rank_spread
        self._typical = cluster.compute.median_seconds(rows) * np.exp(
            spread * generator.standard_normal(self._world_size)
        )

    def _steps(self) -> Clocks:
        """What a step takes each worker."""
        spread = self._cluster.compute.step_spread
        draws = self._generator.standard_normal(self._world_size)
        return np.asarray(self._typical * np.exp(spread * draws))

    # --- sums over all ranks ------------------------------------------------------------------

    def sums(self, num_steps: int) -> None:
        """Steps apart, then a sum, again and again; with a period of one, gradients."""
        pattern = self._pattern
        period = max(1, round(pattern.period))
        for step in range(1, num_steps + 1):
            began, took = self.clocks.copy(), self._steps()
            self.clocks += took
            if step % period:
                continue
            if pattern.num_backup_workers:
                self._leave_out_late_ones()
            elif period == 1 and self._topology == "ring" and pattern.hidden_share:
                self._sum_buckets(began, took)
            else:
                for _ in range(pattern.num_messages):
                    self.clocks = self._summed(self.clocks, self._bytes())

    def _bytes(self) -> float:
        ratio = 1.0 if self._pattern.wire_ratio is None else self._pattern.wire_ratio
        return self._pattern.num_bytes * ratio / self._pattern.num_messages

    def _sum_buckets(self, began: Clocks, took: Clocks) -> None:
        """Each bucket leaves as soon as its gradients are there and the one before has arrived."""
        free = began.copy()
        count = self._pattern.num_messages
        for bucket in range(count):
            come = _FORWARD_SHARE + _BACKWARD_SHARE * (bucket + 1) / count
            ready = np.maximum(free, began + come * took)
            free = self._summed(ready, self._bytes())
        self.clocks = free + (1 - _FORWARD_SHARE - _BACKWARD_SHARE) * took  # the update

    def _leave_out_late_ones(self) -> None:
        """The step ends with those that are waited for; the others go on when they are done."""
        place = self._world_size - self._pattern.num_backup_workers - 1
        conclusion = np.partition(self.clocks, place)[place]
        on_time = np.full_like(self.clocks, conclusion)
        self.clocks = np.maximum(self.clocks, self._summed(on_time, self._bytes()))

    def _summed(self, ready: Clocks, num_bytes: float) -> Clocks:
        """When each rank has the sum, given when each is ready."""
        network, layout = self._cluster.network, self._cluster.layout
        if self._pattern.between_nodes or self._topology in ("shared", "hierarchical"):
            return self._summed_by_nodes(ready, num_bytes)
        if self._topology == "tree":
            return _tree(ready, network.messages, num_bytes)
        return _ring(ready, network.messages, num_bytes / layout.world_size)

    def _summed_by_nodes(self, ready: Clocks, num_bytes: float) -> Clocks:
        network, layout = self._cluster.network, self._cluster.layout
        node_of = np.arange(layout.world_size) % layout.num_nodes
        nodes = np.full(layout.num_nodes, -np.inf)
        np.maximum.at(nodes, node_of, ready)
        per_node = layout.ranks_per_node
        share = num_bytes
        if not self._pattern.between_nodes and per_node > 1:
            assert network.shared is not None
            nodes += network.shared.seconds(num_bytes) * max(1.0, per_node / network.shared_ranks)
            is_even = layout.world_size % layout.num_nodes == 0
            share = num_bytes / per_node if is_even else num_bytes
        if layout.num_nodes > 1:
            nodes = _ring(nodes, network.messages, share / layout.num_nodes)
        return np.asarray(nodes[node_of])

    # --- others -------------------------------------------------------------------------------

    def server(self, num_steps: int) -> None:
        """Nobody begins a step before the slowest is at most ``lead`` steps behind."""
        pattern, link = self._pattern, self._cluster.network.messages
        exchange = pattern.latency_rounds * link.latency_seconds
        exchange += pattern.exchanged_bytes * link.byte_seconds
        ended: list[float] = []
        for step in range(num_steps):
            behind = step - 1 - pattern.lead
            if behind >= 0:
                self.clocks = np.maximum(self.clocks, ended[int(behind)])
            self.clocks = self.clocks + self._steps() + exchange
            ended.append(float(self.clocks.max()))

    def pairs(self, num_steps: int) -> None:
        """Random pairs meet."""
        took = self._cluster.network.messages.seconds(self._pattern.num_bytes)
        for _ in range(num_steps):
            self.clocks += self._steps()
            order = self._generator.permutation(self._world_size)
            half = self._world_size // 2
            meets = self._generator.random(half) * self._pattern.period < 1
            one, two = order[:half][meets], order[half : 2 * half][meets]
            met = np.maximum(self.clocks[one], self.clocks[two]) + took
            self.clocks[one] = met
            self.clocks[two] = met

    def stages(self, num_steps: int) -> None:
        """A job per round: tasks take the next free slot; the driver merges."""
        stages, period = self._cluster.stages, self._pattern.period
        assert stages is not None
        now = 0.0
        for _ in range(num_steps // round(period)):
            took = sum(self._steps() for _ in range(round(period)))
            free = [now] * self._cluster.layout.at_once
            for seconds in np.asarray(took).tolist():
                heapq.heapreplace(free, free[0] + seconds)
            now = max(free) + stages.fixed_seconds
            now += self._world_size * self._pattern.num_bytes * stages.byte_seconds
        self.clocks[:] = now


def _ring(ready: Clocks, link: NetworkLink, piece_bytes: float) -> Clocks:
    """Each of ``2 (W - 1)`` times a rank sends a piece when it has the one before it."""
    clocks, took = ready, link.seconds(piece_bytes)
    for _ in range(2 * (len(ready) - 1)):
        clocks = np.maximum(clocks, np.roll(clocks, 1)) + took
    return clocks


def _tree(ready: Clocks, link: NetworkLink, num_bytes: float) -> Clocks:
    """Up a binomial tree and down again."""
    clocks, took = ready.copy(), link.seconds(num_bytes)
    count = len(clocks)
    distances = []
    distance = 1
    while distance < count:
        distances.append(distance)
        parents = np.arange(0, count - distance, 2 * distance)
        arrived = np.maximum(clocks[parents], clocks[parents + distance]) + took
        clocks[parents] = arrived
        distance *= 2
    for distance in reversed(distances):
        parents = np.arange(0, count - distance, 2 * distance)
        arrived = clocks[parents] + took
        clocks[parents] = arrived  # a rank's link carries one message at a time
        clocks[parents + distance] = arrived
    return clocks
