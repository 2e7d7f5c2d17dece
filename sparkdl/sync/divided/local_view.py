"""The part of a divided module that lies on a rank, as a module of plain tensors.

Optimizers and strategies work on it as they do on any replica. Its parameters share their memory
with those of the module, and have the same names and the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sparkdl.sync.divided.dividing import is_divided, local


def local_view(module: nn.Module) -> nn.Module:
    """A module of the same names that computes nothing, with the same buffers."""
    seen: dict[int, nn.Module] = {}
    parameters: dict[int, nn.Parameter] = {}

    def view_of(part: nn.Module) -> nn.Module:
        if id(part) in seen:
            return seen[id(part)]
        seen[id(part)] = view = nn.Module()
        for name, parameter in part._parameters.items():
            own = parameter
            if parameter is not None and is_divided(parameter):
                made = nn.Parameter(local(parameter), requires_grad=parameter.requires_grad)
                own = parameters.setdefault(id(parameter), made)
            view.register_parameter(name, own)
        for name, buffer in part._buffers.items():
            is_kept = name not in part._non_persistent_buffers_set
            view.register_buffer(name, buffer, persistent=is_kept)
        for name, child in part.named_children():
            view.add_module(name, view_of(child))
        return view

    return view_of(module)


class LocalGradients:
    """Lets the gradients of divided parameters come to those of their view."""

    def __init__(
        self, module: nn.Module, view: nn.Module, used_elsewhere: set[int] | None = None
    ) -> None:
        """Pair the parameters of ``module`` with those of its ``view``.

        ``used_elsewhere`` is `Exchanges.used`; None: autograd itself sees which are used.
        """
        pairs = zip(module.parameters(), view.parameters(), strict=True)
        self._pairs = [
            (cast(DTensor, parameter), own)
            for parameter, own in pairs
            if is_divided(parameter) and parameter.requires_grad
        ]
        self._wrapped: dict[int, tuple[torch.Tensor, DTensor]] = {}
        self._used: set[int] = set() if used_elsewhere is None else used_elsewhere
        for parameter, _ in self._pairs if used_elsewhere is None else ():
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    def _note(self, parameter: torch.Tensor) -> None:
        self._used.add(id(parameter))

    def attach(self) -> None:
        """Have the next backward passes add to the view's gradients, in their memory."""
        self._used.clear()
        for parameter, own in self._pairs:
            if own.grad is None:
                parameter.grad = None
                continue
            known = self._wrapped.get(id(own))
            if known is None or known[0] is not own.grad:
                wrapped = DTensor.from_local(
                    own.grad,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
                known = self._wrapped[id(own)] = own.grad, wrapped
            parameter.grad = known[1]

    def marks(self) -> list[bool]:
        """For each pair whether a backward pass of this rank has used it since `attach`."""
        return [id(parameter) in self._used for parameter, _ in self._pairs]

    def collect(self, marks: Iterable[bool]) -> list[nn.Parameter]:
        """Give the view what has come elsewhere; the backward passes of the step are over.

        Args:
            marks: for each pair whether any of the ranks that share it has used it.

        Returns:
            Those of the view that were used. The others have no gradient, as in a plain loop,
            unless it lies in the view's memory: other replicas may have used them.
        """
        used = []
        for (parameter, own), is_used in zip(self._pairs, marks, strict=True):
            if is_used:
                used.append(own)
            grad = parameter.grad
            known = self._wrapped.get(id(own))
            if grad is None or (known is not None and grad is known[1]):
                continue
            assert isinstance(grad, DTensor)
            if grad.placements != parameter.placements:
                grad = grad.redistribute(placements=parameter.placements)
            if own.grad is not None:
                own.grad.copy_(grad.to_local())
            elif is_used:
                own.grad = grad.to_local()
        return used

    def release(self) -> None:
        """Let go of all gradients."""
        for parameter, own in self._pairs:
            parameter.grad = own.grad = None
        self._wrapped.clear()
