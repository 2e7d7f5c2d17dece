"""Sums of gradients over ranks: buckets are sent while the backward pass still runs.

A bucket whose gradients are all there is sent at once (Li et al., "PyTorch Distributed", VLDB
2020). Buckets are always sent in the same order: ranks that have no samples, or in which a
parameter took no part, send theirs, with zeros, at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from sparkdl.comm.communicator import counting_anew
from sparkdl.comm.compression.compression import Compression
from sparkdl.sync.gradient_buckets import Bucket, BucketSums, FlatGradients
from sparkdl.sync.strategy import Reduced, SetupArguments, Synchronizer


class AllReduceSynchronizer(Synchronizer):
    """Sums the gradients of every step; `AllReduce` makes it, and its variants inherit from it."""

    sends_early = True
    """Whether buckets are sent while the backward pass runs."""

    def __init__(
        self, *setup: *SetupArguments, bucket_bytes: int, compression: Compression | None = None
    ) -> None:
        self.model, make_optimizer, comm = setup
        self._comm = counting_anew(comm)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(parameters)
        self._gradients = FlatGradients(parameters, bucket_bytes, self._comm.allocate)
        self._buckets = self._gradients.buckets
        self._messages = BucketSums(self._buckets, self._comm, compression)
        self._sums: torch.Tensor | None = None
        self._num_sent = 0
        self._is_syncing = True
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        if self.sends_early and comm.world_size > 1:
            for bucket in self._buckets:
                for parameter in bucket.parameters:
                    hook = partial(self._gradient_is_ready, bucket)
                    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    self._hooks.append(handle)

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
        self._messages.start_plain(sums)

    def reduce_gradients(self, sums: torch.Tensor, divisor: float) -> Reduced:
        if self._comm.world_size == 1:
            return Reduced(sums, divisor)
        if self._sums is None:  # an empty batch; before the buckets, as on the other ranks
            self.start_sums(sums)
        while self._num_sent < len(self._buckets):
            self._send_next()
        self._messages.wait()
        shared, self._sums = self._sums, None
        assert shared is not None
        return Reduced(shared, divisor)

    def after_step(self, step: int) -> bool:
        """Replicas are equal after every step."""
        return True

    def close_round(self) -> None:
        """Nothing to do: every step closes its round."""

    def state_dict(self) -> dict[str, Any]:
        return self._messages.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._messages.load_state_dict(state)

    def rank_state_dict(self) -> dict[str, Any]:
        return self._messages.rank_state_dict()

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        self._messages.load_rank_state_dict(state)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._gradients.release()

    def _gradient_is_ready(self, bucket: Bucket, parameter: torch.Tensor) -> None:
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
        self._messages.start(number, self._buckets[number].flat)
