"""Flat buffers, so that many small gradients, or changes of parameters, travel as few tensors.

Gradients are views of flat buffers, which are cut into buckets. Behind the last bucket lie marks,
one number for each parameter, which say whether a backward pass has used it. They are summed with
the bucket. A parameter that nobody has used in a step has no gradient then, as in a plain loop, so
that neither weight decay nor momentum moves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from sparkdl.comm.communicator import Communicator, Pending
from sparkdl.comm.compression.compression import Compression, Shapes
from sparkdl.storage.stateful import Stateful

T = TypeVar("T")

FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that the network has something to do early."""
BUCKET_BYTES = 25 << 20
"""Size from which on parameters travel in several messages."""

Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]
"""``(numel, dtype, device)`` -> zeros."""


class Bucket:
    """Gradients that travel together: a flat tensor, and one view of it per parameter.

    ``flat`` may end with numbers that are no gradients; ``values`` has those that are.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], flat: torch.Tensor) -> None:
        self.parameters = tuple(parameters)
        self.flat = flat
        sizes = [parameter.numel() for parameter in parameters]
        self.values = flat[: sum(sizes)]
        self._pieces = torch.split(self.values, sizes)
        self.gradients = tuple(map(_laid_out, self._pieces, parameters))
        self._starts = [gradient.data_ptr() for gradient in self.gradients]
        self.num_missing = len(self.parameters)

    def is_moved(self, place: int) -> bool:
        """True if somebody has given a view other memory, as ``p.grad.data = ...`` does."""
        return self.gradients[place].data_ptr() != self._starts[place]

    def put_back(self, place: int) -> None:
        """Have a view show its part of ``flat``, if it does not."""
        if self.is_moved(place):
            self.gradients[place].data = _laid_out(self._pieces[place], self.parameters[place])


def _laid_out(piece: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """The numbers in the layout that autograd gives a gradient: that of its parameter.

    Fused optimizers go through both in the order of memory.
    """
    strides = torch.empty_like(parameter, device="meta").stride()
    return piece.as_strided(parameter.shape, strides)


class FlatGradients:
    """The gradients of ``parameters``, in buckets of about ``bucket_bytes``, and their marks.

    Attributes:
        used: a byte for each parameter, which is 1 if a backward pass has used it since `zero`.
        marks: the same behind the last bucket, as of `write_marks`; what travels.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], bucket_bytes: int, allocate: Allocate
    ) -> None:
        self.parameters = list(parameters)
        self._places = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        num_marks = len(self.parameters)
        self.buckets = make_buckets(self.parameters, bucket_bytes, allocate, num_marks)
        self.used = bytearray(num_marks)
        self._used = torch.frombuffer(self.used, dtype=torch.uint8) if num_marks else zeros(0)
        last = self.buckets[-1].flat if self.buckets else zeros(0)
        self.marks = last[len(last) - num_marks :]
        self.attach()

    def zero(self) -> None:
        """Set all gradients to zero; they stay views of the buckets, and nothing is used."""
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.num_missing = len(bucket.parameters)
        self._used.zero_()
        self.attach()

    @property
    def are_all_used(self) -> bool:
        """True if backward passes have used all parameters, so that nobody need ask the others."""
        return 0 not in self.used

    def write_marks(self) -> None:
        """Note behind the last bucket what was used."""
        self.marks.copy_(self._used)

    def drop_unused(self, marks: torch.Tensor) -> None:
        """Let parameters whose sum of marks is 0 have no gradient, until the next `zero`.

        But for those of which a compression has sent what it had kept of earlier steps.
        """
        for parameter, mark in zip(self.parameters, marks.tolist(), strict=True):
            if not mark and (parameter.grad is None or not parameter.grad.any()):
                parameter.grad = None

    def attach(self) -> None:
        """Make ``.grad`` the views again: someone's ``zero_grad()`` may have dropped them."""
        for bucket, place, parameter, view in self._displaced(self.buckets):
            bucket.put_back(place)
            parameter.grad = view

    def settle(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Take into buckets, or all, the gradients that stand in their views' place.

        A hook may have replaced ``.grad``, or ``zero_grad()`` dropped it before the backward pass.
        """
        asked = self.buckets if buckets is None else buckets
        for bucket, place, parameter, view in self._displaced(asked):
            values = None if parameter.grad is None else parameter.grad.data
            bucket.put_back(place)
            if values is None:
                view.zero_()
                self.used[self._places[id(parameter)]] = 0
            else:
                view.copy_(values)
            parameter.grad = view

    def _displaced(
        self, buckets: Iterable[Bucket]
    ) -> Iterator[tuple[Bucket, int, nn.Parameter, torch.Tensor]]:
        """Buckets, places in them, parameters and views for which ``.grad`` is something else."""
        for bucket in buckets:
            pairs = zip(bucket.parameters, bucket.gradients, strict=True)
            for place, (parameter, view) in enumerate(pairs):
                if parameter.grad is not view or bucket.is_moved(place):
                    yield bucket, place, parameter, view

    def release(self) -> None:
        """Let go of the buffers."""
        for parameter in self.parameters:
            parameter.grad = None
        self.buckets.clear()


class BucketSums(Stateful):
    """Sums of buckets over ranks, compressed or not, that travel together. All ranks call alike."""

    shared_state: ClassVar = ("compressors",)
    rank_state: ClassVar = ("compressors",)

    def __init__(
        self, buckets: Sequence[Bucket], comm: Communicator, compression: Compression | None
    ) -> None:
        self._comm = comm
        self._compressors = []
        if compression is not None and comm.world_size > 1:
            self._compressors = [compression.make(bucket.gradients, comm) for bucket in buckets]
        self._sizes = [len(bucket.values) for bucket in buckets]
        self.pending: list[Pending] = []
        """Messages that are under way."""

    @property
    def are_compressed(self) -> bool:
        """True if only gradients travel, and not what lies behind them in a bucket."""
        return bool(self._compressors)

    def start(self, number: int, flat: torch.Tensor) -> None:
        """Start to sum ``flat``, which is bucket ``number`` or lies like it."""
        if self._compressors:
            values = flat[: self._sizes[number]]
            self.pending.append(self._compressors[number].start(values))
        else:
            self.start_plain(flat)

    def start_plain(self, values: torch.Tensor) -> None:
        """Start to sum ``values`` as they are."""
        self.pending.append(self._comm.all_reduce_async(values))

    def wait(self) -> None:
        """Return when the sums are there; at once if they were waited for before."""
        pending, self.pending = self.pending, []
        for message in pending:
            message.wait()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._compressors and state.get("compressors"):  # a gang of one has none
            super().load_state_dict(state)


class Changes(BucketSums):
    """Sums over ranks of how far parameters have moved. All ranks call alike.

    A strategy may train on while the sums are under way.
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
        """Return the sums that have arrived, as few flat tensors."""
        assert not self.pending, "sums are still under way"
        return [bucket.flat for bucket in self._buckets]

    def set_sums(self, sums: Sequence[torch.Tensor]) -> None:
        """Restore what `sums` gave."""
        for bucket, values in zip(self._buckets, sums, strict=True):
            bucket.flat.copy_(values)


def make_buckets(
    parameters: Sequence[nn.Parameter], bucket_bytes: int, allocate: Allocate, num_more: int = 0
) -> list[Bucket]:
    """Cut the gradients of ``parameters`` into buckets, those that are ready first in front.

    Gradients become ready roughly in the reverse order of registration. Each dtype and device has
    one flat buffer, of which its buckets are consecutive parts. Behind the last bucket there is
    room for ``num_more`` numbers.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[int, nn.Parameter]]] = {}
    for place, parameter in enumerate(reversed(parameters)):
        groups.setdefault((parameter.dtype, parameter.device), []).append((place, parameter))
    placed: list[tuple[int, Bucket]] = []
    for (dtype, device), members in groups.items():
        has_last = members[-1][0] == len(parameters) - 1
        total = sum(parameter.numel() for _, parameter in members) + num_more * has_last
        rest = allocate(total, dtype, device)
        sizes = [parameter.nbytes for _, parameter in members]
        for run in _runs(members, sizes, bucket_bytes):
            size = sum(parameter.numel() for _, parameter in run)
            size += num_more * (run[-1][0] == len(parameters) - 1)
            bucket = Bucket([parameter for _, parameter in run], rest[:size])
            placed.append((run[-1][0], bucket))
            rest = rest[size:]
    return [bucket for _, bucket in sorted(placed, key=lambda pair: pair[0])]


def zeros(
    numel: int, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """Memory of this process alone."""
    return torch.zeros(numel, dtype=dtype, device=device)


def bucket_shapes(
    shapes: Shapes, element_size: int, bucket_bytes: int
) -> list[list[tuple[int, ...]]]:
    """Shapes of the parameters of each bucket, if all have one dtype; see `make_buckets`."""
    backwards = list(reversed(shapes))
    sizes = [math.prod(shape) * element_size for shape in backwards]
    return list(_runs(backwards, sizes, bucket_bytes))


def _runs(items: Sequence[T], sizes: Sequence[int], bucket_bytes: int) -> Iterator[list[T]]:
    """Cut ``items`` into runs of about ``bucket_bytes``; the first run may be smaller."""
    limit = min(FIRST_BUCKET_BYTES, bucket_bytes)
    run: list[T] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        run.append(item)
        total += size
        if total >= limit:
            yield run
            run, total, limit = [], 0, bucket_bytes
    if run:
        yield run
