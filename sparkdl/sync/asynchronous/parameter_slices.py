"""Slices: which rank serves which parameters, and the part of an optimizer that steps them.

A slice is the part of the parameters that one rank serves. Tensors are never cut, because
optimizers such as LARS, LAMB, Muon or Adafactor look at whole ones.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.sync.own_attributes import check_fused
from sparkdl.sync.strategy import MakeOptimizer

Options = list[dict[str, Any]]
"""Numbers of each parameter group of an optimizer, such as its learning rate, by their names."""


MOST_SERVERS = 64
"""Ranks that serve parameters, at most: every rank has a connection, and a thread, to each of them.

Of ``W`` ranks a server gets ``W / 64`` times the bytes that it would get if all of them served, and
keeps two copies of its slice for each: for 1,000 ranks and as many weights in each slice, 32 times
the bytes of all weights in 64 places, instead of twice those in each of 1,000.
"""


def server_ranks(nodes: Sequence[int]) -> list[int]:
    """The ranks that serve, in rank order: all, or `MOST_SERVERS`, spread over the nodes.

    Args:
        nodes: the node of each rank.
    """
    before: Counter[int] = Counter()
    turns = []
    for rank, node in enumerate(nodes):
        turns.append((before[node], rank))
        before[node] += 1
    return sorted(rank for _, rank in sorted(turns)[:MOST_SERVERS])


def cut(sizes: Sequence[int], num_slices: int) -> list[list[int]]:
    """Spread tensors evenly: the places, in ``sizes``, of those that each slice holds, if any.

    Large ones first, each into the slice that has least so far: no slice is more than a third
    above the best possible (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
    """
    loads = [0] * num_slices
    slices: list[list[int]] = [[] for _ in range(num_slices)]
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        lightest = loads.index(min(loads))
        slices[lightest].append(place)
        loads[lightest] += sizes[place]
    return [sorted(places) for places in slices]


class ServedOptimizer(torch.optim.Optimizer):
    """Stands for the optimizer in the training loop where parameters are served elsewhere.

    Schedules act on its groups; a step only notes their numbers, which go with the next push.
    """

    def __init__(self, made: torch.optim.Optimizer) -> None:
        self.served_state: dict[int, Any] = {}
        """State of the parameters, by their places in the groups, when all ranks agreed last."""
        self._noted: Options | None = None
        super().__init__(made.param_groups, made.defaults)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Note that there is a gradient to push, and the groups' numbers of this moment."""
        assert closure is None, "the training loop computes gradients itself"
        self._noted = group_options(self)

    def take(self) -> Options | None:
        """The numbers noted since the last call; None if there was no step."""
        noted, self._noted = self._noted, None
        return noted

    def state_dict(self) -> dict[str, Any]:
        """As if the whole optimizer were here."""
        return {**super().state_dict(), "state": self.served_state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` of this or of an undivided optimizer gave."""
        super().load_state_dict({**state_dict, "state": {}})
        self.served_state = state_dict["state"]


class SlicedOptimizer:
    """The part of an optimizer that steps the parameters of one slice.

    The optimizer is made as for all parameters, so that the user's groups are kept, and those that
    are served elsewhere are taken out of the groups. It must take its parameters from there.
    ``served`` has, by places, the tensors that are stepped in the parameters' stead.
    """

    def __init__(
        self,
        make_optimizer: MakeOptimizer,
        parameters: Sequence[nn.Parameter],
        served: Mapping[int, nn.Parameter],
    ) -> None:
        self._optimizer = make_optimizer(
            [served.get(place, parameter) for place, parameter in enumerate(parameters)]
        )
        kept = {id(parameter) for parameter in served.values()}
        self._places: list[int] = []
        """Places of the slice's parameters, in the order of the groups of the whole optimizer."""
        first = 0
        for group in self._optimizer.param_groups:
            members = group["params"]
            is_kept = [id(parameter) in kept for parameter in members]
            self._places += [first + i for i, keep in enumerate(is_kept) if keep]
            first += len(members)
            for name in {"params", "param_names"} & group.keys():
                group[name] = [one for one, keep in zip(group[name], is_kept, strict=True) if keep]
        for parameter in [p for p in self._optimizer.state if id(p) not in kept]:
            del self._optimizer.state[parameter]

    def step(self, options: Options, share: float) -> None:
        """Step with these numbers of the groups and ``share`` of their learning rates."""
        for group, numbers in zip(self._optimizer.param_groups, options, strict=True):
            for name, number in numbers.items():
                group[name] = tuple(number) if isinstance(number, list) else number
            if share != 1:
                group["lr"] = group["lr"] * share
        self._optimizer.step()

    def state(self) -> dict[int, Any]:
        """The state, by the parameters' places in the groups of the whole optimizer."""
        own = self._optimizer.state_dict()["state"]
        return {place: own[i] for i, place in enumerate(self._places) if i in own}

    def load_state(self, whole: Mapping[int, Any]) -> None:
        """Take a copy of this slice's part of the state of a whole optimizer."""
        own = self._optimizer.state_dict()
        mine = {i: whole[place] for i, place in enumerate(self._places) if place in whole}
        self._optimizer.load_state_dict({**own, "state": copy.deepcopy(mine)})
        check_fused(self._optimizer)


def group_options(optimizer: torch.optim.Optimizer) -> Options:
    """The numbers, and tuples of numbers, of each parameter group, as plain values."""
    return [
        {name: _plain(value) for name, value in group.items() if _is_numeric(value)}
        for group in optimizer.param_groups
    ]


def check_learning_rates(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError for an optimizer that has no learning rate to take a share of."""
    for group in optimizer.param_groups:
        if not _is_numeric(group.get("lr")):
            raise ConfigError(
                f"optimizer {type(optimizer).__name__} has no learning rate 'lr' in its parameter "
                "groups, of which a late gradient could be given its share; use another optimizer "
                "or staleness_bound=0"
            )


def _is_numeric(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    if isinstance(value, tuple | list):
        return bool(value) and all(isinstance(item, int | float) for item in value)
    return isinstance(value, int | float)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple | list) else value
