"""A module computes with weights that are made only while an operation needs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from sparkdl.serialization.recorded.recipe import AS_ON_CPU, RecordedWeights, tensors_in


@contextlib.contextmanager
def lent(weights: RecordedWeights) -> Iterator[None]:
    """Let the module of these weights compute: each operation has those that it needs, no other."""
    with _Lender(weights), _LenderToPython(weights):
        yield


class _LenderToPython(TorchFunctionMode):
    """Gives each function of torch's the values of the parameters that it needs.

    Some compare the devices of their arguments before they become operations.
    """

    def __init__(self, weights: RecordedWeights) -> None:
        super().__init__()
        self._weights = weights

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            known = {
                id(tensor)
                for tensor in tensors_in((args, kwargs))
                if self._weights.place(tensor) is not None
            }
            name = getattr(func, "__name__", "")
            if known and name == "__get__" and func in AS_ON_CPU:
                return AS_ON_CPU[func]
            if known and name not in ("__get__", "__set__", "__delete__"):
                args, kwargs = tree_map(
                    lambda value: self._weights.of(value) if id(value) in known else value,
                    (args, kwargs),
                )
        return func(*args, **kwargs)


class _Lender(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives each operation the values of the parameters that it needs."""

    def __init__(self, weights: RecordedWeights) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = weights

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = tensors_in((args, kwargs))
        if kwargs.get("device") == torch.device("meta"):  # that of a parameter
            kwargs["device"] = torch.device("cpu")
        known = [tensor for tensor in tensors if self._weights.place(tensor) is not None]
        if not known or (func.is_view and len(known) == len(tensors)):
            return func(*args, **kwargs)

        def real(value: Any) -> Any:
            found = self._weights.of(value) if isinstance(value, torch.Tensor) else None
            return value if found is None else found

        args, kwargs = tree_map(real, (args, kwargs))
        return func(*args, **kwargs)
