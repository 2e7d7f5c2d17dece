"""The base of strategies that exchange tensors with all other ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sparkdl.comm import compression as compressions
from sparkdl.comm import topology as topologies
from sparkdl.comm.compression.compression import Compression, Shapes, all_reduce_bytes, count
from sparkdl.config import TrainConfig
from sparkdl.sync.exchange_pattern import ModelSize, Pattern, ring_bytes
from sparkdl.sync.strategy import SyncStrategy


@dataclass(frozen=True, kw_only=True)
class CollectiveStrategy(SyncStrategy):
    """A strategy whose exchange is a sum over ranks; how the sum is formed is a choice apart."""

    compression: Compression | str | None = None
    """Compression of what travels: a `Compression`, its name, or None."""
    topology: str = "auto"
    """Along which ways sums are formed, one of `topology.TOPOLOGIES`: ``auto``, ``ring``, ``tree``,
    ``hierarchical`` or ``shared`` (memory)."""

    def check(self, config: TrainConfig, world_size: int) -> None:
        topologies.check(self.topology)
        compression = self.resolved_compression()
        if compression is not None:
            compression.check(config, world_size)

    def resolved_compression(self) -> Compression | None:
        """The compression as an object."""
        return compressions.resolve(self.compression)

    def messages(self, shapes: Shapes, element_size: int) -> Sequence[Shapes]:
        """Shapes of the trained parameters that are summed at a time; by default all of them."""
        return [shapes]

    def pattern(self, size: ModelSize, world_size: int) -> Pattern:
        """See `SyncStrategy.pattern`: a sum at every step, along the topology, compressed."""
        pattern = Pattern(num_bytes=size.gradient_bytes, topology=self.topology, copies=3)
        plain = ring_bytes(size.gradient_bytes, world_size)
        if not plain:
            return pattern
        compression, element_size = self.resolved_compression(), size.element_size
        sent = [
            all_reduce_bytes(count(shapes) * element_size, world_size)
            if compression is None
            else compression.wire_bytes(shapes, element_size, world_size)
            for shapes in self.messages(size.shapes, element_size)
        ]
        ratio = None if None in sent else sum(filter(None, sent)) / plain
        codec = None if compression is None else type(compression).__name__
        return replace(pattern, wire_ratio=ratio, codec=codec)
