"""The interface of a compression to the strategies that send gradients or changes of weights.

Two objects, as for strategies: `Compression` holds the options and travels to the executors,
`Compressor` is the compression at work on one bucket of one rank.

What is compressed is a rank's *share*: the shares of all ranks add up to the mean. Options with a
unit, such as thresholds, are meant for ``world_size * share``, a rank's own estimate of the mean.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from sparkdl.comm.communicator import Communicator, Pending
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.storage.stateful import Stateful

Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Compression(ABC):
    """The rule that makes messages smaller; options only: frozen, picklable, checked when made.

    Example of a compression of your own (pass it as ``AllReduce(compression=Halved())``)::

        @dataclass(frozen=True, kw_only=True)
        class Halved(Compression):
            keeps_residual = False

            def make(self, views, comm):
                return HalvedCompressor(comm)

            def wire_bytes(self, shapes, element_size, world_size):
                return all_reduce_bytes(count(shapes) * element_size // 2, world_size)
    """

    keeps_residual: ClassVar[bool] = True
    """True if what a message leaves out is kept and added to the next one (error feedback)."""

    def check(self, config: TrainConfig, world_size: int) -> None:
        """Refuse, on the driver and before any job, what makes no sense together.

        Raises:
            ConfigError: with the reason.
        """
        if self.keeps_residual and config.precision == "fp16":
            raise ConfigError(
                f"{type(self).__name__} keeps what it has not sent yet, and precision 'fp16' "
                "changes the gradients' scale from step to step, so that the two do not add up; "
                "use precision 'bf16' or 'fp32', or compression 'fp16' or 'bf16'"
            )

    @abstractmethod
    def make(self, views: Sequence[torch.Tensor], comm: Communicator) -> Compressor:
        """Build the compressor of one bucket. Collective: all ranks call in the same order.

        Args:
            views: the tensors of the bucket, in the order in which ``flat`` has their values.
            comm: the ranks that exchange.

        Raises:
            ConfigError: the tensors' dtype cannot be compressed.
        """

    @abstractmethod
    def wire_bytes(self, shapes: Shapes, element_size: int, world_size: int) -> int | None:
        """Bytes that one rank sends per exchange of one bucket after warm-up, exactly.

        Args:
            shapes: those of the bucket's tensors.
            element_size: bytes of one number of the bucket.
            world_size: number of ranks that exchange.

        Returns:
            None where it depends on the data.
        """

    def codecs_of(
        self, shape: tuple[int, ...], num_slices: int, dtype: torch.dtype
    ) -> Sequence[Codec] | None:
        """Codecs of a tensor's slices, as `dense_reduce_scatter.cut` has them, without a residual.

        Rounds on plain Spark stages, which keep no residual, use them for changes of weights. None:
        it would not work without.
        """
        return None


class Codec(ABC):
    """Turns the values of one slice into bytes and back, and notes what that loses."""

    message_bytes: int
    """Size of every message; a multiple of 8, and equal for all slices of a bucket."""

    @abstractmethod
    def encode(self, values: torch.Tensor, residual: torch.Tensor, message: torch.Tensor) -> None:
        """Write ``values + residual``, ``(numel,)`` each, as well as the message can.

        ``residual`` is what earlier messages left out, then what this one leaves out; ``message``
        is uint8, ``(message_bytes,)``, and overwritten.
        """

    @abstractmethod
    def decode_add(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Add what a message says to ``out``, ``(numel,)``."""


class Compressor(Stateful, ABC):
    """A compression at work on one bucket of one rank."""

    @abstractmethod
    def start(self, flat: torch.Tensor) -> Pending:
        """Start an exchange; several compressors' exchanges may be under way at once.

        All ranks start in the same order, and wait in that order.

        Args:
            flat: this rank's share, ``(numel,)``. After ``wait()`` it holds an estimate of the sum
                of all ranks' shares, bit-equal on all ranks.
        """


class After:
    """Collectives under way, and what is left to do when their results are there."""

    def __init__(self, pending: Sequence[Pending], finish: Callable[[], object]) -> None:
        self._pending = pending
        self._finish = finish

    def wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._finish()


def gather_equal(
    comm: Communicator, message: torch.Tensor, finish: Callable[[Sequence[torch.Tensor]], object]
) -> Pending:
    """Exchange messages that have the same size on all ranks; extensions use it.

    Args:
        comm: the ranks that exchange.
        message: uint8, ``(num_bytes,)``.
        finish: called inside ``wait`` with the messages of all ranks. All get them in rank order,
            so that sums have equal bits.
    """
    messages = message.new_empty(comm.world_size, len(message))
    pending = comm.all_gather_async(message, messages)
    return After([pending], lambda: finish(messages.unbind(0)))


def count(shapes: Shapes) -> int:
    """Number of values of tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes)


def check_places(numel: int) -> None:
    """Raise `ConfigError` for a bucket that has more values than can be counted in 32 bits."""
    if numel >= 1 << 31:
        raise ConfigError(
            f"places are sent as 32-bit numbers, and a bucket has {numel} values; use "
            "compression 'twobit' or 'int8'"
        )


def all_reduce_bytes(num_bytes: int, world_size: int) -> int:
    """Bytes that a rank sends for the sum of ``num_bytes``; see `Communicator`."""
    return 2 * (world_size - 1) * num_bytes // world_size


def shapes_of(views: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Shapes of a bucket's tensors; ConfigError if residuals would be too coarse to add up."""
    for view in views:
        if view.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"residuals are kept for float32 and float64; a parameter is {view.dtype}; use "
                "compression 'fp16' or 'bf16', or keep the weights in float32 and set precision"
            )
    return [tuple(view.shape) for view in views]
