"""How does a module travel from the driver to the workers?

Its structure goes with cloudpickle, so that classes defined in a notebook work; its weights go
apart, as plain tensors, so that they can be stored, broadcast and sent in chunks. This is for
transport between the processes of one run only; nothing pickled is ever written for later.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import cloudpickle
import torch
from torch import nn

from sparkdl.errors import ConfigError


def split(module: nn.Module) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Part a module into its structure, pickled without weights, and its weights.

    Returns:
        The structure for `join`, and name -> tensor of parameters and persistent buffers, as in
        ``state_dict()``; tied tensors appear once.

    Raises:
        ConfigError: the structure cannot be pickled.
    """
    weights: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in names:
            names[id(tensor)] = name
            weights[name] = tensor.detach().cpu().contiguous()
    buffer = io.BytesIO()
    try:
        _Splitter(buffer, names).dump(module)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the module ({type(module).__name__}) cannot be sent to the workers: {error}; pass a "
            "function that makes it instead of the module itself"
        ) from error
    return buffer.getvalue(), weights


def join(structure: bytes, weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """Inverse of `split`; the module owns copies of the weights."""
    module = _Joiner(io.BytesIO(structure), weights).load()
    assert isinstance(module, nn.Module)
    return module


class _Splitter(cloudpickle.CloudPickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, names: Mapping[int, str]) -> None:
        super().__init__(file)
        self._names = names

    def persistent_id(self, value: Any) -> tuple[str, bool, bool] | None:
        if isinstance(value, torch.Tensor) and id(value) in self._names:
            return self._names[id(value)], isinstance(value, nn.Parameter), value.requires_grad
        return None


class _Joiner(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__(file)
        self._weights = weights
        self._made: dict[str, torch.Tensor] = {}

    def persistent_load(self, key: Any) -> torch.Tensor:
        name, is_parameter, requires_grad = key
        if name not in self._made:
            tensor = self._weights[name].clone()
            self._made[name] = nn.Parameter(tensor, requires_grad) if is_parameter else tensor
        return self._made[name]
