"""A module whose weights each rank makes is the one that the factory makes, whatever the mesh."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sparkdl.comm.communicator import Communicator
from sparkdl.config import TrainConfig
from sparkdl.mesh import Mesh
from sparkdl.serialization.initial_weights import InitialWeights, load_initial_weights
from sparkdl.serialization.recorded.recording import recorded
from sparkdl.serialization.travel.packed_module import PackedModule, pack
from sparkdl.storage.checkpoint_format import decode
from sparkdl.sync.divided.dividing import divide, local, whole_weights
from sparkdl.sync.divided.mesh_ranks import MeshRanks
from sparkdl.train.loop import train
from sparkdl.worker.divided import sent_weights
from sparkdl.worker.divided.sent_weights import MadeWeights, SentWeights
from tests.gang import Gang
from tests.sync.divided import test_mesh_training as mesh_training
from tests.sync.divided.test_mesh_training import assert_equal, config_of, one_process_of

pytestmark = pytest.mark.gang

LAYOUT = {"blocks.0": "columns", "blocks.1": "rows"}
MESHES = [
    Mesh(shard=2, smallest_unit=1),
    Mesh(data=2, shard_optimizer=True),
    Mesh(tensor=2, layout=LAYOUT),
]


class Net(nn.Module):
    """Kinds of parameters and of other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 8)
        self.blocks = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8), nn.Linear(8, 8))
        nn.init.orthogonal_(self.blocks[2].weight)
        self.lstm = nn.LSTM(8, 4, 2)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 12)
        self.out.weight = self.tokens.weight
        self.frozen = nn.Parameter(torch.randn(3, 2).double(), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.hidden = [nn.Parameter(torch.randn(4)), torch.arange(3)]
        self.register_buffer("steps", torch.rand(6), persistent=False)


def made() -> Net:
    torch.manual_seed(3)
    return Net()


@pytest.fixture(scope="module")
def packed() -> PackedModule:
    torch.manual_seed(3)
    module, weights = recorded(Net)
    return pack(module, weights)


def rebuilt(
    comm: Communicator, packed: PackedModule, mesh: Mesh, cpus: str
) -> tuple[dict[str, torch.Tensor], int, list[str]]:
    """Divide a module and give it its weights; weights, numbers on this rank, and what is odd."""
    model = f"cpu {comm.rank}" if cpus == "other" else "cpu"
    with patch.object(sent_weights, "cpu_model", lambda: model):
        unfilled = MadeWeights(packed.skeleton, packed.tensors, packed.recipe, comm)
    net: Any = unfilled.module
    facts = {"values before": all(parameter.is_meta for parameter in net.parameters())}
    regions = divide(net, MeshRanks.of(mesh, comm, torch.device("cpu")))
    unfilled.fill(net, regions, torch.device("cpu"))
    expected = made()
    facts |= {
        "hidden": torch.equal(net.hidden[0], expected.hidden[0]),
        "its class": isinstance(net.hidden[0], nn.Parameter),
        "plain": torch.equal(net.hidden[1], expected.hidden[1]),
        "steps": torch.equal(net.steps, expected.get_buffer("steps")),
        "frozen": not net.frozen.requires_grad,
        "tied": net.out.weight is net.tokens.weight,
        "flat weights": net.lstm._flat_weights[0] is net.lstm.weight_ih_l0,
    }
    weights = decode(b"".join(whole_weights(net)), "the weights")
    own = sum(local(parameter).numel() for parameter in net.parameters())
    return weights, own, [name for name, is_right in facts.items() if not is_right]


@pytest.mark.parametrize("cpus", ["alike", "other"])
def test_the_weights_are_those_of_the_factory(packed: PackedModule, gang: Gang, cpus: str) -> None:
    assert_rebuilt(packed, gang, MESHES, cpus)


@pytest.mark.slow
def test_the_weights_are_those_of_the_factory_on_four_ranks(
    packed: PackedModule, gang4: Gang
) -> None:
    mesh = Mesh(shard=2, tensor=2, layout=LAYOUT, smallest_unit=1)
    assert_rebuilt(packed, gang4, [mesh], "alike")


def assert_rebuilt(packed: PackedModule, gang: Gang, meshes: list[Mesh], cpus: str) -> None:
    net = made()
    expected = net.state_dict() | dict(net.named_buffers())  # also those that are not persistent
    numbers = sum(parameter.numel() for parameter in made().parameters())
    for mesh in meshes:
        for weights, own, odd in gang.run(rebuilt, packed, mesh, cpus):
            assert not odd, mesh
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[name], expected[name]) for name in expected), mesh
            assert own < numbers


def test_weights_of_a_file_and_those_that_are_made(gang: Gang, tmp_path: Path) -> None:
    """A fit with initial weights for all but two layers."""
    torch.manual_seed(9)
    given = {name: value.clone() for name, value in Net().state_dict().items()}
    save_file(given, tmp_path / "w.safetensors")
    initial = InitialWeights(source=tmp_path / "w.safetensors", skip=("blocks.0", "lstm"))
    torch.manual_seed(3)
    module, weights = recorded(Net)
    load_initial_weights(module, initial, weights=weights)
    packed = pack(module, weights)
    assert packed.pieces is not None
    assert packed.recipe
    data = b"".join(packed.pieces())
    expected = made()
    load_initial_weights(expected, initial)
    sent = packed.skeleton, packed.recipe, data
    for mesh in MESHES:
        for found, begun in gang.run(read_on_rank, sent, mesh):
            assert begun
            for name, value in expected.state_dict().items():
                assert torch.equal(found[name], value), (mesh, name)


def read_on_rank(
    comm: Communicator, sent: tuple[bytes, bytes, bytes], mesh: Mesh
) -> tuple[dict[str, torch.Tensor], bool]:
    skeleton, recipe, data = sent
    files = MagicMock()
    files.read_pieces.return_value = [data]
    with closing(SentWeights(skeleton, "initial", files, comm, recipe)) as unfilled:
        net = unfilled.module
        begun = all(parameter.is_meta for parameter in net.parameters())
        regions = divide(net, MeshRanks.of(mesh, comm, torch.device("cpu")))
        unfilled.fill(net, regions, torch.device("cpu"))
    return decode(b"".join(whole_weights(net)), "the weights"), begun


@pytest.mark.parametrize("mesh", ["shard", "tensor", "pipeline"])
def test_it_learns_what_one_process_learns(gang: Gang, mesh: str) -> None:
    case = "adam, clipped, in two parts"
    for found in gang.run(train_unmade, config_of(case, mesh_training.MESHES[mesh])):
        assert_equal(found, one_process_of(case))


@pytest.mark.slow
def test_it_learns_what_one_process_learns_on_four_ranks(gang4: Gang) -> None:
    case = "momentum, the best"
    for found in gang4.run(train_unmade, config_of(case, mesh_training.PAIRS["shard, tensor"])):
        assert_equal(found, one_process_of(case))


def train_unmade(comm: Communicator, config: TrainConfig) -> Any:
    """Train this rank's part of a module that nobody has had whole."""

    def begun(_: Any) -> nn.Module:
        torch.manual_seed(3)
        module, weights = recorded(mesh_training.Net)
        packed = pack(module, weights)
        unfilled = MadeWeights(packed.skeleton, packed.tensors, packed.recipe, comm)
        fill.append(partial(unfilled.fill, device=torch.device("cpu")))
        return unfilled.module

    def train_filled(**values: Any) -> Any:
        assert all(parameter.is_meta for parameter in values["module"].parameters())
        return train(**values, fill=fill[0])

    fill: list[Any] = []
    with (
        patch.object(mesh_training, "seeded", begun),
        patch.object(mesh_training, "train", train_filled),
    ):
        return mesh_training.train_on_rank(comm, config)
