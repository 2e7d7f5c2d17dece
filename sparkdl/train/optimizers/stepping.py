"""The steps of optimizers that want more than a call of ``step()``.

Some have a ``train()`` and an ``eval()``, between which the weights differ (schedule-free ones);
some want a closure, which computes loss and gradients anew (L-BFGS, SAM); some have a
``zero_grad()`` of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.sync.module_tensors import fingerprint
from sparkdl.train.optimizers.nested_states import (
    copied,
    give_state,
    is_known,
    plain_state,
)


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """True if weights are others for training than for evaluation."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def set_mode(optimizer: torch.optim.Optimizer, *, trains: bool) -> None:
    """Have the weights for training, or those that are measured and kept."""
    if has_modes(optimizer):
        (optimizer.train if trains else optimizer.eval)()  # type: ignore[attr-defined]


def takes_closure(optimizer: torch.optim.Optimizer) -> bool | None:
    """Return True if ``step`` must have a closure; None: it may."""
    try:
        found = list(inspect.signature(optimizer.step).parameters.values())
    except (TypeError, ValueError):
        return False
    own = next(
        (one for one in found if one.name == "closure" or one.kind is one.VAR_POSITIONAL), None
    )
    if own is None:
        return False
    return True if own.default is own.empty and own.kind is not own.VAR_POSITIONAL else None


def zeroes_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer's ``zero_grad`` is not torch's."""
    own = getattr(optimizer, "zero_grad", None)
    return own is not None and getattr(own, "__func__", own) is not torch.optim.Optimizer.zero_grad


class Stepper:
    """Steps an optimizer, with a closure if it does not do without.

    The gradients of the step are there already. So the first call of the closure computes nothing,
    unless the optimizer has changed the weights before, as SAM does.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.with_closure = takes_closure(optimizer) is True
        self.is_own = not is_known(optimizer)
        """True if it is the user's own, or calls one that is."""
        self._may_need_one = self.is_own and takes_closure(optimizer) is None
        self._zeroes_itself = zeroes_itself(optimizer)
        self._left_zero: list[nn.Parameter] = []
        """Those whose gradients the optimizer has set to zero, where torch drops them."""
        checks: Any = torch.sparse.check_sparse_tensor_invariants
        if not checks.is_enabled():
            checks.disable()  # else Adagrad's first sparse gradient warns that nobody has said so

    def zero(self) -> None:
        """Call a ``zero_grad()`` of the optimizer's own, as a plain loop does before each step.

        Raises:
            ConfigError: it leaves gradients, to which workers would add theirs.
        """
        if not self._zeroes_itself:
            return
        self._optimizer.zero_grad()
        self._left_zero = [p for p in owned(self._optimizer) if p.grad is not None]
        if any(_has_values(p.grad) for p in self._left_zero if p.grad is not None):
            kind = type(self._optimizer).__name__
            raise ConfigError(
                f"zero_grad() of the optimizer {kind} leaves gradients, and workers sum up those "
                "of one step only; keep what shall last over steps in the optimizer's state, and "
                "add it in step()"
            )

    def __call__(self, loss: Callable[[], Any], again: Callable[[], Any]) -> None:
        """Step; ``loss`` gives that of this moment, ``again`` gradients and loss of another."""
        self._part_gradients()
        if not self.with_closure:
            kept = self._kept() if self._may_need_one else ([], None)
            try:
                self._optimizer.step()
                self._may_need_one = False
                return
            except Exception:
                if not self._may_need_one:
                    raise
                self.with_closure = True  # if it was not that, it fails once more
            self._give(*kept)  # it may have moved weights, or counted, before it failed
        before: list[int] | None = self._weights()

        def closure() -> Any:
            nonlocal before
            is_first, before = before is not None and before == self._weights(), None
            if is_first:
                return loss()
            value = again()
            self._part_gradients()
            return value

        self._optimizer.step(closure)

    def _part_gradients(self) -> None:
        """Let an optimizer of the user's own keep gradients, whose memory the next step uses."""
        for parameter in self._left_zero:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for parameter in owned(self._optimizer) if self.is_own else ():
            if parameter.grad is not None and parameter.grad._is_view():
                parameter.grad = parameter.grad.clone()

    def _kept(self) -> tuple[list[tuple[Any, Any]], Any]:
        """Weights with their gradients, and the optimizer's state, if anybody can hold it."""
        tensors = [
            (p.detach().clone(), None if p.grad is None else p.grad.clone())
            for p in owned(self._optimizer)
        ]
        try:
            return tensors, copied(plain_state(self._optimizer))
        except CheckpointError:
            return tensors, None

    def _give(self, tensors: list[tuple[Any, Any]], state: Any) -> None:
        parameters = owned(self._optimizer)
        with torch.no_grad():
            for parameter, (value, gradient) in zip(parameters, tensors, strict=True):
                parameter.copy_(value)
                parameter.grad = gradient
        if state is not None:
            give_state(self._optimizer, state)

    def _weights(self) -> list[int]:
        parameters = owned(self._optimizer)
        gradients = [fingerprint(p.grad) for p in parameters]
        return [*map(fingerprint, parameters), *gradients]


def _has_values(gradient: torch.Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.any())


def owned(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
