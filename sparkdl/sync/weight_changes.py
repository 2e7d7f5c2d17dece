"""Changes of parameters, which travel as flat sums over ranks, compressed or not.

What is sent is how far parameters have moved from where all ranks began. The sums need not be
waited for at once: a strategy may train on while they are under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from sparkdl.comm.communicator import Communicator
from sparkdl.sync.gradient_buckets import BucketSums, make_buckets

if TYPE_CHECKING:
    from sparkdl.comm.compression.compression import Compression

BUCKET_BYTES = 25 << 20
"""Size from which on parameters travel in several messages."""


class Changes(BucketSums):
    """Sums over ranks of one change per parameter. All ranks call alike.

    Args:
        parameters: whose changes these are.
        comm: the gang.
        compression: what they are sent with; None: as they are.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        comm: Communicator,
        compression: Compression | None,
    ) -> None:
        self._buckets = make_buckets(parameters, BUCKET_BYTES, comm.allocate)
        super().__init__(self._buckets, comm, compression)
        views = {
            id(parameter): view
            for bucket in self._buckets
            for parameter, view in zip(bucket.parameters, bucket.gradients, strict=True)
        }
        self.tensors = [views[id(parameter)] for parameter in parameters]
        """This rank's changes before `start_all`, the sums over ranks after `wait`."""

    def take(self, parameters: Sequence[torch.Tensor], anchor: Sequence[torch.Tensor]) -> None:
        """Note how far ``parameters`` are from ``anchor``."""
        for change, parameter, begin in zip(self.tensors, parameters, anchor, strict=True):
            torch.sub(parameter.detach(), begin, out=change)

    def start_all(self, share: float = 1.0) -> None:
        """Start to sum ``share`` of this rank's changes with those of the others."""
        for number, bucket in enumerate(self._buckets):
            if share == 0:
                bucket.flat.zero_()  # not multiplied: who does not count may hold infinities
            elif share != 1:
                bucket.flat.mul_(share)
            self.start(number, bucket.flat)

    def sums(self) -> list[torch.Tensor]:
        """What has arrived, as few flat tensors."""
        assert not self.pending, "sums are still under way"
        return [bucket.flat for bucket in self._buckets]

    def set_sums(self, sums: Sequence[torch.Tensor]) -> None:
        """Restore what `sums` gave."""
        for bucket, values in zip(self._buckets, sums, strict=True):
            bucket.flat.copy_(values)
