"""A module gets its weights after it was divided, tensor by tensor, and is the same module."""

from __future__ import annotations

import io
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from sparkdl.comm.communicator import Communicator
from sparkdl.data.spool import local_disk
from sparkdl.data.spool.local_disk import DiskFull, ScratchFile
from sparkdl.errors import CheckpointError, CommunicationError
from sparkdl.mesh import Mesh
from sparkdl.serialization.travel.packed_module import PackedModule, pack
from sparkdl.storage.checkpoint_format import decode
from sparkdl.storage.tensor_file import TensorFile, read_header
from sparkdl.sync.divided.dividing import divide, local, whole_weights
from sparkdl.sync.divided.mesh_ranks import MeshRanks
from sparkdl.worker.divided.sent_weights import SentWeights
from tests.gang import Gang


class Net(nn.Module):
    """All kinds of tensors that a module may hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Linear(5, 7, dtype=torch.float64)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight
        self.norm = nn.BatchNorm1d(7)
        self.frozen = nn.Parameter(torch.randn(3, 2), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.hidden = [nn.Parameter(torch.randn(4)), torch.arange(3)]
        self.again = self.hidden[1]
        self.phase = torch.randn(2, dtype=torch.complex64)
        self.register_buffer("steps", torch.arange(6), persistent=False)


@pytest.fixture(scope="module")
def packed() -> PackedModule:
    return pack(Net())


def rebuilt(comm: Communicator, packed: PackedModule) -> tuple[dict[str, torch.Tensor], int, str]:
    """Divide a module and give it its weights; weights, largest part of ours, and what is odd."""
    files = MagicMock()
    files.read_pieces.side_effect = [
        CommunicationError("the network is away"),
        [packed.tensors[at : at + 100] for at in range(0, len(packed.tensors), 100)],
    ]
    sent = SentWeights(packed.skeleton, "initial", files, comm)
    net = sent.module
    blank = [name for name, parameter in net.named_parameters() if not parameter.is_meta]
    ranks = MeshRanks.of(Mesh(shard=2, smallest_unit=1), comm, torch.device("cpu"))
    regions = divide(net, ranks)
    sent.fill(net, regions, torch.device("cpu"))
    sent.close()
    expected = Net()
    odd = "".join(
        name
        for name, is_right in {
            "values before": not blank,
            "hidden": torch.equal(net.hidden[0], expected.hidden[0]),
            "its class": isinstance(net.hidden[0], nn.Parameter),
            "again": net.again is net.hidden[1],
            "phase": torch.equal(net.phase, expected.phase),
            "steps": torch.equal(net.steps, expected.steps),
            "frozen": not net.frozen.requires_grad,
            "asked": files.read_pieces.call_count == (2 if comm.rank == 0 else 0),
        }.items()
        if not is_right
    )
    weights = decode(b"".join(whole_weights(net)), "the weights")
    parts = [local(parameter).numel() for parameter in net.parameters()]
    return weights, sum(parts), odd


@pytest.mark.gang
def test_it_is_the_module_that_was_packed(packed: PackedModule, gang: Gang) -> None:
    net = Net()
    expected = net.state_dict() | dict(net.named_buffers())  # also those that are not persistent
    numbers = sum(parameter.numel() for parameter in Net().parameters())
    for weights, own, odd in gang.run(rebuilt, packed):
        assert not odd
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        assert own <= numbers / 2 + 20


def test_a_file_that_lacks_its_end_is_damaged(packed: PackedModule) -> None:
    with pytest.raises(CheckpointError, match="no header"):
        read_header(io.BytesIO(packed.tensors[:100]), "initial")
    cut = io.BytesIO(packed.tensors[:-1])
    contents = TensorFile.of(read_header(cut, "initial"))
    with pytest.raises(CheckpointError, match="lacks its end"):
        for name in contents.entries:
            contents.read(cut, name, "initial")


def test_a_scratch_file_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    file = MagicMock()
    file.write.side_effect = OSError(28, "No space left on device")
    monkeypatch.setattr(local_disk.tempfile, "TemporaryFile", lambda dir: file)
    with pytest.raises(DiskFull, match="cannot write a file of weights in /"):
        ScratchFile().write([b"1"])


def test_a_scratch_file_has_what_was_written_last() -> None:
    scratch = ScratchFile()
    scratch.write([b"first"])
    scratch.write([b"se", b"c"])
    assert list(scratch.pieces()) == [b"sec"] == list(scratch.pieces())
    scratch.close()
