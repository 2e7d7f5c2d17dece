"""The mean of the replicas' states: in a gang by sums over the network, in rounds by `merge`.

Both are the same up to rounding, and so is the mean of means: a tree of merges gives what one does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sparkdl.comm.communicator import Communicator
from sparkdl.sync.frozen_layers import moving_buffers

_PIECE = 1 << 16
"""Numbers that are summed at a time: their float64 sums stay in the cache."""
STEP = "step"
"""Key under which torch's optimizers count their steps; a count is no quantity to average."""


class MeanOfReplicas:
    """Replaces what the ranks hold by the mean over ranks. All methods are collective."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._comm = comm
        self._has_state = [False] * comm.world_size
        self.learning_rate = math.nan
        """That of the first rank that counted when `shares` was last called: where a replica
        skips a step that others take, schedules differ."""

    def shares(self, weight: float, learning_rate: float = math.nan) -> list[float]:
        """Every rank's part in the mean, given this rank's weight; all zero if nobody has one."""
        device = next(self._model.parameters()).device
        mine = torch.tensor(
            [weight, len(self._optimizer.state), learning_rate], dtype=torch.float64
        )
        weights, num_states, rates = self._comm.all_gather(mine.to(device)).cpu().unbind(1)
        self._has_state = (num_states > 0).tolist()
        self.learning_rate = rates[int((weights > 0).int().argmax())].item()
        total = weights.sum().item()
        return [one / total if total > 0 else 0.0 for one in weights.tolist()]

    def tensors(self, tensors: Sequence[torch.Tensor], shares: Sequence[float]) -> None:
        """Overwrite floating tensors, of equal shapes on all ranks, by their mean."""
        share = shares[self._comm.rank]
        pending = []
        for group in by_kind(tensors):
            flat = flat_of(group)
            if share == 0:
                flat.zero_()  # not multiplied: a rank that does not count may hold infinities
            else:
                flat.mul_(share)
            pending.append((group, flat, self._comm.all_reduce_async(flat)))
        for group, flat, message in pending:
            message.wait()
            fill(group, flat)

    def buffers(self, shares: Sequence[float]) -> None:
        """Overwrite floating buffers by their mean, others by those of the first that counts."""
        buffers = moving_buffers(self._model)
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
        state = self._optimizer.state
        trained = [p for group in self._optimizer.param_groups for p in group["params"]]
        kinds = [
            (place, key, list(value.shape), str(value.dtype).removeprefix("torch."))
            for place, parameter in enumerate(trained)
            for key, value in state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        ]
        mine = json.dumps(kinds).encode() if self._comm.rank == source else None
        theirs = json.loads(self._comm.broadcast_bytes(mine, source))
        if state:
            return
        for place, key, shape, dtype in theirs:
            # torch keeps counts of steps on the CPU.
            device = torch.device("cpu") if key == STEP else trained[place].device
            zeros = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            state[trained[place]][key] = zeros


def flat_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The numbers of all tensors, one after the other."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def fill(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Overwrite tensors by the numbers that lie in ``flat`` as `flat_of` puts them."""
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.detach().copy_(piece.view_as(tensor))


def by_kind(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors that may share a message: those of one dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def merge(states: Sequence[Any], weights: Sequence[float]) -> Any:
    """Weighted mean of ``states``, taken in their order; the inputs stay as they are.

    They are trees of dicts, lists and tuples, of equal shape but for missing keys. Floating tensors
    become their weighted mean, formed in float64 and kept in their own dtype. A number called
    ``step`` becomes the largest. Integer tensors, such as BatchNorm's count of batches, and
    everything else that is no tensor, are those of the first state with a positive weight. Keys
    that a state lacks (an optimizer that never stepped) count for the others only. ValueError if no
    weight is positive.
    """
    kept = [(s, w) for s, w in zip(states, weights, strict=True) if w > 0]
    if not kept:
        raise ValueError("no state has a positive weight")
    return _merge([state for state, _ in kept], [weight for _, weight in kept])


def _merge(states: list[Any], weights: list[float], key: Any = None) -> Any:
    first = states[0]
    if isinstance(first, dict):
        return _merge_dicts(states, weights)
    if isinstance(first, list | tuple):
        merged = [_merge(list(items), weights) for items in zip(*states, strict=True)]
        return type(first)(merged) if type(first) in (list, tuple) else first
    if key == STEP:
        return max(states, key=float)
    if isinstance(first, torch.Tensor) and first.is_floating_point():
        return weighted_mean(states, weights)
    return first


def _merge_dicts(states: list[dict[Any, Any]], weights: list[float]) -> dict[Any, Any]:
    merged = {}
    for key in dict.fromkeys(key for state in states for key in state):
        having = [(s[key], w) for s, w in zip(states, weights, strict=True) if key in s]
        merged[key] = _merge([value for value, _ in having], [w for _, w in having], key)
    return merged


def weighted_mean(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """``sum(w * t) / sum(w)`` in the dtype of the first tensor, formed in float64."""
    total = sum(weights)
    mean = torch.empty_like(tensors[0], memory_format=torch.contiguous_format)
    flat = mean.view(-1)
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    wide = torch.empty(min(_PIECE, len(flat)), dtype=torch.float64, device=mean.device)
    for start in range(0, len(flat), _PIECE):
        stop = min(start + _PIECE, len(flat))
        piece = wide[: stop - start].zero_()
        for part, weight in zip(parts, weights, strict=True):
            piece.add_(part[start:stop], alpha=weight / total)
        flat[start:stop] = piece
    return mean
