"""What do strategies share that exchange tensors with all other ranks at once?"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdl.comm import topology as topologies
from sparkdl.sync.strategy import SyncStrategy

if TYPE_CHECKING:
    from sparkdl.comm.communicator import Communicator
    from sparkdl.comm.compression.compression import Compression
    from sparkdl.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class CollectiveStrategy(SyncStrategy):
    """A strategy whose exchange is a sum over ranks; how the sum is formed is a choice apart."""

    compression: Compression | str | None = None
    """How that which travels is made smaller: a `Compression`, its name, or None."""
    topology: str = "auto"
    """Along which ways sums are formed, one of `topology.TOPOLOGIES`: ``auto``, ``ring``, ``tree``,
    ``hierarchical`` or ``shared`` (memory)."""

    def check(self, config: TrainConfig, world_size: int) -> None:
        """See `SyncStrategy.check`."""
        topologies.check(self.topology)
        compression = self.resolved_compression()
        if compression is not None:
            compression.check(config, world_size)

    def resolved_compression(self) -> Compression | None:
        """The compression as an object."""
        if self.compression is None:
            return None
        from sparkdl.comm import compression

        return compression.resolve(self.compression)


def counting_anew(comm: Communicator) -> Communicator:
    """The same communicator with a count of its own: what one strategy sends."""
    counting = copy.copy(comm)
    counting.bytes_sent = 0
    return counting
