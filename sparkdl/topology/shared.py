"""How do the ranks of one node sum what they have in memory, without sending it?

Each rank sees the summands of all. It adds up its share of the elements, in rank order, and writes
the result into the tensors of all ranks: two passes over the data, and equal bits everywhere and
every time. Tensors from `allocate` are summed where they are; others are copied to a staging area
and back, piece by piece.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sparkdl.comm import Communicator, Pending
from sparkdl.topology.base import Topology
from sparkdl.topology.memory import NoSharedMemory, map_together
from sparkdl.topology.signals import DONE, READY, Signals

logger = logging.getLogger(__name__)

BLOCK_BYTES = 512 * 1024
"""What one thread adds and copies at a time, so that it copies out of its cache."""
PIECE_BYTES = 512 * 1024
"""Largest part of a tensor that is staged as one."""
STAGING_BYTES = 4 * PIECE_BYTES

_PAGE_BYTES = 4096
_LINE_BYTES = 64
_HALF = (torch.float16, torch.bfloat16)
_SUMMED = {
    torch.float64, torch.float32, *_HALF,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
}  # fmt: skip

Between = Callable[[torch.Tensor], Pending]
"""Starts what happens to the node's sum of a rank's share before the ranks of the node get it."""


@dataclass(frozen=True)
class _Region:
    """Memory of equal size for each rank of the node."""

    start: int
    """Address of this rank's part."""
    num_bytes: int
    buffers: Sequence[torch.Tensor]
    """Each rank's part, uint8."""

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Where a contiguous tensor begins in this rank's part, if it lies there."""
        offset = tensor.data_ptr() - self.start
        return offset if 0 <= offset <= self.num_bytes - tensor.nbytes else None


class SharedSum:
    """Sums over the ranks of one node. Several may be pending; they end in the order of starts."""

    def __init__(
        self,
        local: Communicator,
        everyone: Communicator,
        *,
        ranks: Sequence[int],
        first_takes_all: bool = False,
    ) -> None:
        """Collective over ``everyone``.

        Args:
            local: the ranks of this node.
            everyone: all ranks, whose nodes take memory together or not at all.
            ranks: what the ranks of the node are called in errors.
            first_takes_all: the node's first rank adds up everything, instead of its share.

        Raises:
            NoSharedMemory: on all ranks.
        """
        self.signals = Signals(local, everyone, ranks)
        self.local = local
        self._everyone = everyone
        self._first_takes_all = first_takes_all
        self._regions: list[_Region] = []
        self._pending: deque[_Sum] = deque()
        self._num_started = 0
        try:
            self._staging = self._map(STAGING_BYTES)
        except BaseException:
            self.signals.close()
            raise
        self._staged_bytes = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros ``(numel,)`` that are summed in place. Collective over everyone.

        Raises:
            NoSharedMemory: on all ranks.
        """
        num_bytes = numel * dtype.itemsize
        region = self._map(max(_PAGE_BYTES, -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES))
        self._regions.append(region)
        return region.buffers[self.local.rank][:num_bytes].view(dtype)

    def start(self, tensor: torch.Tensor, between: Between | None = None) -> Pending:
        """Start to sum ``tensor``; large ones that are not from `allocate` are summed at once.

        Args:
            tensor: dense, on the CPU, of a type that `is_summable` admits.
            between: what happens to each rank's share before it is distributed; None: nothing.

        Raises:
            CommunicationError: a peer is gone.
        """
        tensor = tensor.detach()
        if tensor.numel() == 0:
            return _NothingPending()
        if not tensor.is_contiguous():
            dense = tensor.contiguous()
            self.start(dense, between).wait()
            tensor.copy_(dense)
            return _NothingPending()
        flat = tensor.view(-1)
        for region in self._regions:
            offset = region.offset(flat)
            if offset is not None:
                return self._begin(_Sum(self, flat, region, offset, between))
        for piece in torch.split(flat, PIECE_BYTES // flat.element_size()):
            offset = self._stage(piece)
            last = self._begin(_Sum(self, piece, self._staging, offset, between, is_staged=True))
        return last

    def close(self) -> None:
        """Let go of the memory, which lives on with the tensors that use it."""
        self.signals.close()
        self._regions.clear()
        self._pending.clear()

    def share(self, numel: int, element_size: int) -> slice:
        """The elements that this rank adds up; whole cache lines but for the last."""
        if self._first_takes_all:
            return slice(0, numel if self.local.rank == 0 else 0)
        unit = max(1, _LINE_BYTES // element_size)
        size = -(-numel // (unit * self.local.world_size)) * unit
        first = min(numel, size * self.local.rank)
        return slice(first, min(numel, first + size))

    def finish(self, last: _Sum) -> None:
        """Finish the sums up to ``last``."""
        while not last.is_finished:
            oldest = self._pending[0]
            if not oldest.is_added:
                self.signals.wait(READY, oldest.number)
                oldest.add()
            oldest.distribute()
            self._advance()
            self.signals.wait(DONE, oldest.number)
            oldest.finish()
            self._pending.popleft()

    def _begin(self, started: _Sum) -> _Sum:
        self._num_started += 1
        started.number = self._num_started
        self._pending.append(started)
        self.signals.send(READY)
        self._advance()
        return started

    def _advance(self) -> None:
        """Do this rank's share of the sums for which nobody must be waited for."""
        for pending in self._pending:
            if not pending.is_added:
                if not self.signals.arrived(READY, pending.number):
                    return
                pending.add()

    def _stage(self, piece: torch.Tensor) -> int:
        """Copy to where the peers see it; places follow from the order of starts alone."""
        first = self._staged_bytes
        if first + piece.nbytes > STAGING_BYTES:
            first = 0
        last = first + piece.nbytes
        self._staged_bytes = -(-last // _LINE_BYTES) * _LINE_BYTES
        in_the_way = [before for before in self._pending if before.is_staged_in(first, last)]
        if in_the_way:
            self.finish(in_the_way[-1])
        staged = self._staging.buffers[self.local.rank][first:last]
        staged.view(piece.dtype).copy_(piece)
        return first

    def _map(self, num_bytes: int) -> _Region:
        size, rank = self.local.world_size, self.local.rank
        file = map_together(self.local, num_bytes * size, self._everyone)
        file.close()
        whole = torch.frombuffer(file.buffer, dtype=torch.uint8)
        buffers = torch.split(whole, num_bytes)
        return _Region(buffers[rank].data_ptr(), num_bytes, buffers)


class _Sum:
    """One tensor's sum, in this order: add up, distribute, finish."""

    def __init__(
        self,
        owner: SharedSum,
        flat: torch.Tensor,
        region: _Region,
        offset: int,
        between: Between | None,
        *,
        is_staged: bool = False,
    ) -> None:
        self._owner = owner
        self._flat = flat
        self._region = region
        self._offset = offset
        self._between = between
        self._is_staged = is_staged
        self._rest: Pending = _NothingPending()
        self.number = 0
        self.is_added = False
        self.is_finished = False

    def is_staged_in(self, first: int, last: int) -> bool:
        """Whether the tensor uses these bytes of the staging area."""
        return self._is_staged and self._offset < last and first < self._offset + self._flat.nbytes

    def wait(self) -> None:
        """See `Pending.wait`."""
        self._owner.finish(self)

    def add(self) -> None:
        """Add up this rank's share, all of whose summands must be there."""
        self.is_added = True
        first, *others = self._shares()
        if self._between is None:
            for blocks in zip(*(_blocks(share) for share in (first, *others)), strict=True):
                _add_up(blocks)
                for block in blocks[1:]:
                    block.copy_(blocks[0])
            self._owner.signals.send(DONE)
        elif len(first):
            for blocks in zip(*(_blocks(share) for share in (first, *others)), strict=True):
                _add_up(blocks)
            self._rest = self._between(first)

    def distribute(self) -> None:
        """Give the share to the peers, unless that is done."""
        if self._between is None:
            return
        self._rest.wait()
        first, *others = self._shares()
        for other in others:
            other.copy_(first)
        self._owner.signals.send(DONE)

    def finish(self) -> None:
        """Take the result, when all shares are there."""
        if self._is_staged:
            own = self._region.buffers[self._owner.local.rank]
            self._flat.copy_(own[self._offset :][: self._flat.nbytes].view(self._flat.dtype))
        self.is_finished = True

    def _shares(self) -> list[torch.Tensor]:
        """This rank's share in each rank's memory; the sum is formed in the first."""
        size = self._flat.element_size()
        share = self._owner.share(len(self._flat), size)
        first, last = self._offset + share.start * size, self._offset + share.stop * size
        return [buffer[first:last].view(self._flat.dtype) for buffer in self._region.buffers]


class _NothingPending:
    def wait(self) -> None:
        return None


class Shared(Topology):
    """Sums in the memory of the one node that all ranks are on. Nothing of them is sent.

    Tensors that are not dense, not on the CPU, or of an unusual type go to the wrapped
    communicator.
    """

    def __init__(self, comm: Communicator, node: SharedSum) -> None:
        super().__init__(comm)
        self._node = node

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `Communicator.allocate`; each rank has the tensors of its node mapped."""
        if device.type == "cpu" and dtype in _SUMMED:
            try:
                return self._node.allocate(numel, dtype)
            except NoSharedMemory as error:
                log = logger.warning if self.rank == 0 else logger.debug
                log("%d numbers of %s cannot be shared: %s", numel, dtype, error)
        return super().allocate(numel, dtype, device)

    def all_reduce_async(self, tensor: torch.Tensor) -> Pending:
        """See `Communicator.all_reduce_async`."""
        if not is_summable(tensor):
            return super().all_reduce_async(tensor)
        return self._node.start(tensor)

    def close(self) -> None:
        """See `Topology.close`."""
        self._node.close()


def is_summable(tensor: torch.Tensor) -> bool:
    """Whether `SharedSum` can sum it."""
    is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return is_dense and tensor.dtype in _SUMMED


def _blocks(share: torch.Tensor) -> Sequence[torch.Tensor]:
    block_bytes = BLOCK_BYTES * torch.get_num_threads()
    return torch.split(share, block_bytes // share.element_size())


def _add_up(blocks: Sequence[torch.Tensor]) -> None:
    """Leave the sum in the first; half-precision numbers are rounded once, at the end."""
    first, *others = blocks
    total = first.float() if first.dtype in _HALF and len(others) > 1 else first
    for other in others:
        total += other
    if total is not first:
        first.copy_(total)
