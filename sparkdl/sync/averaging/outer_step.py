"""The step that follows averaging: what becomes of the replicas' mean at the end of a round.

An outer rule is the same in a gang and in rounds, where the driver applies it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from sparkdl.errors import ConfigError, unknown
from sparkdl.storage.stateful import Stateful
from sparkdl.sync.own_attributes import check_fused

NEEDS_ANOTHER_LOOP = {"LBFGS"}
"""Optimizers of torch that call the loss several times a step."""
_SPARSE_ONLY = {"SparseAdam"}
TORCH_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type)
    and issubclass(value, torch.optim.Optimizer)
    and value is not torch.optim.Optimizer
    and name not in NEEDS_ANOTHER_LOOP | _SPARSE_ONLY
}
"""Lower-case name -> class, of those that work step by step on dense gradients."""


class OuterRule(Stateful, ABC):
    """A rule at work; all ranks call it with equal values, so that their states stay equal."""

    @abstractmethod
    def step(
        self, anchor: Sequence[torch.Tensor], mean: Sequence[torch.Tensor], learning_rate: float
    ) -> None:
        """Overwrite ``mean`` with the parameters that begin the next round.

        ``anchor`` are the trained parameters when the round began, which are left as they are,
        ``mean`` is the mean of the replicas' at its end, and ``learning_rate`` that of their
        optimizers then.
        """


class MomentumRule(OuterRule):
    """A rule that remembers one tensor per parameter, of which a part ``momentum`` goes on."""

    saved_as: ClassVar[str]
    """The tensors' name in the state."""

    def __init__(self, momentum: float, learning_rate: float) -> None:
        self._momentum = momentum
        self._learning_rate = learning_rate
        self._moments: list[torch.Tensor] = []

    def moments(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what is remembered of each parameter, on its device; zeros at first."""
        saved = self._moments or [torch.zeros_like(parameter) for parameter in parameters]
        self._moments = [one.to(p) for one, p in zip(saved, parameters, strict=True)]
        return self._moments

    def state_dict(self) -> dict[str, Any]:
        return {self.saved_as: self._moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._moments = list(state[self.saved_as])


class OuterOptimizer(OuterRule):
    """An optimizer of torch, stepped once a round with ``anchor - mean`` as the gradient.

    Its ``name`` is that of a class of ``torch.optim`` that works step by step, in any case.
    ConfigError if there is no such optimizer, or it refuses the options.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        if name.lower() not in TORCH_OPTIMIZERS:
            raise unknown("outer_optimizer", name, TORCH_OPTIMIZERS)
        self._kind: Any = TORCH_OPTIMIZERS[name.lower()]
        self._options = dict(options)
        self._optimizer: torch.optim.Optimizer | None = None
        self._weights: list[torch.Tensor] = []
        self._loaded: dict[str, Any] | None = None
        self._make([torch.zeros(1, 1)])  # to know that the options fit

    def step(
        self, anchor: Sequence[torch.Tensor], mean: Sequence[torch.Tensor], learning_rate: float
    ) -> None:
        if self._optimizer is None:
            self._weights = [torch.empty_like(begin) for begin in anchor]
            self._optimizer = self._make(self._weights)
            if self._loaded is not None:
                self._optimizer.load_state_dict(self._loaded)
                check_fused(self._optimizer)
        for weight, begin, end in zip(self._weights, anchor, mean, strict=True):
            weight.data = end.detach()  # stepped in place
            weight.grad = begin - end.detach()
            weight.data.copy_(begin)
        self._optimizer.step()
        for weight in self._weights:
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        if self._optimizer is None:  # no round has ended since the restart
            return {"optimizer": self._loaded}
        return {"optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state["optimizer"]
        if self._optimizer is not None and self._loaded is not None:
            self._optimizer.load_state_dict(self._loaded)
            check_fused(self._optimizer)

    def _make(self, weights: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        try:
            made: torch.optim.Optimizer = self._kind(list(weights), **self._options)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"outer optimizer {self._kind.__name__} refused {self._options}: {error}"
            ) from error
        return made
