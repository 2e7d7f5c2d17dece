"""The mean of the replicas' states: in a gang by sums over the network, in rounds by `merge`.

Both are the same up to rounding, and so is the mean of means: a tree of merges gives what one does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sparkdl.comm.communicator import Communicator
from sparkdl.storage.checkpoint_format import decode, encode
from sparkdl.storage.tensor_tree import snapshot
from sparkdl.sync.module_tensors import Agreement, is_extra
from sparkdl.sync.sparse_gradients import summed

_PIECE = 1 << 16
"""Numbers that are summed at a time: their float64 sums stay in the cache."""
_MOST_STATES = 1 << 20
"""More parameters than this have states only where all have."""
STEP = "step"
"""Key under which torch's optimizers count their steps; a count is no quantity to average."""


CHANGES = "changes"
"""Key of the parameters' changes in a state that has them in place of the parameters."""
_OF_MODULES = ("model", CHANGES)
"""Keys in a replica's state of dicts with tensors of the module by name."""


class MeanOfReplicas:
    """Replaces what the ranks hold by the mean over ranks. All methods are collective."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._comm = comm
        self._num_states = [0] * comm.world_size
        self._agreement: Agreement | None = None
        self._digests: list[int] = []
        self.learning_rate = math.nan
        """That of the first rank that counted when `shares` was last called: where a replica
        skips a step that others take, schedules differ."""

    def shares(
        self, weight: float, learning_rate: float = math.nan, *, with_buffers: bool = False
    ) -> list[float]:
        """Every rank's part in the mean, given this rank's weight; all zero if nobody has one.

        ``with_buffers``: `buffers` follows.
        """
        device = next(self._model.parameters()).device
        self._agreement = Agreement(self._model) if with_buffers else None
        digest = 0 if self._agreement is None else self._agreement.digest
        # A float64 has room for both.
        num_states = sum(map(bool, self._optimizer.state.values()))
        both = digest * _MOST_STATES + min(num_states, _MOST_STATES - 1)
        mine = torch.tensor([weight, both, learning_rate], dtype=torch.float64)
        weights, numbers, rates = self._comm.all_gather(mine.to(device)).cpu().unbind(1)
        self._digests = [int(number) // _MOST_STATES for number in numbers.tolist()]
        self._num_states = [int(number) % _MOST_STATES for number in numbers.tolist()]
        self.learning_rate = rates[int((weights > 0).int().argmax())].item()
        total = weights.sum().item()
        return [one / total if total > 0 else 0.0 for one in weights.tolist()]

    def tensors(self, tensors: Sequence[torch.Tensor], shares: Sequence[float]) -> None:
        """Overwrite tensors of numbers, of equal shapes on all ranks, by their mean."""
        share = shares[self._comm.rank]
        pending = []
        for group in by_kind([as_real(tensor) for tensor in tensors]):
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
        """Overwrite floating buffers by their mean, others by those of the first that counts.

        Also frozen parameters that forward has changed. `shares` was called with buffers.
        """
        assert self._agreement is not None
        counts = [share > 0 for share in shares]
        places = self._agreement.places(self._comm, self._digests, counts)
        values = [(place, value) for place in places if (value := place.value) is not None]
        means = [(place, value.clone()) for place, value in values if is_number(value)]
        self.tensors([mean for _, mean in means], shares)
        for place, mean in means:
            place.set(mean)
        for place, value in values:
            if not is_number(value):
                sent = value.contiguous()
                self._comm.broadcast(sent, counts.index(True))
                place.set(sent)

    def optimizer_state(self, shares: Sequence[float]) -> None:
        """Overwrite the optimizer's state by the mean; counts of steps by the largest.

        States that some ranks have not made, of parameters that they have not used, are those of
        the others.
        """
        state = self._optimizer.state
        trained = [p for group in self._optimizer.param_groups for p in group["params"]]
        everyone = [list(shares)] * len(trained)
        if any(self._num_states) and set(self._num_states) != {len(trained)}:
            everyone = self._complete_optimizer(trained, shares)
        tensors: dict[tuple[float, ...], list[torch.Tensor]] = {}
        steps, sparse = [], []
        for parameter, own in zip(trained, everyone, strict=True):
            for key, value in state.get(parameter, {}).items():
                if _is_count(key, value):
                    steps.append((parameter, value))
                elif isinstance(value, torch.Tensor) and is_number(value):
                    if value.is_sparse:
                        sparse.append((parameter, key, value * own[self._comm.rank]))
                        continue
                    tensors.setdefault(tuple(own), []).append(value)
        for which, some in tensors.items():
            self.tensors(some, which)
        parts, like = [part for _, _, part in sparse], [p.detach() for p, _, _ in sparse]
        for (parameter, key, _), mean in zip(sparse, summed(parts, like, self._comm), strict=True):
            state[parameter][key] = mean
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

    def _complete_optimizer(
        self, trained: Sequence[torch.Tensor], shares: Sequence[float]
    ) -> list[list[float]]:
        """Give this rank the states that others have made; each parameter's shares in the mean."""
        state, rank = self._optimizer.state, self._comm.rank
        mine = bytes(bool(state.get(parameter)) for parameter in trained)
        has = list(zip(*self._comm.all_gather_bytes(mine), strict=True))
        """Flags of each parameter: 1 for each rank that has a state of it."""
        sources = {
            place: ranks.index(1) for place, ranks in enumerate(has) if 0 < sum(ranks) < len(ranks)
        }
        for source in sorted(set(sources.values())):
            sent = [place for place, first in sources.items() if first == source]
            tree = {place: state[trained[place]] for place in sent} if rank == source else {}
            data = b"".join(encode(snapshot(tree))) if rank == source else None
            theirs = decode(self._comm.broadcast_bytes(data, source), "the state of an optimizer")
            for place in sent:
                if not has[place][rank]:
                    like = trained[place]
                    state[like] = {key: placed(v, key, like) for key, v in theirs[place].items()}
        found = []
        for ranks in has:
            own = [share * one for share, one in zip(shares, ranks, strict=True)]
            total = sum(own)
            is_alike = all(ranks) or not any(ranks)
            if is_alike:
                own, total = list(shares), 1.0
            elif total == 0:  # nobody that counts has one: that of the first is as good as any
                own[ranks.index(1)] = total = 1.0
            found.append([one / total for one in own])
        return found


def placed(value: Any, key: Any, like: torch.Tensor) -> Any:
    """A value of an optimizer's state where its parameter is; counts of steps are on the CPU."""
    return value.to(like.device) if isinstance(value, torch.Tensor) and key != STEP else value


def _is_count(key: Any, value: Any) -> bool:
    """True for a count of steps; optimizers of the user's own may call a direction ``step``."""
    return key == STEP and not (isinstance(value, torch.Tensor) and value.dim() > 0)


def is_number(tensor: torch.Tensor) -> bool:
    """True if a tensor has numbers of which there is a mean."""
    return tensor.is_floating_point() or tensor.is_complex()


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as real numbers."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


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
    ``step`` becomes the largest. Integer tensors, such as BatchNorm's count of batches, sequences
    of unequal lengths, extra states of layers, and everything else that is no tensor, are those of
    the first state with a positive weight. Keys that a state lacks (an optimizer that never
    stepped) count for the others
    only. ValueError if no weight is positive.
    """
    kept = [(s, w) for s, w in zip(states, weights, strict=True) if w > 0]
    if not kept:
        raise ValueError("no state has a positive weight")
    return _merge([state for state, _ in kept], [weight for _, weight in kept])


def _merge(
    states: list[Any], weights: list[float], key: Any = None, *, is_tensor: bool = False
) -> Any:
    """As `merge`; ``is_tensor``: of a module's tensor, whose name tells nothing."""
    first = states[0]
    if is_extra(key):
        return first
    if isinstance(first, dict):
        return _merge_dicts(states, weights, are_tensors=key in _OF_MODULES)
    if isinstance(first, list | tuple):
        if {len(state) for state in states} != {len(first)}:
            return first
        merged = [_merge(list(items), weights) for items in zip(*states, strict=True)]
        return type(first)(merged) if type(first) in (list, tuple) else first
    if not is_tensor and _is_count(key, first):
        return max(states, key=float)
    if isinstance(first, torch.Tensor) and is_number(first) and _is_added(first):
        # Those of another shape have no mean with it: a buffer that is each replica's own.
        alike = [
            (state, weight)
            for state, weight in zip(states, weights, strict=True)
            if isinstance(state, torch.Tensor) and state.shape == first.shape
        ]
        return weighted_mean([state for state, _ in alike], [weight for _, weight in alike])
    return first


def _merge_dicts(
    states: list[dict[Any, Any]], weights: list[float], *, are_tensors: bool
) -> dict[Any, Any]:
    merged = {}
    pairs = [(s, w) for s, w in zip(states, weights, strict=True) if isinstance(s, dict)]
    for key in dict.fromkeys(key for state, _ in pairs for key in state):
        having = [(state[key], weight) for state, weight in pairs if key in state]
        values, their_weights = [value for value, _ in having], [weight for _, weight in having]
        merged[key] = _merge(values, their_weights, key, is_tensor=are_tensors)
    return merged


def _is_added(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided or tensor.is_sparse


def weighted_mean(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """``sum(w * t) / sum(w)`` in the dtype of the first tensor, formed in float64."""
    if tensors[0].is_sparse:
        parts = [t.double() * (w / sum(weights)) for t, w in zip(tensors, weights, strict=True)]
        return sum(parts[1:], parts[0]).coalesce().to(tensors[0].dtype)
    if tensors[0].is_complex():
        return torch.view_as_complex(weighted_mean([as_real(t) for t in tensors], weights))
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
