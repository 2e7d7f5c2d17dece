"""The exchanges of ranks along ``shard`` in forward and backward passes, and their order.

Torch (FSDP2) sums the gradients of those parameters that this rank's backward pass has used, and
gathers the layers that this rank calls. Where batches decide which layers are used, ranks would sum
unlike things, and nobody would notice while sizes are equal.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from sparkdl.comm.communicator import Communicator
from sparkdl.errors import ConfigError

_END = -1
"""Stands for the end of a pass, where nothing is exchanged."""


class Exchanges:
    """Lets all ranks sum the gradients of all parameters, of the same layers at the same time."""

    def __init__(self, root: nn.Module, comm: Communicator, device: torch.device) -> None:
        """Watch the exchanges of ``root``, which `divide` has divided, among the ranks of ``comm``.

        ``device`` is where it computes.
        """
        self.used: set[int] = set()
        """Ids of the parameters that this rank's backward passes have used since it was cleared."""
        self._comm, self._device = comm, device
        parts = {name: part for name, part in root.named_modules() if isinstance(part, FSDPModule)}
        self._names = list(parts)
        self._sizes = [sum(p.numel() for p in part.parameters()) for part in root.modules()
                       if isinstance(part, FSDPModule)]  # fmt: skip
        self._seen: list[int] = []
        """Numbers of the layers that were exchanged in this step, on a device that is not waited
        for."""
        for number, part in enumerate(parts.values()):
            state: Any = part._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in groups:
                if group is not None:
                    self._watch(group, number)
        if len(parts) > 1:
            root.register_forward_hook(self._end)

    def end_step(self) -> None:
        """See that ranks have exchanged the same layers in a step. Collective."""
        self._agree(_END)
        if not self._seen:
            return
        digest = zlib.crc32(array("q", self._seen).tobytes())
        if len(set(self._gathered(digest))) > 1:
            orders = [array("q", data) for data in
                      self._comm.all_gather_bytes(array("q", self._seen).tobytes())]  # fmt: skip
            self._refuse(next(n for n in zip_longest(*orders, fillvalue=_END) if len(set(n)) > 1))
        self._seen.clear()

    def _end(self, *_: Any) -> None:
        self._agree(_END)

    def _watch(self, group: Any, number: int) -> None:
        unshard: Callable[..., None] = group.unshard
        post_backward: Callable[..., None] = group.post_backward

        def gather(*args: Any, **kwargs: Any) -> None:
            if group._all_gather_result is None and not group.is_unsharded:
                self._agree(number)
            unshard(*args, **kwargs)

        def reduce(*args: Any) -> None:
            for one in group.fsdp_params:
                whole = getattr(one, "_unsharded_param", None)
                if whole is None or not whole.requires_grad:
                    continue
                if whole.grad is not None or one.unsharded_accumulated_grad is not None:
                    self.used.add(id(one.sharded_param))
                else:
                    whole.grad = torch.zeros_like(whole)
            self._agree(number)
            post_backward(*args)

        group.unshard, group.post_backward = gather, reduce

    def _agree(self, number: int) -> None:
        """See that the other ranks exchange the same layer, by a small message before it."""
        if len(self._names) == 1:
            return
        if self._device.type != "cpu":  # it would have to wait for all that was computed before
            self._seen.append(number)
            return
        numbers = self._gathered(number)
        if len(set(numbers)) > 1:
            self._refuse(numbers)

    def _gathered(self, number: int) -> list[int]:
        own = torch.tensor([number], device=self._device)
        return self._comm.all_gather(own).flatten().tolist()

    def _refuse(self, numbers: Iterable[int]) -> NoReturn:
        """Raise ConfigError, on all ranks, about the layers that each would exchange now."""
        found = [number for number in dict.fromkeys(numbers) if number != _END]
        shown = " and ".join(repr(self._names[number]) for number in found if number)
        largest = max((self._sizes[number] for number in found if number), default=0)
        raise ConfigError(
            f"Mesh: workers along shard compute different layers at the same time, here {shown}, "
            "because rows or random numbers decide which layers are called; such layers cannot be "
            f"gathered by themselves: set smallest_unit={largest + 1} or more in the Mesh, so that "
            "they are gathered with what surrounds them"
        )
