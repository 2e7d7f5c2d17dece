"""Convolutions and BatchNorm layers whose channels are divided along ``tensor``.

Torch divides Linear and Embedding layers by itself; these styles do the same for channels, by
DTensors too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from sparkdl.comm.communicator import Communicator

CHANNELS = 1
"""Dimension of what these layers take and give, ``(batch, channels, ...)``."""


class ConvolutionByColumns(ParallelStyle):
    """Each rank computes some of the channels that come out."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _cut(module, ("weight", "bias"), 0, device_mesh)
        module.forward = partial(_columns, module, device_mesh)
        return module


class ConvolutionByRows(ParallelStyle):
    """Each rank takes some of the channels that go in; what comes out is summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _cut(module, ("weight",), 1, device_mesh)
        module.forward = partial(_rows, module, device_mesh)
        return module


class NormByChannels(ParallelStyle):
    """Each rank normalizes some of the channels; see `share_statistics` for the buffers."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _cut(module, ("weight", "bias"), 0, device_mesh)
        module.forward = partial(_normalized, module, device_mesh)
        return module


def _cut(module: nn.Module, names: Iterable[str], dimension: int, mesh: DeviceMesh) -> None:
    for name in names:
        parameter = getattr(module, name)
        if parameter is not None:
            divided = distribute_tensor(parameter, mesh, [Shard(dimension)])
            made = nn.Parameter(divided, requires_grad=parameter.requires_grad)
            module.register_parameter(name, made)


def _here(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _columns(module: Any, mesh: DeviceMesh, maps: torch.Tensor) -> torch.Tensor:
    # each rank has the gradient of its own channels, which are summed
    whole = DTensor.from_local(maps, mesh, [Replicate()], run_check=False)
    own: Any = whole.to_local(grad_placements=[Partial()])
    found: torch.Tensor = module._conv_forward(own, _here(module.weight), _here(module.bias))
    return found


def _rows(module: Any, mesh: DeviceMesh, maps: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = module._conv_forward(maps, _here(module.weight), None)
    summed = DTensor.from_local(found, mesh, [Partial()], run_check=False)
    whole: torch.Tensor = summed.redistribute(placements=[Replicate()]).to_local()
    if module.bias is not None:
        whole = whole + module.bias.view(1, -1, *[1] * (whole.dim() - 2))
    return whole


def _normalized(module: Any, mesh: DeviceMesh, maps: torch.Tensor) -> torch.Tensor:
    size = module.num_features // mesh.size()
    start = mesh.get_local_rank() * size
    own = copy.copy(module)  # whose forward is the class's, with this rank's channels
    own.__dict__.pop("forward")
    own.__dict__["num_features"] = size
    own.__dict__["_parameters"] = {name: _here(p) for name, p in module._parameters.items()}
    own.__dict__["_buffers"] = {
        name: b.narrow(0, start, size) if b is not None and b.dim() else b
        for name, b in module._buffers.items()
    }
    found: torch.Tensor = type(module).forward(own, maps)
    return found


def share_statistics(layers: Iterable[nn.Module], tensors: Communicator) -> None:
    """Give each rank the statistics of the channels of others. Collective.

    ``layers`` are those with `NormByChannels`; their buffers are whole on each rank, which changes
    those of its own channels only.
    """
    for layer in layers:
        for buffer in layer.buffers(recurse=False):
            if buffer.dim():
                size = len(buffer) // tensors.world_size
                own = buffer.narrow(0, tensors.rank * size, size).clone()
                buffer.zero_()
                buffer.narrow(0, tensors.rank * size, size).copy_(own)
                tensors.all_reduce(buffer)
