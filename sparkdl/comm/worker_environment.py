"""A worker's place in the gang: its rank, its node, and the channel to the driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkdl.comm.access import Address


@dataclass(frozen=True, kw_only=True)
class SparkTask:
    """A task of Spark's, by its own numbers."""

    stage_id: int
    partition: int
    attempt_id: int
    """No other task of the application has it, nor has the one that replaces this task."""


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """A worker's place in the gang, as the launcher found it."""

    rank: int
    world_size: int
    address: str
    """Address that Spark uses for this host; the peers can reach it."""
    gpu_addresses: tuple[str, ...]
    """Addresses that Spark gave this task, such as ``("1",)``; empty without GPU scheduling."""
    channel: Address
    """As this rank calls it."""
    task: SparkTask | None = None
    """In which the worker runs; None: in none."""


def numbered(hosts: Sequence[object]) -> tuple[int, ...]:
    """Number of each rank's node, from 0 in the order of first appearance in ``hosts``."""
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(host, len(numbers)) for host in hosts)


def local_rank(nodes: Sequence[int], rank: int) -> int:
    """Place of ``rank`` among the ranks of its node."""
    return list(nodes[:rank]).count(nodes[rank])
