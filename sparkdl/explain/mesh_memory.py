"""Sizes, without times, of what a worker of a mesh holds of a model and sends per step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from sparkdl.mesh import Mesh

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class MeshMemory:
    """Bytes on the fullest worker of a mesh, and those that it sends per step by rings."""

    mesh: str
    """``none`` if each worker has the whole model."""
    workers: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    """The largest unit gathered whole, and what belongs to no unit; without activations."""
    data_bytes: float
    shard_bytes: float
    """At most: without what torch leaves gathered between the forward and the backward pass."""
    sends_activations: bool
    """True if ``tensor`` or ``pipeline`` send too, as much as the rows of a batch ask for."""
    fits: bool | None = None
    """None: the memory of a worker is not known."""

    @property
    def kept_bytes(self) -> int:
        """Bytes that a worker holds all the time."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        """With the largest gathered unit."""
        return self.kept_bytes + self.gathered_bytes


_HOW_IT_STEPS = ("capturable", "differentiable", "foreach", "fused")
"""Options that change no state's size, some of which need a GPU."""


class StateSize(NamedTuple):
    """The size of what an optimizer keeps of a parameter."""

    per_number: int
    """Bytes for each number of it."""
    constant: int
    """Bytes whatever its shape is, such as a count of steps."""


def state_sizes(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, StateSize]:
    """Return the size of what ``optimizer`` keeps of each trained parameter of ``module``, by name.

    Found by a step of an optimizer of this kind, with the same groups, of parameters of one number
    each. Only for those that treat each number by itself, see `check_mesh_optimizer`.
    """
    import torch
    from torch import nn

    names = {id(parameter): name for name, parameter in module.named_parameters()}
    tiny: dict[int, nn.Parameter] = {}
    groups = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            one = torch.zeros((1,) * max(1, parameter.dim()), dtype=parameter.dtype)
            tiny[id(parameter)] = nn.Parameter(one)
            tiny[id(parameter)].grad = torch.zeros_like(one)
        options = {name: value for name, value in group.items() if name not in _HOW_IT_STEPS}
        groups.append({**options, "params": [tiny[id(p)] for p in group["params"]]})
    kind: Callable[..., torch.optim.Optimizer] = type(optimizer)
    stepped = kind(groups)
    stepped.step()
    found = {}
    for number, parameter in tiny.items():
        kept = [v for v in stepped.state[parameter].values() if isinstance(v, torch.Tensor)]
        found[names[number]] = StateSize(
            sum(v.nbytes for v in kept if v.dim()), sum(v.nbytes for v in kept if not v.dim())
        )
    return found


def mesh_memory(
    module: nn.Module,
    sizes: Mapping[str, StateSize],
    mesh: Mesh | None,
    *,
    workers: int = 1,
    compute_bytes: int | None = None,
    limit: int | None = None,
) -> MeshMemory:
    """Return what the fullest worker holds and sends.

    Args:
        module: on any device, ``meta`` too.
        sizes: see `state_sizes`.
        mesh: None: ``workers`` have the whole model each.
        workers: only without a mesh.
        compute_bytes: of a number of a gathered layer; None: as many as its parameter has.
        limit: of a worker, in bytes; None: it is not known.
    """
    from sparkdl.sync.divided.dividing import units
    from sparkdl.sync.divided.layout import cut_parameters, divided_layers
    from sparkdl.sync.divided.stages import cut_layers, stages_by_order
    from sparkdl.sync.regions import Region

    mesh_text = "none" if mesh is None else str(mesh)
    mesh = mesh or Mesh(data=workers)
    cuts = cut_parameters(divided_layers(mesh, module), module)
    stages = stages_by_order(mesh, module)
    shards, is_stage_1 = mesh.num_shards, mesh.shard_optimizer
    unit_of: dict[int, int] = {}
    if shards > 1 and not is_stage_1:
        begins = () if mesh.pipeline == 1 else cut_layers(mesh, module)
        for number, unit in enumerate(units(module, mesh.smallest_unit, begins), 1):
            unit_of |= {id(parameter): number for parameter in unit.parameters()}

    def held_by(worker: int) -> MeshMemory:
        """Return what a worker along ``pipeline`` holds."""
        parameters = gradients = state = 0
        gathered: dict[int, int] = {0: 0}
        reduced = 0
        for name, parameter in module.named_parameters():
            if stages[name] % mesh.pipeline != worker:
                continue
            region = Region.whole(tuple(parameter.shape))
            if name in cuts:
                region = region.cut(cuts[name], mesh.tensor, 0)
            whole = math.prod(region.size)
            if shards > 1:
                region = region.cut(0, shards, 0)  # the first part is the largest
                place = unit_of.get(id(parameter), 0)
                each = compute_bytes or parameter.element_size()
                gathered[place] = gathered.get(place, 0) + whole * each
            here = math.prod(region.size)
            parameters += here * parameter.element_size()
            if parameter.requires_grad:
                gradients += here * parameter.element_size()
                reduced += whole * parameter.element_size()
                per_number, constant = sizes[name]
                state += here * per_number + constant
        rest = gathered.pop(0)
        passes = 1 if is_stage_1 else 2
        ring, replicas = (shards - 1) / shards, mesh.num_replicas
        return MeshMemory(
            mesh=mesh_text,
            workers=mesh.size,
            parameter_bytes=parameters,
            gradient_bytes=gradients,
            optimizer_bytes=state,
            gathered_bytes=rest + max(gathered.values(), default=0),
            data_bytes=2 * (replicas - 1) / replicas * gradients,
            shard_bytes=ring * (passes * (rest + sum(gathered.values())) + reduced),
            sends_activations=mesh.tensor > 1 or mesh.pipeline > 1,
        )

    found = max(map(held_by, range(mesh.pipeline)), key=lambda one: one.total_bytes)
    return found if limit is None else replace(found, fits=found.total_bytes <= limit)


def memory_table(
    module: nn.Module,
    sizes: Mapping[str, StateSize],
    mesh: Mesh | None,
    *,
    most_workers: int,
    compute_bytes: int | None = None,
    limit: int | None = None,
) -> tuple[MeshMemory, ...]:
    """No mesh, the one that was given, and those with ``shard`` = 2, 4, 8 .. ``most_workers``."""
    is_shardable = all(parameter.dim() for parameter in module.parameters())
    workers = most_workers if mesh is None else mesh.size

    def meshes() -> Iterator[Mesh | None]:
        yield None
        yield mesh
        shard = 2
        while is_shardable and shard <= most_workers:
            smallest = Mesh.smallest_unit if mesh is None else mesh.smallest_unit
            yield Mesh(shard=shard, smallest_unit=smallest)
            shard *= 2

    rows = [
        mesh_memory(module, sizes, one, workers=workers, compute_bytes=compute_bytes, limit=limit)
        for one in meshes()
    ]
    return tuple({row.mesh: row for row in rows}.values())


def smallest_that_fits(rows: Sequence[MeshMemory]) -> MeshMemory | None:
    """The row with the fewest shards that fits; None: none does, or it is not known."""
    fitting = [row for row in rows if row.fits]
    return max(fitting, key=lambda row: row.kept_bytes, default=None)
