"""How do replicas agree after every step? Their gradients are summed while backward still runs.

The gradients of all parameters are views of flat buffers, which are cut into buckets. A bucket
whose gradients are all there is sent at once, so that communication overlaps with the rest of
the backward pass (Li et al., "PyTorch Distributed", VLDB 2020). Buckets are always sent in the
same order: ranks that have no samples, or in which a parameter took no part, send theirs, with
zeros, at the end.

A parameter that takes no part in a step has a gradient of zero, not None, so that weight decay
and momentum act on it the same way on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from sparkdl.comm import Communicator, Pending
from sparkdl.errors import ConfigError
from sparkdl.sync.base import MakeOptimizer, Synchronizer, SyncStrategy

FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that the network has something to do early."""


@dataclass(frozen=True, kw_only=True)
class AllReduce(SyncStrategy):
    """Average gradients over all ranks after every batch: equal to training on the united batch."""

    bucket_bytes: int = 25 << 20
    """Size from which on a bucket of gradients is sent."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes must be at least 1; received {self.bucket_bytes}")

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, comm: Communicator
    ) -> AllReduceSynchronizer:
        """See `SyncStrategy.setup`."""
        return AllReduceSynchronizer(model, make_optimizer, comm, self.bucket_bytes)


class AllReduceSynchronizer(Synchronizer):
    """See `AllReduce`."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        comm: Communicator,
        bucket_bytes: int,
    ) -> None:
        self.model = model
        self._comm = comm
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self._parameters)
        self._buckets = make_buckets(self._parameters, bucket_bytes)
        self._pending: list[Pending] = []
        self._sums: torch.Tensor | None = None
        self._num_sent = 0
        self._is_syncing = True
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._attach_gradients()
        if comm.world_size > 1:
            self._attach_hooks()

    def zero_gradients(self) -> None:
        """See `Synchronizer.zero_gradients`; the gradients stay views of the buckets."""
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.num_missing = len(bucket.parameters)
        self._num_sent = 0
        self._attach_gradients()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Synchronizer.no_sync`."""
        self._is_syncing = False
        try:
            yield
        finally:
            self._is_syncing = True

    def start_sums(self, sums: torch.Tensor) -> None:
        """See `Synchronizer.start_sums`."""
        if self._comm.world_size == 1:
            return
        # A message of its own: float32 buckets would round the sums. It travels during the
        # backward pass; after it, all ranks would wait once more.
        self._sums = sums
        self._pending.append(self._comm.all_reduce_async(sums))

    def reduce_gradients(self, sums: torch.Tensor) -> torch.Tensor:
        """See `Synchronizer.reduce_gradients`."""
        if self._comm.world_size == 1:
            return sums
        if self._sums is None:  # an empty batch; before the buckets, as on the other ranks
            self.start_sums(sums)
        while self._num_sent < len(self._buckets):
            self._send_next()
        pending, self._pending = self._pending, []
        for message in pending:
            message.wait()
        shared, self._sums = self._sums, None
        assert shared is not None
        return shared

    def after_step(self, step: int) -> bool:
        """Replicas are equal after every step."""
        return True

    def close_round(self) -> None:
        """Nothing to do: every step closes its round."""

    def close(self) -> None:
        """See `Synchronizer.close`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter in self._parameters:
            parameter.grad = None
        self._buckets.clear()

    def _attach_gradients(self) -> None:
        for bucket in self._buckets:
            for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True):
                # Someone's optimizer.zero_grad() may have dropped the view.
                if parameter.grad is not gradient:
                    parameter.grad = gradient

    def _attach_hooks(self) -> None:
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                hook = _Arrival(self, bucket)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooks.append(handle)

    def _arrived(self, bucket: Bucket) -> None:
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
        bucket = self._buckets[self._num_sent]
        self._num_sent += 1
        self._pending.append(self._comm.all_reduce_async(bucket.flat))


class _Arrival:
    """Tells the synchronizer that one gradient of a bucket is there."""

    def __init__(self, synchronizer: AllReduceSynchronizer, bucket: Bucket) -> None:
        self._synchronizer = synchronizer
        self._bucket = bucket

    def __call__(self, parameter: torch.Tensor) -> None:
        self._synchronizer._arrived(self._bucket)


class Bucket:
    """Gradients that travel together: a flat tensor, and one view of it per parameter."""

    def __init__(self, parameters: Sequence[nn.Parameter], flat: torch.Tensor) -> None:
        self.parameters = tuple(parameters)
        self.flat = flat
        sizes = [parameter.numel() for parameter in parameters]
        pieces = torch.split(flat, sizes)
        self.gradients = tuple(
            piece.view(parameter.shape) for piece, parameter in zip(pieces, parameters, strict=True)
        )
        self.num_missing = len(self.parameters)


def make_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """Cut the gradients of ``parameters`` into buckets, those that are ready first in front.

    Gradients become ready roughly in the reverse order of registration. Each dtype and device has
    one flat buffer, of which its buckets are consecutive parts.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[int, nn.Parameter]]] = {}
    for place, parameter in enumerate(reversed(parameters)):
        groups.setdefault((parameter.dtype, parameter.device), []).append((place, parameter))
    placed: list[tuple[int, Bucket]] = []
    for (dtype, device), members in groups.items():
        total = sum(parameter.numel() for _, parameter in members)
        rest = torch.zeros(total, dtype=dtype, device=device)
        for run in _runs(members, bucket_bytes):
            size = sum(parameter.numel() for _, parameter in run)
            bucket = Bucket([parameter for _, parameter in run], rest[:size])
            placed.append((run[-1][0], bucket))
            rest = rest[size:]
    return [bucket for _, bucket in sorted(placed, key=lambda pair: pair[0])]


def _runs(
    members: Sequence[tuple[int, nn.Parameter]], bucket_bytes: int
) -> Iterator[list[tuple[int, nn.Parameter]]]:
    limit = min(FIRST_BUCKET_BYTES, bucket_bytes)
    run: list[tuple[int, nn.Parameter]] = []
    size = 0
    for place, parameter in members:
        run.append((place, parameter))
        size += parameter.numel() * parameter.element_size()
        if size >= limit:
            yield run
            run, size, limit = [], 0, bucket_bytes
    if run:
        yield run
