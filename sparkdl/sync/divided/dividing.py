"""Divides a module in place among the ranks of a mesh, by torch's own means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from sparkdl.mesh import Mesh
from sparkdl.storage.checkpoint_format import encode
from sparkdl.storage.tensor_tree import Snapshot, pack
from sparkdl.sync.divided.channels import ConvolutionByColumns, ConvolutionByRows, NormByChannels
from sparkdl.sync.divided.layout import cut_parameters, divided_layers
from sparkdl.sync.divided.mesh_ranks import MeshRanks
from sparkdl.sync.divided.pipeline import Pipeline
from sparkdl.sync.divided.sequence import SEQUENCE, divide_sequence, stacks
from sparkdl.sync.divided.stages import stages_by_order
from sparkdl.sync.module_tensors import tensors_of
from sparkdl.sync.regions import Region
from sparkdl.sync.strategy import Pipelined


def divide(
    module: nn.Module,
    ranks: MeshRanks,
    compute_dtype: torch.dtype | None = None,
    pipeline: Pipeline | None = None,
) -> dict[str, Region]:
    """Divide the parameters of ``module`` in place. Collective; all ranks have equal weights.

    Args:
        module: on the device where it computes.
        ranks: the mesh.
        compute_dtype: of gathered parameters; None: that which they have. Gradients are summed in
            that of the parameters.
        pipeline: whose stages this rank has, where there is one.

    Returns:
        Which part of each parameter is here, by the names of those of which there is one.

    Raises:
        ConfigError: the layout does not fit the module.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    attributes = {name: dict(vars(parameter)) for name, parameter in module.named_parameters()}
    layers = divided_layers(ranks.mesh, module)
    cuts = cut_parameters(layers, module)
    if layers:
        assert ranks.tensor_mesh is not None
        within = stacks(ranks.mesh, module, layers)
        plan = {
            name: _style(module.get_submodule(name), cut, any(s.has(name) for s in within))
            for name, cut in layers.items()
            if pipeline is None or pipeline.has(f"{name}.weight")
        }
        for stack in within:
            divide_sequence(stack, module, ranks.tensor_mesh)
        parallelize_module(module, ranks.tensor_mesh, plan)
    cut = () if pipeline is None else pipeline.stages.cuts
    if ranks.mesh.activation_checkpointing:
        for layer in recomputed(module, cut):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if pipeline is not None:
        pipeline.take()
    if ranks.mesh.num_shards > 1:
        root = module if pipeline is None else pipeline.roots[0]
        _shard(root, units(module, ranks.mesh.smallest_unit, cut), ranks, compute_dtype)
    regions: dict[str, Region] = {}
    for name, parameter in module.named_parameters():
        region = Region.whole(shapes[name])
        if name in cuts:
            region = region.cut(cuts[name], ranks.tensors.world_size, ranks.tensors.rank)
        if ranks.mesh.num_shards > 1:
            region = region.cut(0, ranks.shards.world_size, ranks.shards.rank)
        assert tuple(local(parameter).shape) == region.size, (name, region)
        regions[name] = region
    _keep_attributes(module, attributes)
    return regions


def _keep_attributes(module: nn.Module, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Give parameters what the user has set on those whose place they take.

    Gathered ones are made when a layer is computed for the first time, and are kept.
    """

    def give(owners: Sequence[tuple[nn.Module, str, Mapping[str, Any]]], *_: Any) -> None:
        for owner, name, own in owners:
            found = vars(owner._parameters[name])
            found.update({key: value for key, value in own.items() if key not in found})

    owners: list[tuple[nn.Module, str, Mapping[str, Any]]] = []
    for path, _ in module.named_parameters():
        if attributes[path]:
            owner, _, name = path.rpartition(".")
            owners.append((module.get_submodule(owner), name, attributes[path]))
    give(owners)
    for unit in module.modules():
        if owners and isinstance(unit, FSDPModule):
            within = set(unit.modules())
            unit.register_forward_pre_hook(
                partial(give, [one for one in owners if one[0] in within])
            )


def _style(layer: nn.Module, cut: str, is_in_stack: bool) -> ParallelStyle:
    """Return the style to divide a layer; in a `Stack` one by rows gives a part of the sequence."""
    if cut == "sequence":
        return SequenceParallel(sequence_dim=SEQUENCE, use_local_output=True)
    if is_in_stack and cut == "rows":
        return RowwiseParallel(output_layouts=Shard(SEQUENCE))
    if cut == "channels":
        return NormByChannels()
    if not isinstance(layer, nn.Linear | nn.Embedding):
        return ConvolutionByRows() if cut == "rows" else ConvolutionByColumns()
    if cut == "rows":
        # ids are whole on each rank, and inputs of a Linear layer are divided
        is_embedding = isinstance(layer, nn.Embedding)
        return RowwiseParallel(input_layouts=Replicate() if is_embedding else Shard(-1))
    return ColwiseParallel(output_layouts=Replicate() if cut == "gathered" else Shard(-1))


def trained_bytes(mesh: Mesh | None, module: nn.Module) -> int:
    """Bytes of what trains of ``module`` on the fullest rank of ``mesh``; None: each has all."""
    mesh = mesh or Mesh()
    cuts = cut_parameters(divided_layers(mesh, module), module)
    stages = stages_by_order(mesh, module)
    totals = [0] * mesh.pipeline
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parts = mesh.num_shards * (mesh.tensor if name in cuts else 1)
            totals[stages[name] % mesh.pipeline] += -(-parameter.nbytes // parts)
    return max(totals)


def is_divided(parameter: torch.Tensor) -> bool:
    """True of a parameter whose layer is divided, though this part of it may be the whole."""
    return isinstance(parameter, DTensor)


def local(parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter, or of its gradient, that lies on this rank."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def reshard(module: nn.Module) -> None:
    """Let each layer have its part alone again, which a forward pass may have left gathered."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def whole_weights(
    module: nn.Module, pipeline: Pipelined | None = None
) -> Iterator[bytes | memoryview]:
    """The state dict of a divided module as the pieces of a file, see `encode`.

    Collective: all ranks take all pieces, and have one parameter at a time.
    """
    state = tensors_of(module)
    gather: Callable[[torch.Tensor], torch.Tensor]
    apart: dict[str, torch.Tensor]
    if pipeline is None:
        apart = {name: value for name, value in state.items() if isinstance(value, DTensor)}
        gather = whole
    else:
        state = pipeline.of_all_ranks(state)
        apart = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        gather = pipeline.broadcast_by(apart)
    value, tensors = pack(state | {name: torch.empty(0) for name in apart})
    yield from encode(Snapshot(value, tensors | apart), gather)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that may be divided, on the CPU. Collective: all ranks of the replica call it."""
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().cpu()


def _shard(
    module: nn.Module,
    layers: Sequence[nn.Module],
    ranks: MeshRanks,
    compute_dtype: torch.dtype | None,
) -> None:
    mesh = ranks.shard_mesh
    assert mesh is not None
    for parameter in module.parameters():
        if not is_divided(parameter):  # torch cuts none that is seen as a transposed one
            parameter.data = parameter.data.contiguous()
    policy = MixedPrecisionPolicy()
    frees = not ranks.mesh.shard_optimizer
    if compute_dtype is not None:
        for part in module.modules():
            # torch's autocast leaves them as they are, and their statistics are not gathered
            if isinstance(part, _NormBase) and any(True for _ in part.parameters()):
                fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=frees)
        # inputs stay as they are: ids are exact, and autocast knows what may be rounded
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    for unit in (*layers, module) if frees else (module,):
        unit.register_forward_hook(_out_of_views)
    if frees:
        for unit in layers:
            if not isinstance(unit, FSDPModule):
                fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=frees)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)  # losses are divided by the rows of all ranks
            part.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def _out_of_views(_: nn.Module, __: Any, output: Any) -> Any:
    """Copy what a layer returns if it is a view, such as of a transposition.

    FSDP2 watches the tensors that a layer returns, to gather it for the backward pass. A loss that
    changes a view in place would take it from its sight, and gradients would be wrong.
    """

    def own(value: torch.Tensor) -> torch.Tensor:
        return value.clone() if value.requires_grad and value._is_view() else value

    return pytree.tree_map_only(torch.Tensor, own, output)


def units(module: nn.Module, smallest: int, cuts: Sequence[str] = ()) -> list[nn.Module]:
    """Layers of ``module`` that are gathered one by one, in the order of registration.

    These are the members of its lists and of what cannot be called, and its own layers, from
    ``smallest`` numbers in their parameters on. What shares parameters with other layers is none,
    nor what has one of the layers ``cuts``, with which a stage begins, within it.
    """
    names = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    shared = {number for number, count in names.items() if count > 1}

    def within(parent: nn.Module, prefix: str) -> Iterator[nn.Module]:
        for name, child in parent.named_children():
            parameters, path = list(child.parameters()), f"{prefix}{name}."
            is_list = isinstance(child, nn.Sequential) or not _can_be_called(child)
            if is_list or any(cut.startswith(path) for cut in cuts):
                yield from within(child, path)
            elif sum(p.numel() for p in parameters) >= smallest and not any(
                id(p) in shared for p in parameters
            ):
                yield child

    return list(within(module, ""))


def _can_be_called(part: nn.Module) -> bool:
    """False of those that only hold layers or parameters, as an `nn.ModuleList` does."""
    return "forward" in vars(part) or type(part).forward is not nn.Module.forward


def compiled_layers(module: nn.Module) -> list[nn.Module]:
    """Layers of a divided module that are compiled one by one, between exchanges of weights.

    These are the `units` that are made of layers, such as the blocks of a Transformer. Where there
    are none, it is all units.
    """
    blocks = [unit for unit in units(module, 0) if any(unit.children())]
    return blocks or units(module, 1)


def recomputed(module: nn.Module, cuts: Sequence[str] = ()) -> list[nn.Module]:
    """Layers whose forward can be computed again in the backward pass, and is worth it.

    These are the `units` that are made of layers. One with a BatchNorm is none, because that would
    count its batch twice.
    """
    return [
        unit
        for unit in units(module, 0, cuts)
        if any(unit.children()) and not any(isinstance(part, _NormBase) for part in unit.modules())
    ]
