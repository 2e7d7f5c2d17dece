"""What has been measured, in the numbers that the model takes?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from sparkdl.explain.cost import Compute, Layout, Network


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
