"""What is told of a worker's memory along a mesh is what its tensors take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparkdl.comm.communicator import Communicator
from sparkdl.explain.mesh_memory import (
    StateSize,
    memory_table,
    mesh_memory,
    smallest_that_fits,
    state_sizes,
)
from sparkdl.mesh import Mesh
from sparkdl.sync.divided.mesh_ranks import MeshRanks
from sparkdl.sync.divided.mesh_synchronizer import MeshSynchronizer
from sparkdl.sync.gradients.allreduce import AllReduce
from tests.gang import Gang


def net() -> nn.Module:
    """33.6 MB, with sizes that two workers do not share evenly."""
    return nn.Sequential(
        nn.Linear(1024, 2047), nn.Tanh(), nn.Linear(2047, 2048), nn.Tanh(), nn.Linear(2048, 1024),
        nn.Tanh(), nn.Linear(1024, 3),
    )  # fmt: skip


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters())


def held(comm: Communicator) -> tuple[int, int, int]:
    """Bytes of the storages of local parameters, gradients and optimizer state, after a step."""
    mesh = Mesh(shard=2)
    sync = MeshSynchronizer(
        net(),
        lambda parameters: torch.optim.Adam(parameters),
        ranks=MeshRanks.of(mesh, comm, torch.device("cpu")),
        strategy=AllReduce(),
        compute_dtype=None,
        check=lambda *_: None,
    )
    sync.zero_gradients()
    sync.model(torch.randn(4, 1024)).square().sum().backward()
    sync.reduce_gradients(torch.zeros(1), 1.0)
    parameters = sync.trained_parameters()
    gradients = [p.grad for p in parameters if p.grad is not None]
    assert len(gradients) == len(parameters)
    sync.optimizer.step()
    state = [v for kept in sync.optimizer.state.values() for v in kept.values()]
    found = _storages(parameters), _storages(gradients), _storages(state)
    sync.close()
    return found


def _storages(tensors: list[torch.Tensor]) -> int:
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.gang
def test_two_workers_hold_what_is_told(gang: Gang) -> None:
    module = net()
    told = mesh_memory(module, state_sizes(adam(module), module), Mesh(shard=2))
    first, second = gang.run(held)
    assert first == (told.parameter_bytes, told.gradient_bytes, told.optimizer_bytes)
    assert all(there <= here for here, there in zip(first, second, strict=True))
    whole = sum(p.nbytes for p in module.parameters())
    largest = max(sum(p.nbytes for p in layer.parameters()) for layer in module)
    assert whole > 30e6
    assert sum(first) <= 4 * whole / 2 + largest
    assert first[0] <= whole / 2 + 4 * 2048 * 7  # no more than a row more for each parameter
    assert largest < told.gathered_bytes < largest + 20_000  # the last layer is no unit


def test_state_is_that_of_the_groups_options() -> None:
    first, second = nn.Linear(3, 2), nn.Linear(2, 2)
    module = nn.Sequential(first, second)
    groups = [{"params": first.parameters()},
              {"params": second.parameters(), "momentum": 0.9}]  # fmt: skip
    sizes = state_sizes(torch.optim.SGD(groups, lr=0.1), module)
    assert sizes == {
        "0.weight": StateSize(0, 0), "0.bias": StateSize(0, 0),
        "1.weight": StateSize(4, 0), "1.bias": StateSize(4, 0),
    }  # fmt: skip


def test_no_mesh_is_the_whole_and_frozen_layers_have_weights_only() -> None:
    module = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    module[0].requires_grad_(False)
    found = mesh_memory(module, {"1.weight": StateSize(8, 4)}, None, workers=4)
    assert (found.parameter_bytes, found.gradient_bytes) == (800, 400)
    assert (found.optimizer_bytes, found.gathered_bytes) == (804, 0)
    assert (found.data_bytes, found.shard_bytes) == (600, 0)


def test_the_smallest_mesh_that_fits_is_recommended() -> None:
    module = net()
    sizes = state_sizes(adam(module), module)
    whole = mesh_memory(module, sizes, None).kept_bytes
    rows = memory_table(module, sizes, Mesh(data=2), most_workers=8, limit=whole * 2 // 5)
    assert [row.fits for row in rows] == [False, False, False, True, True]
    best = smallest_that_fits(rows)
    assert best is not None and best.mesh == "shard=4"
    unknown = memory_table(module, sizes, None, most_workers=2)
    assert smallest_that_fits(unknown) is None and unknown[0].fits is None
