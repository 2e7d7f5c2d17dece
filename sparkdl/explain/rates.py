"""What has been measured, in the numbers that the model takes?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
    stages: Stages | None = None
    fixed: Fixed = field(default_factory=Fixed)

    def compute(self, layout: Layout, kind: str, num_slots: int | None = None) -> Compute:
        """What a step takes a worker, or a task of a round: measured, or between two of them."""
        if kind != "stages":
            return interpolated(self.levels, layout.ranks_per_node)
        at_once = min(layout.world_size, num_slots or layout.world_size)
        return interpolated(self.stage_levels, -(-at_once // layout.num_nodes))


def interpolated(levels: Sequence[Level], ranks_per_node: int) -> Compute:
    """The numbers of a level, or between its neighbours, or of the nearest."""
    levels = sorted(levels, key=lambda level: level.ranks_per_node)
    below = [level for level in levels if level.ranks_per_node <= ranks_per_node]
    above = [level for level in levels if level.ranks_per_node >= ranks_per_node]
    if not below or not above:
        return (below[-1:] or above[:1])[0].compute
    low, high = below[-1], above[0]
    if low is high:
        return low.compute
    part = (ranks_per_node - low.ranks_per_node) / (high.ranks_per_node - low.ranks_per_node)
    return between(low.compute, high.compute, part)


def between(low: Compute, high: Compute, part: float) -> Compute:
    """``part`` of the way from one to the other."""

    def mixed(first: float, second: float) -> float:
        return (1 - part) * first + part * second

    return Compute(
        fixed_seconds=mixed(low.fixed_seconds, high.fixed_seconds),
        row_seconds=mixed(low.row_seconds, high.row_seconds),
        step_spread=mixed(low.step_spread, high.step_spread),
        rank_spread=mixed(low.rank_spread, high.rank_spread),
    )
