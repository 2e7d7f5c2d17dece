"""The exchanges of a strategy's workers, their periods and their waits: values for `explain`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The memory that a module's tensors take; all sizes in bytes."""

    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the trained parameters."""
    element_size: int
    """Size of one number of them."""
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
        """The size of the tensors that a checkpoint holds."""
        return self.replica_bytes + self.optimizer_bytes

    @property
    def worker_bytes(self) -> int:
        """A worker's tensors: replica, gradients, optimizer, and a checkpoint's copy of these."""
        return 2 * self.checkpoint_bytes + self.gradient_bytes


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """The exchanges and waits of a strategy's workers, as `SyncStrategy.pattern` returns them.

    There are three kinds. ``sum``: ``num_bytes`` are summed over all ranks, along a topology.
    ``messages``: a rank has ``latency_rounds`` messages one after the other, and
    ``exchanged_bytes`` pass its link. ``stages``: states of ``num_bytes`` go to the tasks of a
    Spark job and come back.
    """

    kind: Literal["sum", "messages", "stages"] = "sum"
    num_bytes: float
    """Size of what is summed, sent, or carried to one task, at a time."""
    period: float = 1
    """Steps between two exchanges."""
    target_share: float | None = None
    """Part of the time that exchanges take, which sets the period; None: the period holds."""
    copies: float = 0.0
    """Number of times that ``num_bytes`` are copied for an exchange, besides what travels."""

    topology: str = "ring"
    """Topology of a sum, as the user writes it."""
    between_nodes: bool = False
    """True if the sum is over machines, whose workers share what is summed."""
    in_place: bool = False
    """True if what is summed lies in shared memory already, where there is one."""
    wire_ratio: float | None = 1.0
    """Bytes on the wire over those of a sum without compression; None: it depends on the data."""
    codec: str | None = None
    """The compression, by the name of its class."""
    hidden_share: float = 0.0
    """Part of the bytes that may travel while the backward pass goes on."""
    num_messages: int = 1
    """Sums one after the other into which one is cut (buckets)."""

    latency_rounds: float = 0.0
    exchanged_bytes: float = 0.0
    """Through a rank's link, one after the other, per exchange by messages."""
    sent_bytes: float = 0.0
    """Part of these bytes that the rank sends, on the average over ranks."""

    in_pairs: bool = False
    """True if a rank waits for one other rank, not for all of them."""
    lead: float = 0
    """Steps that a worker may be ahead of the slowest; infinite: it never waits."""
    num_backup_workers: int = 0
    """Workers that no step waits for."""

    @property
    def waits_every(self) -> float:
        """Steps in which one worker's slow steps and its quick ones make up for each other."""
        return max(self.period, 1) + self.lead

    def sent_bytes_per_step(self, world_size: int) -> float | None:
        """Return how many bytes a rank sends per step; of stages a task's states, back and forth.

        None: it depends on the data, or on how long things take.
        """
        if self.target_share is not None:
            return None
        if self.kind == "stages":
            return 2 * self.num_bytes / self.period
        if self.kind == "messages":
            return self.sent_bytes / self.period
        if self.wire_ratio is None:
            return None
        return ring_bytes(self.num_bytes, world_size) * self.wire_ratio / self.period


def ring_bytes(num_bytes: float, world_size: int) -> float:
    """Return how many bytes one rank sends for a sum of ``num_bytes`` along a ring."""
    return 2 * (world_size - 1) / world_size * num_bytes
