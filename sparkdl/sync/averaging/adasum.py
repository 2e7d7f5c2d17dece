"""Adasum: replicas' updates that agree are averaged, and those that are orthogonal summed.

Adasum (Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021; Horovod):
two updates ``a`` and ``b`` of one parameter tensor become

    A(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

which is their mean where they are equal and their sum where they are orthogonal. More ranks are
combined pairwise, as a tree. What is combined is how far the weights have moved, by each rank's own
optimizer, whose state stays where it is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from sparkdl.comm.communicator import Communicator
from sparkdl.comm.compression.compression import count
from sparkdl.mesh import Mesh
from sparkdl.sync.apart import ApartSynchronizer
from sparkdl.sync.averaging.mean import by_kind, fill, flat_of
from sparkdl.sync.averaging.period import check_period
from sparkdl.sync.exchange_pattern import ModelSize, Pattern, ring_bytes
from sparkdl.sync.strategy import SetupArguments, SyncStrategy

VANISHING = torch.finfo(torch.float64).tiny ** 0.5
"""Below this squared norm an update has no direction; its coefficient is 1."""
_PRODUCTS_BYTES = 3 * 8
"""Size of the products of one tensor: a.b, a.a and b.b in float64."""


@dataclass(frozen=True, kw_only=True)
class Adasum(SyncStrategy):
    """Replicas step by themselves; then their updates are combined, tensor by tensor.

    The learning rate is that of one worker, or up to 2.5 times as much (Horovod's advice), however
    many workers there are. Replicas count alike, whatever the number of their samples; those that
    had none contribute nothing.
    """

    averaging_period: int = 1
    """Steps that a replica takes by itself before updates are combined."""

    def __post_init__(self) -> None:
        check_period(self.averaging_period)

    trains_apart = True

    def why_not_rounds(self) -> str | None:
        return (
            "each replica keeps an optimizer state of its own, without which a lost task could not "
            "be run again"
        )

    def why_not_divided(self, mesh: Mesh) -> str | None:
        return "its coefficients follow from the norms of whole weights, in parts they are others"

    def pattern(self, size: ModelSize, world_size: int) -> Pattern:
        """See `SyncStrategy.pattern`; bytes are means over ranks, if these are no power of two."""
        pattern = replace(super().pattern(size, world_size), period=self.averaging_period)
        plain = ring_bytes(size.gradient_bytes, world_size)
        if not plain:
            return pattern
        numel = count(size.shapes)
        levels, in_tree, num_extra = _tree(world_size)
        padded = _padded(numel, in_tree)
        halved = 2 * size.element_size * (padded - padded // in_tree)
        products = _PRODUCTS_BYTES * len(size.shapes) * (levels * (levels + 1) // 2)
        sent = in_tree * (halved + products) + num_extra * 2 * size.element_size * numel
        return replace(pattern, wire_ratio=sent / world_size / plain)

    def setup(self, *setup: *SetupArguments) -> AdasumSynchronizer:
        return AdasumSynchronizer(*setup, period=self.averaging_period)


class AdasumSynchronizer(ApartSynchronizer):
    """See `Adasum`."""

    keeps_optimizer = True

    def __init__(self, *setup: *SetupArguments, period: int) -> None:
        super().__init__(*setup)
        self._period = period
        self._kinds = by_kind(self.parameters)
        self._anchors: list[torch.Tensor] = []
        self._set_anchors()

    def after_step(self, step: int) -> bool:
        self.round_steps += 1
        if self.round_steps < self._period:
            return False
        self.close_round()
        return True

    @torch.no_grad()
    def close_round(self) -> None:
        if self.round_steps and self._anchors:
            for parameters, anchor in zip(self._kinds, self._anchors, strict=True):
                moved = flat_of(parameters).sub_(anchor)
                combine(moved, [parameter.numel() for parameter in parameters], self._comm)
                anchor += moved
                fill(parameters, anchor)
        super().close_round()

    def begin(self) -> None:
        super().begin()
        self._set_anchors()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin a round where the model, which was restored before, is."""
        self._set_anchors()

    def _set_anchors(self) -> None:
        if self._comm.world_size > 1:
            self._anchors = [flat_of(parameters) for parameters in self._kinds]


def adasum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``A(a, b)`` of two updates of one parameter tensor; see the module."""
    of_a, of_b = coefficients(_products(a.flatten(), b.flatten())).tolist()
    combined: torch.Tensor = of_a * a + of_b * b
    return combined


def coefficients(products: torch.Tensor) -> torch.Tensor:
    """The factors of ``a`` and ``b``, ``(..., 2)``, given a.b, a.a and b.b, ``(..., 3)``."""
    squares = products[..., 1:]
    ratios = products[..., :1] / (2 * squares)
    return torch.where(squares < VANISHING, 1.0, 1 - ratios)


def combine(flat: torch.Tensor, sizes: Sequence[int], comm: Communicator) -> None:
    """Overwrite ``flat`` with the Adasum of all ranks' ``flat``, bit-equal on all. Collective.

    Recursive vector halving and doubling: at each level ranks at twice the distance swap halves of
    what they hold, so that each combines a part, and in the end they collect the parts on the same
    ways. Of ``W = 2^k + e`` ranks, the last ``e`` first give theirs to the first ``e``, and get the
    result from them. ``flat`` are parameter tensors of ``sizes`` one after the other, ``(numel,)``.
    """
    _, size, num_extra = _tree(comm.world_size)
    if comm.rank >= size:
        comm.send(flat, comm.rank - size)
        comm.receive(flat, comm.rank - size)
        return
    has_extra = comm.rank < num_extra
    if has_extra:
        theirs = torch.empty_like(flat)
        comm.receive(theirs, comm.rank + size)
        for a, b in zip(
            torch.split(flat, list(sizes)), torch.split(theirs, list(sizes)), strict=True
        ):
            a.copy_(adasum(a, b))
    whole = flat.new_zeros(_padded(len(flat), size))
    whole[: len(flat)] = flat
    _Halving(whole, sizes, comm).run(0, len(whole), 0)
    flat.copy_(whole[: len(flat)])
    if has_extra:
        comm.send(flat, comm.rank + size)


class _Halving:
    """Recursive halving and doubling over ranks ``0 .. 2^k - 1``, in place."""

    def __init__(self, whole: torch.Tensor, sizes: Sequence[int], comm: Communicator) -> None:
        self._whole = whole
        self._bounds = [0, *accumulate(sizes)]
        self._comm = comm
        self._levels = _tree(comm.world_size)[0]

    def run(self, start: int, length: int, level: int) -> None:
        """Combine ``length`` values from ``start`` with the ranks of this level and above."""
        if level == self._levels:
            return
        half = length // 2
        is_lower = not self._comm.rank >> level & 1
        keeps, gives = (start, start + half) if is_lower else (start + half, start)
        self._combine_half(level, keeps, gives, half)
        self.run(keeps, half, level + 1)
        mine = self._whole[keeps : keeps + half]
        self._whole[gives : gives + half] = self._comm.exchange(mine, self._comm.rank ^ 1 << level)

    def _combine_half(self, level: int, keeps: int, gives: int, length: int) -> None:
        """Combine the half from ``keeps`` with the peer's, with products over all halves."""
        mine = self._whole[keeps : keeps + length]
        theirs = self._comm.exchange(
            self._whole[gives : gives + length], self._comm.rank ^ 1 << level
        )
        a, b = (mine, theirs) if keeps < gives else (theirs, mine)
        tensors = list(self._tensors(keeps, length))
        products = torch.zeros(len(self._bounds) - 1, 3, dtype=torch.float64, device=a.device)
        for number, part in tensors:
            products[number] = _products(a[part], b[part])
        for below in range(level + 1):
            products += self._comm.exchange(products, self._comm.rank ^ 1 << below)
        factors = coefficients(products)
        for number, part in tensors:
            of_a, of_b = factors[number]
            mine[part] = of_a * a[part] + of_b * b[part]

    def _tensors(self, start: int, length: int) -> Iterator[tuple[int, slice]]:
        """The tensors of which a part lies in ``[start, start + length)``, and where in it."""
        first = bisect_right(self._bounds, start) - 1
        last = bisect_left(self._bounds, start + length)
        for number in range(first, min(last, len(self._bounds) - 1)):
            begin = max(self._bounds[number] - start, 0)
            end = min(self._bounds[number + 1] - start, length)
            yield number, slice(begin, end)


def _products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a.b, a.a and b.b in float64, ``(3,)``."""
    a, b = a.double(), b.double()
    return torch.stack([a @ b, a @ a, b @ b])


def _tree(world_size: int) -> tuple[int, int, int]:
    """Levels, ranks of the full tree, and ranks that are left over."""
    levels = world_size.bit_length() - 1
    return levels, 1 << levels, world_size - (1 << levels)


def _padded(numel: int, size: int) -> int:
    """The next multiple of ``size``: what can be halved down to one part per rank."""
    return -(-numel // size) * size
