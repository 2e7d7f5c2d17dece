"""The top-k compression: only the largest values travel, with their places; the others wait.

Lin et al., "Deep Gradient Compression", ICLR 2018. With a momentum m, each rank keeps a velocity
u and a sum v of what it has not sent: ``u = m u + g; v += u``. Of every tensor it sends the v of
the largest absolute values, and forgets both u and v there (momentum factor masking). With
``momentum=0`` this is plain top-k with error feedback. Tensors of one dimension, such as biases,
travel as they are.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sparkdl.comm.communicator import Communicator, Pending
from sparkdl.comm.compression.compression import (
    After,
    Compression,
    Compressor,
    Shapes,
    all_reduce_bytes,
    check_places,
    count,
    gather_equal,
    shapes_of,
)
from sparkdl.comm.compression.dense_reduce_scatter import BLOCK, blocks_of
from sparkdl.config import TrainConfig, require
from sparkdl.errors import ConfigError

NARROW, WIDE = 32, 64
"""Lengths of runs. The peaks of shorter ones take torch several times longer to find."""


def num_largest(numel: int, density: float) -> int:
    """Return how many values of a tensor are sent."""
    return max(1, round(density * numel))


class Peaks:
    """Finds the ``num_largest`` absolute values of a row by the largest of its short runs.

    `add` sees the row block by block; ``scratch`` has room for one.
    """

    def __init__(self, values: torch.Tensor, num_largest: int, scratch: torch.Tensor) -> None:
        self._values = values
        self._num_largest = num_largest
        self._scratch = scratch
        self._width = WIDE if num_largest * WIDE * 8 <= len(values) else NARROW
        self._peaks = values.new_empty(len(values) // self._width)

    def add(self, start: int, stop: int) -> None:
        """Look at a block, which begins at a multiple of `WIDE`."""
        first, last = start // self._width, stop // self._width
        block = self._values[first * self._width : last * self._width]
        sizes = torch.abs(block, out=self._scratch[: len(block)]).view(-1, self._width)
        torch.amax(sizes, 1, out=self._peaks[first:last])

    def largest(self) -> torch.Tensor:
        """Places of the largest absolute values, int64, in no order; NaN counts as largest."""
        values, k = self._values, self._num_largest
        if len(self._peaks) <= k:
            return torch.topk(values.abs(), k, sorted=False).indices
        peaks, runs = torch.topk(self._peaks, k, sorted=False)
        end = len(self._peaks) * self._width
        sizes = values[:end].view(-1, self._width).index_select(0, runs).abs_()
        # Not "at least the smallest": if that is NaN, all are to be looked at.
        row, column = (sizes < peaks.min().item()).logical_not_().nonzero(as_tuple=True)
        rest = torch.arange(end, len(values), device=values.device)
        places = torch.cat([runs[row] * self._width + column, rest])
        found = torch.cat([sizes[row, column], values[end:].abs()])
        return places[torch.topk(found, k, sorted=False).indices]


WARMUP_STAGES = 4
"""Equal stages; with the paper's density of 0.001 they send 25, 6.3, 1.6 and 0.4 percent."""


@dataclass(frozen=True, kw_only=True)
class TopKCompression(Compression):
    """Send the largest values of each tensor, exactly; what is left is added to the next step's.

    For Deep Gradient Compression give the momentum here and none to the optimizer, which must be
    SGD.
    """

    density: float = 0.001
    """The part of the values of each tensor that is sent, at least one."""
    momentum: float = 0.0
    """Momentum correction; the optimizer must have none then."""
    clip_norm: float | None = None
    """Largest norm of each tensor's gradient, applied to a rank's own before it is added up."""
    warmup_steps: int = 0
    """First exchanges, in which the density falls exponentially to its value, in four stages."""

    def __post_init__(self) -> None:
        require(
            0 < self.density < 0.5,
            "density must be between 0 and 0.5, from where on places and values take more bytes "
            "than all values",
            self.density,
        )
        clip, steps = self.clip_norm, self.warmup_steps
        require(0 <= self.momentum < 1, "momentum must be in [0, 1)", self.momentum)
        require(clip is None or 0 < clip < math.inf, "clip_norm must be positive, or None", clip)
        require(steps >= 0, "warmup_steps must not be negative", steps)

    def check(self, config: TrainConfig, world_size: int) -> None:
        super().check(config, world_size)
        if self.momentum and _has_momentum(config):
            raise ConfigError(
                f"momentum={self.momentum} of the compression is applied before values are sent, "
                f"and optimizer {config.optimizer!r} would apply its own to the result, so that "
                "gradients count twice; use optimizer 'sgd' without momentum, or momentum=0 here"
            )

    def make(self, views: Sequence[torch.Tensor], comm: Communicator) -> Compressor:
        shapes = shapes_of(views)
        check_places(count(shapes))
        return TopKCompressor(self, shapes, comm, views[0])

    def wire_bytes(self, shapes: Shapes, element_size: int, world_size: int) -> int:
        matrices, vectors = places_of(shapes)
        num_dense = sum(stop - start for start, stop in vectors)
        num_sent = sum(num_largest(stop - start, self.density) for start, stop in matrices)
        dense_bytes = all_reduce_bytes(num_dense * element_size, world_size)
        return dense_bytes + (world_size - 1) * message_bytes(num_sent, element_size)

    def density_at(self, step: int) -> float:
        """The density in a step, counted from 0."""
        if step >= self.warmup_steps:
            return self.density
        stage = WARMUP_STAGES * step // self.warmup_steps
        return float(self.density ** ((stage + 1) / (WARMUP_STAGES + 1)))


class TopKCompressor(Compressor):
    """See `TopKCompression`."""

    shared_state: ClassVar = ("step", "dense_velocity")
    rank_state: ClassVar = ("residual", "velocity")

    def __init__(
        self, options: TopKCompression, shapes: Shapes, comm: Communicator, like: torch.Tensor
    ) -> None:
        self._options = options
        self._comm = comm
        self._step = 0
        self._matrices, self._vectors = places_of(shapes)
        numel = count(shapes)
        self._residual = like.new_zeros(numel)
        self._velocity = like.new_zeros(numel if options.momentum else 0)
        self._dense = like.new_zeros(sum(stop - start for start, stop in self._vectors))
        self._dense_velocity = like.new_zeros(len(self._dense) if options.momentum else 0)

    def start(self, flat: torch.Tensor) -> Pending:
        density = self._options.density_at(self._step)
        self._step += 1
        pending: list[Pending] = []
        if len(self._dense):
            torch.cat([flat[start:stop] for start, stop in self._vectors], out=self._dense)
            pending.append(self._comm.all_reduce_async(self._dense))
        if self._matrices:
            message = self._encode(flat, density)
            finish = functools.partial(self._decode, flat)
            pending.append(gather_equal(self._comm, message, finish))
        return After(pending, functools.partial(self._put_dense, flat))

    def _encode(self, flat: torch.Tensor, density: float) -> torch.Tensor:
        found = []
        for start, stop in self._matrices:
            self._clip(flat[start:stop])
            num_sent = num_largest(stop - start, density)
            found.append(self._accumulate(flat, start, stop, num_sent).add_(start))
        places = torch.cat(found)
        message = write(self._residual[places], places)
        self._residual.index_fill_(0, places, 0)
        if self._options.momentum:
            self._velocity.index_fill_(0, places, 0)
        return message

    def _clip(self, share: torch.Tensor) -> None:
        """Scale a share so that it is at most its part of a gradient of the largest norm.

        Shares of ranks are taken as independent: the squares of their norms add up (section 3.2).
        """
        if self._options.clip_norm is not None:
            limit = self._options.clip_norm / math.sqrt(self._comm.world_size)
            norm = torch.linalg.vector_norm(share)
            share.mul_(torch.where(norm > limit, limit / norm, 1.0))

    def _accumulate(self, flat: torch.Tensor, start: int, stop: int, num_sent: int) -> torch.Tensor:
        """Add a tensor's share to velocity and residual; find where the residual is largest."""
        scratch = flat.new_empty(min(BLOCK, stop - start))
        peaks = Peaks(self._residual[start:stop], num_sent, scratch)
        for first, last in blocks_of(stop - start):
            a, b = start + first, start + last
            update = flat[a:b]
            if self._options.momentum:
                velocity = self._velocity[a:b]
                update = torch.add(update, velocity, alpha=self._options.momentum, out=velocity)
            self._residual[a:b].add_(update)
            peaks.add(first, last)
        return peaks.largest()

    def _decode(self, flat: torch.Tensor, messages: Sequence[torch.Tensor]) -> None:
        """Add up the messages in rank order, so that sums have equal bits on all ranks."""
        flat.zero_()
        for message in messages:
            values, places = read(message, flat.dtype)
            flat.index_add_(0, places, values)

    def _put_dense(self, flat: torch.Tensor) -> None:
        """Put back what was not compressed; it gets the momentum too, after it was summed."""
        dense = self._dense
        if self._options.momentum:
            dense = self._dense_velocity.mul_(self._options.momentum).add_(dense)
        sizes = [stop - start for start, stop in self._vectors]
        for (start, stop), values in zip(self._vectors, torch.split(dense, sizes), strict=True):
            flat[start:stop] = values


def places_of(shapes: Shapes) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """First and last place + 1 of the tensors that are compressed, and of those that are not."""
    matrices: list[tuple[int, int]] = []
    vectors: list[tuple[int, int]] = []
    place = 0
    for shape in shapes:
        numel = count([shape])
        if numel:
            (matrices if len(shape) > 1 else vectors).append((place, place + numel))
        place += numel
    return matrices, vectors


def message_bytes(num_sent: int, element_size: int) -> int:
    """Size of a message of so many values and their places, filled up to a multiple of 8."""
    return -(-num_sent * (element_size + 4) // 8) * 8


def write(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """A message: the values, then their places as int32; uint8."""
    size = message_bytes(len(values), values.element_size())
    message = torch.zeros(size, dtype=torch.uint8, device=values.device)
    place = values.nbytes
    message[:place].view(values.dtype).copy_(values)
    message[place : place + 4 * len(places)].view(torch.int32).copy_(places)
    return message


def read(message: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and places of a message."""
    num_sent = len(message) // (dtype.itemsize + 4)
    place = num_sent * dtype.itemsize
    places = message[place : place + 4 * num_sent].view(torch.int32)
    return message[:place].view(dtype), places


def _has_momentum(config: TrainConfig) -> bool:
    """Return True if the optimizer averages gradients over time; of a callable nobody can tell."""
    kind: Any = config.optimizer
    if isinstance(kind, str):
        kind = {name.lower(): value for name, value in vars(torch.optim).items()}.get(kind.lower())
    if not isinstance(kind, type):
        return False
    defaults = {name: p.default for name, p in inspect.signature(kind).parameters.items()}
    options = {**defaults, **config.optimizer_params}
    return bool(options.get("momentum")) or bool(options.get("betas", (0,))[0])
