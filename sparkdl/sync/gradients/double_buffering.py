"""Double buffering: each step applies the gradients of the one before, while its own travel.

ChainerMN's double buffering (Akiba, Fukuda, Suzuki, "ChainerMN: Scalable Distributed Deep Learning
Framework", 2017): of two sets of gradients one is filled while the other is summed over the ranks.
A step costs the longer of its computation and its communication, instead of nearly their sum, and
learns from gradients that are one step old. They want smaller steps: on a parabola, half the
learning rate without momentum, a 38th with a momentum of 0.9.

The first step of a run updates nothing, and the gradients of its last are never applied, but are
part of its last checkpoint, for a longer run that goes on from there.
"""

from __future__ import annotations

from typing import Any

import torch

from sparkdl.comm.compression.compression import Compression
from sparkdl.sync.gradients.gradient_sums import AllReduceSynchronizer
from sparkdl.sync.strategy import Reduced, SetupArguments, Synchronizer


class DoubleBufferingSynchronizer(AllReduceSynchronizer):
    """Sums gradients at leisure; see `AllReduce.double_buffering`.

    Nothing is sent before the gradients of the step before have arrived, so that a bucket has one
    message under way at a time, as compressors want it.
    """

    sends_early = False

    def __init__(
        self, *setup: *SetupArguments, bucket_bytes: int, compression: Compression | None
    ) -> None:
        super().__init__(*setup, bucket_bytes=bucket_bytes, compression=compression)
        self._underway: Reduced | None = None
        """Sums that come with the other set, with its marks; None before the first step."""

    def _group(self) -> None:
        self._other = self._new_gradients()
        """The set that travels, or has arrived; the parameters' own is filled meanwhile."""
        super()._group()

    def start_sums(self, sums: torch.Tensor) -> None:
        """Nothing: the sums travel with the gradients."""

    def early_sums(self, sums: torch.Tensor, *, waits: bool) -> None:
        """None: the sums travel with the gradients."""

    def reduce_gradients(self, sums: torch.Tensor, divisor: float) -> Reduced:
        """See `Synchronizer.reduce_gradients`: sends this step's, returns those of the last."""
        self._messages.wait()
        self._gradients.settle()
        own = self._with_marks(sums)
        arrived = self._underway or Reduced(torch.zeros_like(own), 0.0)
        self._gradients, self._other = self._other, self._gradients
        self._gradients.attach()
        self._gradients.drop_unused(self._marks_of(arrived.sums, sums))
        self._underway = Reduced(own, divisor)
        self._messages.start_plain(own)
        for number, bucket in enumerate(self._other.buckets):
            self._messages.start(number, bucket.flat)
        return arrived._replace(sums=arrived.sums[: len(sums)])

    def follow_freezing(self) -> None:
        """See `Synchronizer.follow_freezing`: gradients under way are of other parameters."""
        Synchronizer.follow_freezing(self)

    def close_round(self) -> None:
        """Wait for what is under way; it stays for the next step to apply."""
        self._messages.wait()

    def state_dict(self) -> dict[str, Any]:
        """See `Synchronizer.state_dict`; a round must have been closed."""
        assert not self._messages.pending, "gradients are still under way"
        underway = None
        if self._underway is not None:
            underway = {
                "gradients": [bucket.flat for bucket in self._other.buckets],
                "sums": self._underway.sums,
                "divisor": self._underway.divisor,
            }
        return {**super().state_dict(), "underway": underway}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._underway = None
        if state["underway"] is None:
            return
        saved = state["underway"]["gradients"]
        for bucket, values in zip(self._other.buckets, saved, strict=True):
            bucket.flat.copy_(values)
        sums = state["underway"]["sums"].to(self._gradients.marks.device)
        self._underway = Reduced(sums, state["underway"]["divisor"])

    def close(self) -> None:
        self._other.release()
        super().close()
