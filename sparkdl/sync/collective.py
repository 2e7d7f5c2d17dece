"""The base of strategies that exchange tensors with all other ranks at once."""

from __future__ import annotations

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
    """How that which travels is made smaller: a `Compression`, its name, or None."""
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

    def exchange_bytes(self, shapes: Shapes, element_size: int, world_size: int) -> int | None:
        """Bytes that one rank sends when tensors of ``shapes`` are summed over all ranks once."""
        compression = self.resolved_compression()
        if compression is not None and world_size > 1:
            return compression.wire_bytes(shapes, element_size, world_size)
        return all_reduce_bytes(count(shapes) * element_size, world_size)

    def pattern(self, size: ModelSize, world_size: int) -> Pattern:
        """See `SyncStrategy.pattern`: a sum at every step, along the topology, compressed."""
        compression = self.resolved_compression()
        pattern = Pattern(num_bytes=size.gradient_bytes, topology=self.topology, copies=3)
        if compression is None or world_size == 1:
            return pattern
        sent = compression.wire_bytes(size.shapes, size.element_size, world_size)
        plain = ring_bytes(size.gradient_bytes, world_size)
        ratio = None if sent is None else sent / plain if plain else 1.0
        return replace(pattern, wire_ratio=ratio, codec=type(compression).__name__)
