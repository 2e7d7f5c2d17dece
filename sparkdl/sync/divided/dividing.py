"""Divides a module in place among the ranks of a mesh, by torch's own means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from sparkdl.storage.checkpoint_format import encode
from sparkdl.storage.tensor_tree import Snapshot, pack
from sparkdl.sync.divided.layout import cut_parameters, divided_layers
from sparkdl.sync.divided.mesh_ranks import MeshRanks
from sparkdl.sync.regions import Region

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def divide(
    module: nn.Module, ranks: MeshRanks, compute_dtype: torch.dtype | None = None
) -> dict[str, Region]:
    """Divide the parameters of ``module`` in place. Collective; all ranks have equal weights.

    Args:
        module: on the device where it computes.
        ranks: the mesh.
        compute_dtype: of gathered parameters; None: that which they have. Gradients are summed in
            that of the parameters.

    Returns:
        Which part of each parameter is here, by its name.

    Raises:
        ConfigError: the layout does not fit the module.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    layers = divided_layers(ranks.mesh, module)
    cuts = cut_parameters(layers, module)
    if layers:
        assert ranks.tensor_mesh is not None
        styles = {"columns": ColwiseParallel, "rows": RowwiseParallel}
        plan = {name: styles[cut]() for name, cut in layers.items()}
        parallelize_module(module, ranks.tensor_mesh, plan)
    if ranks.mesh.activation_checkpointing:
        for layer in recomputed(module):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if ranks.mesh.num_shards > 1:
        _shard(module, ranks, compute_dtype)
    regions: dict[str, Region] = {}
    for name, parameter in module.named_parameters():
        region = Region.whole(shapes[name])
        if name in cuts:
            region = region.cut(cuts[name], ranks.tensors.world_size, ranks.tensors.rank)
        if ranks.mesh.num_shards > 1:
            region = region.cut(0, ranks.shards.world_size, ranks.shards.rank)
        assert tuple(local(parameter).shape) == region.size, (name, region)
        regions[name] = region
    return regions


def is_divided(parameter: torch.Tensor) -> bool:
    """True of a parameter whose layer is divided, though this part of it may be the whole."""
    return isinstance(parameter, DTensor)


def local(parameter: torch.Tensor) -> torch.Tensor:
    """What of a parameter, or of its gradient, lies on this rank."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def whole_weights(module: nn.Module) -> Iterator[bytes | memoryview]:
    """The state dict of a divided module as the pieces of a file, see `encode`.

    Collective: all ranks take all pieces, and have one parameter at a time.
    """
    state = module.state_dict()
    divided = {name: value for name, value in state.items() if isinstance(value, DTensor)}
    value, tensors = pack(state | {name: torch.empty(0) for name in divided})
    yield from encode(Snapshot(value, tensors | divided), _whole)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().cpu()


def _shard(module: nn.Module, ranks: MeshRanks, compute_dtype: torch.dtype | None) -> None:
    mesh = ranks.shard_mesh
    assert mesh is not None
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    frees = not ranks.mesh.shard_optimizer
    if frees:
        for unit in units(module, ranks.mesh.smallest_unit):
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=frees)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)  # losses are divided by the rows of all ranks
            part.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def units(module: nn.Module, smallest: int) -> list[nn.Module]:
    """Layers of ``module`` that are gathered one by one, in the order of registration.

    These are the members of its lists and sequences, and its own layers, from ``smallest`` numbers
    in their parameters on. What shares parameters with other layers is none.
    """
    names = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    shared = {number for number, count in names.items() if count > 1}

    def within(parent: nn.Module) -> Iterator[nn.Module]:
        for child in parent.children():
            parameters = list(child.parameters())
            if isinstance(child, _CONTAINERS):
                yield from within(child)
            elif sum(p.numel() for p in parameters) >= smallest and not any(
                id(p) in shared for p in parameters
            ):
                yield child

    return list(within(module))


def recomputed(module: nn.Module) -> list[nn.Module]:
    """Layers whose forward can be computed again in the backward pass, and is worth it.

    These are the `units` that are made of layers. One with a BatchNorm is none, because that would
    count its batch twice.
    """
    return [
        unit
        for unit in units(module, 0)
        if any(unit.children()) and not any(isinstance(part, _NormBase) for part in unit.modules())
    ]
