"""Sums of gradients over ranks: buckets are sent while the backward pass still runs.

A bucket whose gradients are all there is sent at once, so that communication overlaps with the
rest of the backward pass (Li et al., "PyTorch Distributed", VLDB 2020). Buckets are always sent
in the same order: ranks that have no samples, or in which a parameter took no part, send theirs,
with zeros, at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparkdl.comm.communicator import Communicator, Pending
from sparkdl.sync.collective import counting_anew
from sparkdl.sync.gradient_buckets import Bucket, FlatGradients
from sparkdl.sync.strategy import MakeOptimizer, Reduced, Synchronizer

if TYPE_CHECKING:
    from sparkdl.comm.compression.compression import Compression


class AllReduceSynchronizer(Synchronizer):
    """Sums the gradients of every step; `AllReduce` makes it, and its variants inherit from it."""

    sends_early = True
    """Whether buckets are sent while the backward pass runs."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        comm: Communicator,
        bucket_bytes: int,
        compression: Compression | None = None,
    ) -> None:
        self.model = model
        self._comm = counting_anew(comm)
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(parameters)
        self._gradients = FlatGradients(parameters, bucket_bytes, self._comm.allocate)
        self._buckets = self._gradients.buckets
        self._compressors = []
        if compression is not None and comm.world_size > 1:
            self._compressors = [
                compression.make(bucket.gradients, self._comm) for bucket in self._buckets
            ]
        self._pending: list[Pending] = []
        self._sums: torch.Tensor | None = None
        self._num_sent = 0
        self._is_syncing = True
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        if self.sends_early and comm.world_size > 1:
            self._attach_hooks()

    @property
    def bytes_sent(self) -> int:
        return self._comm.bytes_sent

    def zero_gradients(self) -> None:
        self._gradients.zero()
        self._num_sent = 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._is_syncing = False
        try:
            yield
        finally:
            self._is_syncing = True

    def start_sums(self, sums: torch.Tensor) -> None:
        if self._comm.world_size == 1:
            return
        # A message of its own: float32 buckets would round the sums. It travels during the
        # backward pass; after it, all ranks would wait once more.
        self._sums = sums
        self._pending.append(self._comm.all_reduce_async(sums))

    def reduce_gradients(self, sums: torch.Tensor, divisor: float) -> Reduced:
        if self._comm.world_size == 1:
            return Reduced(sums, divisor)
        if self._sums is None:  # an empty batch; before the buckets, as on the other ranks
            self.start_sums(sums)
        while self._num_sent < len(self._buckets):
            self._send_next()
        pending, self._pending = self._pending, []
        for message in pending:
            message.wait()
        shared, self._sums = self._sums, None
        assert shared is not None
        return Reduced(shared, divisor)

    def after_step(self, step: int) -> bool:
        """Replicas are equal after every step."""
        return True

    def close_round(self) -> None:
        """Nothing to do: every step closes its round."""

    def state_dict(self) -> dict[str, Any]:
        return {"compressors": [one.state_dict() for one in self._compressors]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._compressors and state["compressors"]:  # a gang of one has none
            for one, values in zip(self._compressors, state["compressors"], strict=True):
                one.load_state_dict(values)

    def rank_state_dict(self) -> dict[str, Any]:
        return {"compressors": [one.rank_state_dict() for one in self._compressors]}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        for one, values in zip(self._compressors, state["compressors"], strict=True):
            one.load_rank_state_dict(values)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._gradients.release()

    def _attach_hooks(self) -> None:
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                hook = _GradientHook(self, bucket)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooks.append(handle)

    def _gradient_is_ready(self, bucket: Bucket) -> None:
        if not self._is_syncing:
            return
        bucket.num_missing -= 1
        if bucket.num_missing < 0:
            raise RuntimeError(
                "a parameter received its gradient twice in one backward pass, after it was sent; "
                "with activation checkpointing use torch.utils.checkpoint(use_reentrant=False)"
            )
        while self._num_sent < len(self._buckets) and not self._buckets[self._num_sent].num_missing:
            self._send_next()

    def _send_next(self) -> None:
        number = self._num_sent
        self._num_sent += 1
        self._pending.append(self._start(number, self._buckets[number].flat))

    def _start(self, number: int, flat: torch.Tensor) -> Pending:
        """Start to sum bucket ``number`` over the ranks."""
        if self._compressors:
            return self._compressors[number].start(flat)
        return self._comm.all_reduce_async(flat)


class _GradientHook:
    """Tells the synchronizer that one gradient of a bucket is there."""

    def __init__(self, synchronizer: AllReduceSynchronizer, bucket: Bucket) -> None:
        self._synchronizer = synchronizer
        self._bucket = bucket

    def __call__(self, parameter: torch.Tensor) -> None:
        self._synchronizer._gradient_is_ready(self._bucket)
