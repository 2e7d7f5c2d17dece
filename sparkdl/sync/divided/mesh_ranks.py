"""The ranks of a mesh by its axes: whom a rank sums with, and torch's view of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import count

import torch
from torch.distributed.device_mesh import DeviceMesh

from sparkdl.comm.communicator import Communicator, LocalCommunicator, ProcessGroupCommunicator
from sparkdl.mesh import Mesh, MeshPlace

_NUMBERS = count()
"""Numbers of the meshes that this process has made."""


@dataclass(frozen=True, kw_only=True)
class MeshRanks:
    """One rank's neighbours along each axis."""

    mesh: Mesh
    replicas: Communicator
    """Ranks that have the same part of the model."""
    shards: Communicator
    """Ranks among which the state of a replica is divided, besides ``tensors``."""
    tensors: Communicator
    """Ranks that compute the same layers on the same rows."""
    stages: Communicator
    """Ranks that compute the stages of the same rows, in the order of the stages."""
    readers: Communicator
    """One of each that train on different rows: ``replicas`` times ``shards``."""
    shard_mesh: DeviceMesh | None
    """Torch's view of ``shards``; None: it is this rank alone."""
    tensor_mesh: DeviceMesh | None
    """That of ``tensors``, likewise."""

    @property
    def gathers(self) -> bool:
        """True if forward passes wait for those of other ranks."""
        return self.mesh.num_shards > 1

    @property
    def together(self) -> range:
        """The ranks of ``readers`` that train the same replica as this rank."""
        first = self.readers.rank - self.shards.rank
        return range(first, first + self.shards.world_size)

    @classmethod
    def of(cls, mesh: Mesh, comm: Communicator, device: torch.device) -> MeshRanks:
        """Arrange the ranks of a gang. Collective."""
        assert comm.world_size == mesh.size, (comm.world_size, mesh)
        where = [mesh.coordinates(rank) for rank in range(mesh.size)]

        def alike(key: Callable[[MeshPlace], Hashable]) -> Communicator:
            """The ranks of which ``key`` gives the same."""
            groups: dict[Hashable, list[int]] = {}
            for rank, place in enumerate(where):
                groups.setdefault(key(place), []).append(rank)
            if len(groups) == len(where):
                return LocalCommunicator()
            return comm if len(groups) == 1 else comm.split(list(groups.values()))

        shards = alike(lambda place: (place.replica, place.stage, place.tensor))
        tensors = alike(lambda place: (place.replica, place.stage, place.shard))
        own = where[comm.rank][:2]
        together = [rank for rank in range(mesh.size) if where[rank][:2] == own]
        # Torch caches what it finds of a mesh, and takes one of equal names and ranks for the same,
        # also that of an earlier fit of this process, whose groups are gone.
        number = next(_NUMBERS)
        axes = [
            (f"{name}-{number}", neighbours.group)
            for name, neighbours in (("shard", shards), ("tensor", tensors))
            if isinstance(neighbours, ProcessGroupCommunicator)
        ]
        meshes: dict[str, DeviceMesh] = {}
        if axes:
            both = DeviceMesh.from_group(
                [group for _, group in axes],
                device.type,
                mesh=torch.tensor(together).view(
                    [size for size in (mesh.num_shards, mesh.tensor) if size > 1]
                ),
                mesh_dim_names=tuple(name for name, _ in axes),
            )
            meshes = {name.partition("-")[0]: both[name] for name, _ in axes}
        return cls(
            mesh=mesh,
            replicas=alike(lambda place: place[1:]),
            shards=shards,
            tensors=tensors,
            stages=alike(lambda place: (place.replica, place.shard, place.tensor)),
            readers=alike(lambda place: (place.stage, place.tensor)),
            shard_mesh=meshes.get("shard"),
            tensor_mesh=meshes.get("tensor"),
        )
