"""The ranks of a divided module write its weights, each some of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from sparkdl.comm.communicator import Communicator
from sparkdl.data.collate import Arguments
from sparkdl.mesh import Mesh
from sparkdl.serialization.travel.attributes import Attributes
from sparkdl.storage.sharded_weights import INDEX
from sparkdl.storage.storage import LocalStorage
from sparkdl.sync.divided.dividing import divide
from sparkdl.sync.divided.mesh_ranks import MeshRanks
from sparkdl.sync.divided.pipeline import Pipeline
from sparkdl.worker.divided.stored_weights import write_weights
from tests.gang import Gang
from tests.worker.divided.test_sent_weights import Net

LAYOUT = {"0": "columns", "2": "rows"}


class Recorded(LocalStorage):
    """Knows what it was asked to write."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.written: list[str] = []

    def write(self, path: str, data: object) -> None:
        self.written.append(path)
        super().write(path, data)  # type: ignore[arg-type]


def make_pair() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))


def written(comm: Communicator, net: nn.Module, mesh: Mesh, folder: str, most: int) -> list[str]:
    ranks = MeshRanks.of(mesh, comm, torch.device("cpu"))
    pipeline, held = None, Attributes(net, is_divided=True)
    if mesh.pipeline > 1:
        pipeline = Pipeline(net, mesh, ranks.stages, Arguments((torch.zeros(2, 5),)))
    divide(net, ranks, pipeline=pipeline)
    assert not held.has_changed()  # what stands for layers of other ranks stays here
    storage = Recorded(folder)
    writers = mesh.size // mesh.num_replicas
    write_weights(net, comm, storage, "w", num_writers=writers, pipeline=pipeline, most_bytes=most)
    assert (Path(folder) / "w" / INDEX).exists()  # whatever the rank
    return storage.written


def read(folder: Path) -> dict[str, torch.Tensor]:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in weight_map.items()}


@pytest.mark.gang
def test_all_ranks_write_and_others_read(gang: Gang, tmp_path: Path) -> None:
    by_rank = gang.run(written, Net(), Mesh(shard=2, smallest_unit=1), str(tmp_path), 200)
    files = [path for paths in by_rank for path in paths]
    assert len(files) == len(set(files)) > 4 and all(len(paths) > 1 for paths in by_rank)
    state = Net().state_dict()
    tied = "blocks.2.weight"
    found = read(tmp_path / "w")
    assert found.keys() == state.keys() - {tied}
    assert all(torch.equal(found[name], state[name]) for name in found)


@pytest.mark.gang
def test_safetensors_loads_a_model_with_ties(gang: Gang, tmp_path: Path) -> None:
    gang.run(written, Net(), Mesh(tensor=1, data=2, shard_optimizer=True), str(tmp_path), 1 << 30)
    again = Net()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    for file in (tmp_path / "w").glob("*.safetensors"):
        load_model(again, file, strict=False)
    expected = Net().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())


@pytest.mark.gang
@pytest.mark.parametrize("mesh", [Mesh(tensor=2, layout=LAYOUT), Mesh(pipeline=2)], ids=str)
def test_layers_of_a_layout_and_stages(gang: Gang, tmp_path: Path, mesh: Mesh) -> None:
    by_rank = gang.run(written, make_pair(), mesh, str(tmp_path), 50)
    assert all(by_rank)
    state, found = make_pair().state_dict(), read(tmp_path / "w")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.gang
def test_one_replica_writes(gang: Gang, tmp_path: Path) -> None:
    by_rank = gang.run(written, make_pair(), Mesh(data=2), str(tmp_path), 1 << 30)
    assert by_rank[0] and not by_rank[1]
    assert read(tmp_path / "w").keys() == make_pair().state_dict().keys()
