"""How do the ranks of a gang form the mean of their states? By sums of shares, over the network.

The same mean as `merge.merge` forms on a list of states, up to rounding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparkdl.comm import Communicator
from sparkdl.sync.gradients import Bucket, make_buckets, zeros
from sparkdl.sync.merge import STEP

if TYPE_CHECKING:
    from sparkdl.compress.base import Compression

BUCKET_BYTES = 25 << 20
SHARE_BYTES = 16
"""What a rank tells each other one before a mean: its weight, and whether its optimizer stepped."""


class MeanOfReplicas:
    """Replaces what the ranks hold by the mean over ranks. All methods but states are collective.

    Args:
        model: the rank's replica.
        optimizer: its optimizer.
        comm: the gang.
        compression: what the parameters' changes are sent with; None: as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        comm: Communicator,
        compression: Compression | None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._comm = comm
        self._has_state = [False] * comm.world_size
        self._buckets: list[Bucket] = []
        self._compressors = []
        if compression is not None and comm.world_size > 1:
            trained = [p for p in model.parameters() if p.requires_grad]
            self._buckets = make_buckets(trained, BUCKET_BYTES, zeros)
            self._compressors = [compression.make(b.gradients, comm) for b in self._buckets]

    @property
    def is_lossy(self) -> bool:
        """Whether what is sent are compressed changes, for which `parameters` needs an anchor."""
        return bool(self._compressors)

    def shares(self, weight: float) -> list[float]:
        """Every rank's part in the mean, given this rank's weight; all zero if nobody has one."""
        device = next(self._model.parameters()).device
        mine = torch.tensor([weight, len(self._optimizer.state)], dtype=torch.float64)
        weights, num_states = self._comm.all_gather(mine.to(device)).unbind(1)
        self._has_state = (num_states > 0).tolist()
        total = weights.sum().item()
        return [one / total if total > 0 else 0.0 for one in weights.tolist()]

    def parameters(
        self,
        parameters: Sequence[torch.Tensor],
        shares: Sequence[float],
        anchor: Sequence[torch.Tensor] | None,
    ) -> None:
        """Overwrite ``parameters`` by their mean; ``anchor`` is where all ranks began."""
        if not self._compressors:
            self.tensors(parameters, shares)
            return
        assert anchor is not None
        place = {id(parameter): i for i, parameter in enumerate(parameters)}
        pending = []
        for bucket, compressor in zip(self._buckets, self._compressors, strict=True):
            for parameter, change in zip(bucket.parameters, bucket.gradients, strict=True):
                torch.sub(parameter, anchor[place[id(parameter)]], out=change)
            bucket.flat.mul_(shares[self._comm.rank])
            pending.append(compressor.start(bucket.flat))
        for bucket, message in zip(self._buckets, pending, strict=True):
            message.wait()
            for parameter, change in zip(bucket.parameters, bucket.gradients, strict=True):
                torch.add(anchor[place[id(parameter)]], change, out=parameter)

    def tensors(self, tensors: Sequence[torch.Tensor], shares: Sequence[float]) -> None:
        """Overwrite floating tensors, of equal shapes on all ranks, by their mean."""
        share = shares[self._comm.rank]
        pending = []
        for group in _by_kind(tensors):
            flat = torch.cat([tensor.detach().flatten() for tensor in group])
            if share == 0:
                flat.zero_()  # not multiplied: a rank that does not count may hold infinities
            else:
                flat.mul_(share)
            pending.append((group, flat, self._comm.all_reduce_async(flat)))
        for group, flat, message in pending:
            message.wait()
            pieces = torch.split(flat, [tensor.numel() for tensor in group])
            for tensor, piece in zip(group, pieces, strict=True):
                tensor.detach().copy_(piece.view_as(tensor))

    def buffers(self, shares: Sequence[float]) -> None:
        """Overwrite floating buffers by their mean, others by those of the first that counts."""
        buffers = list(self._model.buffers())
        self.tensors([b for b in buffers if b.is_floating_point()], shares)
        source = next(rank for rank, share in enumerate(shares) if share > 0)
        for buffer in buffers:
            if not buffer.is_floating_point():
                self._comm.broadcast(buffer, source)

    def optimizer_state(self, shares: Sequence[float]) -> None:
        """Overwrite the optimizer's state by the mean; counts of steps by the largest."""
        if any(self._has_state) and not all(self._has_state):
            self._complete_optimizer()
        state = self._optimizer.state
        trained = [p for group in self._optimizer.param_groups for p in group["params"]]
        tensors, steps = [], []
        for parameter in trained:
            for key, value in state.get(parameter, {}).items():
                if key == STEP:
                    steps.append((parameter, value))
                elif isinstance(value, torch.Tensor) and value.is_floating_point():
                    tensors.append(value)
        self.tensors(tensors, shares)
        self._largest_steps(steps)

    def _largest_steps(self, steps: Sequence[tuple[torch.Tensor, Any]]) -> None:
        if not steps:
            return
        device = steps[0][0].device
        mine = torch.tensor([float(value) for _, value in steps], dtype=torch.float64)
        largest = self._comm.all_gather(mine.to(device)).amax(0).tolist()
        for (parameter, value), step in zip(steps, largest, strict=True):
            if isinstance(value, torch.Tensor):
                value.fill_(step)
            else:
                self._optimizer.state[parameter][STEP] = type(value)(step)

    def _complete_optimizer(self) -> None:
        """Give states of zeros to the optimizers that never stepped while others did."""
        source = self._has_state.index(True)
        is_source = self._comm.rank == source
        kinds = self._comm.broadcast_bytes(
            json.dumps(self._kinds()).encode() if is_source else None, source
        )
        if self._optimizer.state:
            return
        trained = [p for group in self._optimizer.param_groups for p in group["params"]]
        for place, entries in json.loads(kinds):
            for key, shape, dtype in entries:
                # torch keeps counts of steps on the CPU.
                device = torch.device("cpu") if key == STEP else trained[place].device
                self._optimizer.state[trained[place]][key] = torch.zeros(
                    shape, dtype=getattr(torch, dtype), device=device
                )

    def _kinds(self) -> list[Any]:
        """Shape and dtype of each tensor of the optimizer's state."""
        trained = [p for group in self._optimizer.param_groups for p in group["params"]]
        return [
            [
                place,
                [
                    [key, list(value.shape), str(value.dtype).removeprefix("torch.")]
                    for key, value in self._optimizer.state[parameter].items()
                    if isinstance(value, torch.Tensor)
                ],
            ]
            for place, parameter in enumerate(trained)
            if parameter in self._optimizer.state
        ]

    def state_dict(self) -> dict[str, Any]:
        """The compressors' states that are equal on all ranks."""
        return {"compressors": [one.state_dict() for one in self._compressors]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        if self._compressors and state["compressors"]:  # a gang of one has none
            for one, values in zip(self._compressors, state["compressors"], strict=True):
                one.load_state_dict(values)

    def rank_state_dict(self) -> dict[str, Any]:
        """The compressors' states of this rank."""
        return {"compressors": [one.rank_state_dict() for one in self._compressors]}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `rank_state_dict` gave."""
        for one, values in zip(self._compressors, state["compressors"], strict=True):
            one.load_rank_state_dict(values)


def _by_kind(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())
