"""The mesh of a training function: its axes, which ranks read the same rows, and torch's view.

The function divides the model itself, by torch's calls. So of a `Mesh` only the axes count.
"""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ConfigError
from sparkdl.mesh import Mesh

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


def axes(mesh: Mesh) -> dict[str, int]:
    """Sizes by name, from that in which ranks far from each other differ to the last."""
    names = ("data", "pipeline", "shard", "tensor")
    return {name: getattr(mesh, name) for name in names}


def check_axes(mesh: Any) -> Mesh:
    """Return what is a mesh of axes only; ConfigError if it is not."""
    if not isinstance(mesh, Mesh):
        raise ConfigError(f"parallelism must be a sparkdl.Mesh or None; received {mesh!r}")
    names = axes(mesh)
    for field in fields(mesh):
        value = getattr(mesh, field.name)
        if field.name not in names and value != field.default:
            raise ConfigError(
                f"parallelism=Mesh({field.name}={value!r}) has no effect on a function, which "
                "divides its model itself, by fully_shard, parallelize_module and the like; leave "
                f"it out, and give axes only: {', '.join(names)}"
            )
    return mesh


def device_mesh(mesh: Mesh, device: torch.device, timeout_seconds: float) -> DeviceMesh:
    """Torch's mesh of all ranks, with all axes, also those of size 1. Collective.

    So a function that names an axis runs along any mesh. Names are plain, as a worker's process
    ends with the function.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    sizes = axes(mesh)
    ranks = torch.arange(mesh.size).view(*sizes.values())
    own = dist.get_rank()
    groups = []
    for dimension, size in enumerate(sizes.values()):
        lines = ranks.movedim(dimension, -1).reshape(-1, size).tolist()
        groups.append(
            dist.new_group(
                next(line for line in lines if own in line),
                timeout=timedelta(seconds=timeout_seconds),
                use_local_synchronization=True,
            )
        )
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=tuple(sizes))
