"""The exchange of sparse messages: each rank gets all others' and adds them up itself.

All ranks add in rank order, so that their sums have equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sparkdl.comm.communicator import Communicator, Pending
from sparkdl.comm.compression.compression import After

Finish = Callable[[Sequence[torch.Tensor]], None]
"""Takes the messages of all ranks, in rank order."""


def gather_equal(comm: Communicator, message: torch.Tensor, finish: Finish) -> Pending:
    """Exchange messages that have the same size on all ranks.

    Args:
        comm: the ranks that exchange.
        message: uint8, ``(num_bytes,)``.
        finish: called inside ``wait``.
    """
    messages = message.new_empty(comm.world_size, len(message))
    pending = comm.all_gather_async(message, messages)
    return After([pending], lambda: finish(messages.unbind(0)))


def gather_ragged(comm: Communicator, message: torch.Tensor, finish: Finish) -> Pending:
    """Exchange messages of any sizes, multiples of 8: first the sizes, then all padded to one."""
    size = torch.tensor([len(message)], device=message.device)
    sizes = size.new_empty(comm.world_size, 1)
    pending = comm.all_gather_async(size, sizes)

    def exchange() -> None:
        lengths = sizes.flatten().tolist()
        padded = message.new_zeros(max(lengths))
        padded[: len(message)] = message
        messages = comm.all_gather(padded)
        finish([row[:length] for row, length in zip(messages, lengths, strict=True)])

    return After([pending], exchange)
