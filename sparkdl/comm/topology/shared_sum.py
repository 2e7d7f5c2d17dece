"""Sums of the ranks of one node over shared memory, without sending anything.

Each rank sees the summands of all. It adds up its share of the elements, in rank order, and writes
the result into the tensors of all ranks: two passes over the data, and equal bits everywhere and
every time. Tensors from `allocate` are summed where they are; others are copied to a staging area
and back, piece by piece.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from sparkdl.comm.communicator import (
    Communicator,
    Done,
    Pending,
    ProcessGroupCommunicator,
    Topology,
)
from sparkdl.comm.topology.shared_memory import NoSharedMemory, map_together, say
from sparkdl.comm.topology.signals import DONE, READY, Signals

BLOCK_BYTES = 512 * 1024
"""Bytes that one thread adds and copies at a time, so that it copies out of its cache."""
PIECE_BYTES = 512 * 1024
"""Largest part of a tensor that is staged as one."""
SMALL_BYTES = 4096
"""Up to this size tensors are staged in small slots, of which there are many."""
_PAGE_BYTES = 4096
_LINE_BYTES = 64
_MAX_LAYOUTS = 4096
_HALF = (torch.float16, torch.bfloat16)
_SUMMED = {
    torch.float64, torch.float32, *_HALF,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
}  # fmt: skip

Between = Callable[[torch.Tensor], Pending]
"""Starts what happens to the node's sum of a rank's share before the ranks of the node get it."""


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
        """Collective over ``everyone``: nodes take memory together or all raise NoSharedMemory.

        ``local`` are the ranks of this node, and ``ranks`` what they are called in errors. With
        ``first_takes_all`` the node's first rank adds up everything, instead of its share.
        """
        self.signals = Signals(local, everyone, ranks)
        self._local = local
        self.everyone = everyone
        self._first_takes_all = first_takes_all
        self._regions: list[_Region] = []
        self._pending: deque[_Sum] = deque()
        self._num_started = 0
        self.waited_seconds = 0.0
        """Time that this rank has waited for summands of others."""
        try:
            self._small = _Staging(self._map(64 * SMALL_BYTES), SMALL_BYTES)
            self._large = _Staging(self._map(4 * PIECE_BYTES), PIECE_BYTES)
        except BaseException:
            self.signals.close()
            raise

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros ``(numel,)`` that are summed in place, or NoSharedMemory. Collective."""
        num_bytes = numel * dtype.itemsize
        region = self._map(max(_PAGE_BYTES, -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES))
        self._regions.append(region)
        return region.own[:num_bytes].view(dtype)

    def start(self, tensor: torch.Tensor, between: Between | None = None) -> Pending:
        """Start to sum ``tensor``, which `is_summable`; ``between`` happens to each rank's share.

        Much of a large one that is not from `allocate` is summed now. CommunicationError if a peer
        is gone.
        """
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.numel() == 0:
            return Done()
        if not tensor.is_contiguous():
            dense = tensor.contiguous()
            self.start(dense, between).wait()
            tensor.copy_(dense)
            return Done()
        for region in self._regions:
            offset = region.offset(tensor)
            if offset is not None:
                layout = self._layout(region, offset, tensor.numel(), tensor.dtype)
                return self._begin(_Sum(self, layout, between))
        flat = tensor.view(-1)
        if flat.nbytes <= PIECE_BYTES:
            return self._begin(self._stage(flat, between))
        for piece in torch.split(flat, PIECE_BYTES // flat.element_size()):
            last = self._begin(self._stage(piece, between))
        return last

    def close(self) -> None:
        """Let go of the memory, which lives on with the tensors that use it."""
        self.signals.close()
        self._regions.clear()
        self._pending.clear()
        for staging in (self._small, self._large):
            staging.users.clear()  # which refer to this object

    def finish(self, last: _Sum) -> None:
        """Finish the sums up to ``last``."""
        while not last.is_finished:
            oldest = self._pending[0]
            if not oldest.is_added:
                if not self.signals.arrived(READY, oldest.number):
                    began = time.perf_counter()
                    self.signals.wait(READY, oldest.number)
                    self.waited_seconds += time.perf_counter() - began
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

    def _stage(self, piece: torch.Tensor, between: Between | None) -> _Sum:
        """Copy to where the peers see it; places follow from the order of starts alone."""
        staging = self._small if piece.nbytes <= SMALL_BYTES else self._large
        slot = staging.next
        before = staging.users[slot]
        if before is not None:
            self.finish(before)
        offset = slot * staging.slot_bytes
        layout = self._layout(staging.region, offset, piece.numel(), piece.dtype)
        layout.own.copy_(piece)
        started = staging.users[slot] = _Sum(self, layout, between, copy_to=piece)
        staging.next = (slot + 1) % len(staging.users)
        return started

    def _map(self, num_bytes: int) -> _Region:
        file = map_together(self._local, num_bytes * self._local.world_size, self.everyone)
        file.close()
        whole = torch.frombuffer(file.buffer, dtype=torch.uint8)
        return _Region(torch.split(whole, num_bytes), self._local.rank)

    def _layout(self, region: _Region, offset: int, numel: int, dtype: torch.dtype) -> _Layout:
        """Made once for tensors that are summed again: dozens of views take longer than a sum."""
        key = (offset, numel, dtype)
        layout = region.layouts.get(key)
        if layout is None:
            if len(region.layouts) == _MAX_LAYOUTS:
                region.layouts.clear()
            layout = _Layout(region, offset, dtype, numel, self._share(numel, dtype.itemsize))
            region.layouts[key] = layout
        return layout

    def _share(self, numel: int, element_size: int) -> slice:
        """The elements that this rank adds up; whole cache lines but for the last."""
        if self._first_takes_all:
            return slice(0, numel if self._local.rank == 0 else 0)
        unit = max(1, _LINE_BYTES // element_size)
        size = -(-numel // (unit * self._local.world_size)) * unit
        first = min(numel, size * self._local.rank)
        return slice(first, min(numel, first + size))


class _Region:
    """Memory of equal size for each rank of the node."""

    def __init__(self, buffers: Sequence[torch.Tensor], rank: int) -> None:
        """``buffers`` are the ranks' parts, uint8; ``rank`` is the own rank in the node."""
        self.buffers = buffers
        self.own = buffers[rank]
        self.layouts: dict[tuple[int, int, torch.dtype], _Layout] = {}
        self._start = self.own.data_ptr()
        self._num_bytes = self.own.nbytes

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Return where a contiguous tensor begins in this rank's part; None if it is not there."""
        offset = tensor.data_ptr() - self._start
        return offset if 0 <= offset <= self._num_bytes - tensor.nbytes else None


class _Layout:
    """The parts of a tensor that this rank adds up, and where they lie."""

    def __init__(
        self, region: _Region, offset: int, dtype: torch.dtype, numel: int, share: slice
    ) -> None:
        size = dtype.itemsize
        self.own = region.own[offset : offset + numel * size].view(dtype)
        """This rank's summand."""
        first, last = offset + share.start * size, offset + share.stop * size
        self.shares = [buffer[first:last].view(dtype) for buffer in region.buffers]
        """This rank's share in each rank's summand; the sum is formed in the first."""
        num_together = BLOCK_BYTES * torch.get_num_threads() // size
        self.blocks = [
            blocks
            for blocks in zip(*(torch.split(s, num_together) for s in self.shares), strict=True)
            if len(blocks[0])
        ]
        """The same in parts, each with the corresponding ones of all ranks."""


class _Staging:
    """Slots of one size, used in turn."""

    def __init__(self, region: _Region, slot_bytes: int) -> None:
        self.region = region
        self.slot_bytes = slot_bytes
        self.users: list[_Sum | None] = [None] * (region.own.nbytes // slot_bytes)
        """The last of each slot, which must be finished before the next one uses it."""
        self.next = 0


class _Sum:
    """One tensor's sum, in this order: add up, distribute, finish."""

    def __init__(
        self,
        owner: SharedSum,
        layout: _Layout,
        between: Between | None,
        copy_to: torch.Tensor | None = None,
    ) -> None:
        self._owner = owner
        self._layout = layout
        self._between = between
        self._copy_to = copy_to
        self._rest: Pending = Done()
        self.number = 0
        self.is_added = False
        self.is_finished = False

    def wait(self) -> None:
        self._owner.finish(self)

    def add(self) -> None:
        """Add up this rank's share, all of whose summands must be there."""
        self.is_added = True
        for blocks in self._layout.blocks:
            _add_up(blocks)
            if self._between is None:
                for block in blocks[1:]:
                    block.copy_(blocks[0])
        if self._between is None:
            self._owner.signals.send(DONE)
        elif self._layout.blocks:
            self._rest = self._between(self._layout.shares[0])

    def distribute(self) -> None:
        """Give the share to the peers, unless that is done."""
        if self._between is None:
            return
        self._rest.wait()
        first, *others = self._layout.shares
        for other in others:
            other.copy_(first)
        self._owner.signals.send(DONE)

    def finish(self) -> None:
        """Take the result, when all shares are there."""
        if self._copy_to is not None:
            self._copy_to.copy_(self._layout.own)
            self._copy_to = None
        self.is_finished = True


class Shared(Topology):
    """Sums in the memory of the one node that all ranks are on. Nothing of them is sent.

    Tensors that are not dense, not on the CPU, or of an unusual type are left to torch.
    """

    def __init__(self, node: SharedSum) -> None:
        self._node = node

    @property
    def waited_seconds(self) -> float:
        return self._node.waited_seconds

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `Communicator.allocate`; each rank has the tensors of its node mapped."""
        if device.type == "cpu" and dtype in _SUMMED:
            try:
                return self._node.allocate(numel, dtype)
            except NoSharedMemory as error:
                everyone = self._node.everyone
                say(everyone, "%d numbers of %s cannot be shared: %s", numel, dtype, error)
        return super().allocate(numel, dtype, device)

    def start(self, comm: ProcessGroupCommunicator, tensor: torch.Tensor) -> Pending:
        if not is_summable(tensor):
            return super().start(comm, tensor)
        return self._node.start(tensor)

    def close(self) -> None:
        self._node.close()


def is_summable(tensor: torch.Tensor) -> bool:
    """Return True if `SharedSum` can sum the tensor."""
    is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return is_dense and tensor.dtype in _SUMMED


def _add_up(blocks: Sequence[torch.Tensor]) -> None:
    """Leave the sum in the first; half-precision numbers are rounded once, at the end."""
    first, *others = blocks
    total = first.float() if first.dtype in _HALF and len(others) > 1 else first
    for other in others:
        total += other
    if total is not first:
        first.copy_(total)
