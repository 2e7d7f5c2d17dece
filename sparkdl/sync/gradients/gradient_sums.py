"""Sums of gradients over ranks: buckets are sent while the backward pass still runs.

A bucket whose gradients are all there is sent at once (Li et al., "PyTorch Distributed", VLDB
2020), from the second step on: the first one shows whether some come by parts. Buckets are always
sent in the same order: ranks that have no samples, or in which a parameter took no part, send
theirs, with zeros, at the end. What parameters were used travels behind the last bucket or, where
buckets are compressed, with the sums of losses. Gradients that may be sparse are in no bucket: they
follow as rows and values, not compressed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from sparkdl.comm.communicator import counting_anew
from sparkdl.comm.compression.compression import Compression
from sparkdl.sync.gradient_buckets import Bucket, BucketSums, FlatGradients
from sparkdl.sync.sparse_gradients import sparse_parameters, sum_gradients
from sparkdl.sync.strategy import Reduced, SetupArguments, Synchronizer, parameters_for


class AllReduceSynchronizer(Synchronizer):
    """Sums the gradients of every step; `AllReduce` makes it, and its variants inherit from it."""

    sends_early = True
    """True if buckets are sent while the backward pass runs."""

    def __init__(
        self, *setup: *SetupArguments, bucket_bytes: int, compression: Compression | None = None
    ) -> None:
        self.model, make_optimizer, comm = setup
        self._comm = counting_anew(comm)
        self.optimizer = make_optimizer(parameters_for(make_optimizer, self.model))
        self._bucket_bytes, self._compression = bucket_bytes, compression
        self._sums: torch.Tensor | None = None
        self._num_sent = 0
        self._is_syncing, self._is_within = True, False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._group()

    def _group(self) -> None:
        """Lay out the gradients of the parameters that train at present."""
        sparse = sparse_parameters(self.model).values()
        self._sparse = [p for p in sparse if p.requires_grad and not self._is_alone]
        self._came: set[int] | None = set()
        """Places of the parameters whose gradients have come, until the first step has told."""
        self._comes_twice = False
        self._gradients = self._new_gradients()
        self._buckets = self._gradients.buckets
        self._messages = BucketSums(self._buckets, self._comm, self._compression)
        places = {id(p): place for place, p in enumerate(self._gradients.parameters)}
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                hook = partial(self._gradient_is_ready, bucket, places[id(parameter)])
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooks.append(handle)

    def _new_gradients(self) -> FlatGradients:
        sparse = {id(parameter) for parameter in sparse_parameters(self.model).values()}
        parameters = [p for p in self.trained_parameters() if id(p) not in sparse]
        if self._is_alone:
            parameters = []
        return FlatGradients(parameters, self._bucket_bytes, self._comm.allocate)

    @property
    def _is_alone(self) -> bool:
        """True if gradients are summed with nobody's: they are what autograd makes."""
        return self._comm.world_size == 1 and self.sends_early

    def follow_freezing(self) -> None:
        now = {id(p) for p in self.trained_parameters()}
        grouped = {id(p) for p in (*self._gradients.parameters, *self._sparse)}
        if self._is_alone or now == grouped:
            return
        self.close()
        self._group()

    @property
    def bytes_sent(self) -> int:
        return self._comm.bytes_sent

    def zero_gradients(self) -> None:
        if self._is_alone:
            super().zero_gradients()
            return
        if self._came:
            self._came.clear()
        self._gradients.zero()
        for parameter in self._sparse:
            parameter.grad = None
        self._num_sent, self._is_within = 0, True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._is_syncing = False
        try:
            yield
        finally:
            self._is_syncing = True

    def start_sums(self, sums: torch.Tensor) -> None:
        if self._is_alone or self._messages.are_compressed:
            return
        # A message of its own: float32 buckets would round the sums. It travels during the
        # backward pass; after it, all ranks would wait once more.
        self._sums = sums
        self._messages.start_plain(sums)

    def early_sums(self, sums: torch.Tensor, *, waits: bool) -> torch.Tensor | None:
        if self._is_alone:
            return sums
        if not waits or self._messages.are_compressed:
            return None
        if self._sums is None:
            self.start_sums(sums)
        self._messages.wait()
        return self._sums

    def reduce_gradients(self, sums: torch.Tensor, divisor: float) -> Reduced:
        if self._is_alone:
            return Reduced(sums, divisor)
        if self._sums is None:  # an empty batch; before the buckets, as on the other ranks
            self.start_sums(sums)
        while self._num_sent < len(self._buckets):
            self._send_next()
        if self._messages.are_compressed:
            self._sums = self._with_marks(sums)
            self._messages.start_plain(self._sums)
        self._messages.wait()
        self._is_within = False
        if self._came:
            self._came = None
        sum_gradients(self._sparse, self._comm)
        shared, self._sums = self._sums, None
        assert shared is not None
        if not self._gradients.are_all_used:
            self._gradients.drop_unused(self._marks_of(shared, sums))
        return Reduced(shared[: len(sums)], divisor)

    def mark_used(self, parameters: Iterable[nn.Parameter]) -> None:
        given = {id(parameter) for parameter in parameters}
        for place, parameter in enumerate(self._gradients.parameters):
            if id(parameter) in given:
                self._gradients.used[place] = 1

    def _with_marks(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums of a step, and behind them the marks where buckets do not bring them."""
        self._gradients.write_marks()
        if not self._messages.are_compressed:
            return sums
        return torch.cat([sums, self._gradients.marks.to(sums.dtype)])

    def _marks_of(self, shared: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """The sums of marks, given what has come of `_with_marks` of ``sums``."""
        return shared[len(sums) :] if self._messages.are_compressed else self._gradients.marks

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
        super().close()

    def _gradient_is_ready(self, bucket: Bucket, place: int, parameter: torch.Tensor) -> None:
        if not self._is_within:  # a callback computes gradients
            return
        self._gradients.used[place] = 1
        if not self._is_syncing or not self.sends_early or self._comes_twice:
            return
        if self._came is not None:
            self._comes_twice |= place in self._came  # as with reentrant checkpoints: sent last
            self._came.add(place)
            return
        bucket.num_missing -= 1
        if bucket.num_missing < 0:
            raise RuntimeError(
                "a parameter received its gradient twice in one backward pass, which it did not in "
                "the first step, and after it was sent; with activation checkpointing use "
                "torch.utils.checkpoint(use_reentrant=False)"
            )
        while self._num_sent < len(self._buckets) and not self._buckets[self._num_sent].num_missing:
            self._send_next()

    def _send_next(self) -> None:
        number = self._num_sent
        self._num_sent += 1
        self._gradients.settle([self._buckets[number]])
        if self._num_sent == len(self._buckets):  # all that are used are known by then
            self._gradients.write_marks()
        self._messages.start(number, self._buckets[number].flat)
