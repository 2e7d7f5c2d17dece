"""A module whose weights lie in a storage is the module, without anyone holding them."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import sparkdl
from sparkdl.errors import ConfigError, StorageError
from sparkdl.mesh import Mesh
from sparkdl.models import LanguageModel
from sparkdl.serialization.saved_module import open_module, prepare_stored
from sparkdl.serialization.stored_module import (
    StoredModule,
    WeightsAt,
    can_be_stored,
    seen,
    with_values,
    without_values,
)
from sparkdl.serialization.travel.packed_module import pack, unpack
from sparkdl.storage.sharded_weights import INDEX, file_pieces, index_text, plan_files
from sparkdl.storage.storage import LocalStorage, open_storage
from tests.describable import Tied


class Branches(nn.Module):
    """Looks at values, which only those who have them can do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if float(self.layer.weight.sum()) < 1e9 else x


class Net(nn.Module):
    """Recurrent layers, statistics, and what no state dict has."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(3, width, batch_first=True)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 2)
        self.register_buffer("phase", torch.rand(2), persistent=False)
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self.recurrent(x)[0][:, -1]
        out: torch.Tensor = self.head(self.norm(last)) * self.phase / self.temperature
        return out


def store(module: nn.Module, folder: Path) -> StoredModule:
    storage = LocalStorage(folder)
    state = dict(module.state_dict())
    ties = {}
    for names in _ties(module):
        for other in names[1:]:
            ties[other] = names[0]
            del state[other]
    sizes = {name: value.nbytes for name, value in state.items()}
    files = plan_files(sizes, 2)
    for file, names in files.items():
        storage.write(f"w/{file}", file_pieces({name: state[name] for name in names}, ties))
    storage.write(f"w/{INDEX}", index_text(files, sizes))
    return StoredModule.of(copy.deepcopy(module), storage, "w", mesh=Mesh(shard=2))


def _ties(module: nn.Module) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return list(groups.values())


def trained(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    net = make()
    with torch.no_grad():
        for value in (*net.parameters(), *net.buffers()):
            value.add_(1)
    return net.eval()


def recurrent() -> nn.Module:
    net = Net()
    net.temperature = 2.0
    net.head.weight.requires_grad_(False)
    return net


def test_it_is_the_module(tmp_path: Path) -> None:
    net, x = trained(recurrent), torch.randn(3, 5, 3)
    stored = store(net, tmp_path)
    blank = stored.blank
    assert all(parameter.is_meta for parameter in blank.parameters())
    assert not blank.head.weight.requires_grad
    assert torch.equal(blank.norm.running_mean, net.norm.running_mean)
    assert len(stored.packed.tensors) < 3000
    module = stored.module
    assert stored.module is module
    assert torch.equal(module(x), net(x))
    again = stored.at.open()
    others = unpack(stored.packed.skeleton, stored.packed.tensors, again.read)
    assert torch.equal(others(x), net(x))
    with torch.no_grad():
        module.head.bias.zero_()
    del module
    gc.collect()
    assert torch.equal(stored.module(x), net(x))


def test_ties_stay(tmp_path: Path) -> None:
    net = trained(Tied)
    stored = store(net, tmp_path)
    assert _ties(stored.module) == _ties(stored.blank) == _ties(net)


def test_shapes_are_found_without_weights(tmp_path: Path) -> None:
    looked: list[nn.Module] = []

    def look(module: nn.Module) -> tuple[int, ...]:
        looked.append(module)
        with torch.inference_mode():
            return tuple(module(torch.zeros(2, 5, 3)).shape)

    stored = store(trained(recurrent), tmp_path / "a")
    assert seen(stored, look) == (2, 2)
    assert len(looked) == 1 and not stored._whole
    branches = store(trained(Branches), tmp_path / "b")
    assert seen(branches, look) == (2, 5, 2)
    assert len(looked) == 3 and branches._whole

    def refuse(module: nn.Module) -> None:
        raise ConfigError("no such layer")

    with pytest.raises(ConfigError, match="no such layer"):
        seen(stored, refuse)
    assert not stored._whole


@pytest.mark.parametrize(
    "make", [recurrent, Tied, partial(LanguageModel, num_tokens=9, width=8, num_heads=2)], ids=str
)
def test_a_module_is_made_without_values(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    with without_values():
        blank = make()
    assert all(parameter.is_meta for parameter in blank.parameters())
    assert not any(buffer.is_meta for buffer in blank.buffers())
    assert _ties(blank) == _ties(make())
    net = trained(make)
    stored = store(net, tmp_path)
    filled = with_values(blank, stored.weights)
    assert all(
        torch.equal(a, b) for a, b in zip(filled.parameters(), net.parameters(), strict=True)
    )
    assert not nn.Linear(2, 2).weight.is_meta  # the hook is gone


def test_it_is_saved_file_by_file(tmp_path: Path) -> None:
    net, x = trained(recurrent), torch.randn(3, 5, 3)
    stored = store(net, tmp_path)
    storage = LocalStorage(tmp_path / "saved")
    prepared = prepare_stored(
        stored, Net, example_inputs=None, extra={"mesh": stored.mesh}, others={"note": b"1"}
    )
    assert not stored._whole
    prepared.write(storage, "m")
    names = {*stored.weights.files, INDEX, "module.json", "note", "unlisted.safetensors"}
    assert set(storage.list("m")) == names
    for name in stored.weights.files:
        assert storage.read(f"m/{name}") == (tmp_path / "w" / name).read_bytes()
    saved = open_module(storage, "m", is_lazy=True)
    assert saved.extra() == {"mesh": Mesh(shard=2)}
    loaded = StoredModule.of(saved.make_blank(), storage, "m")
    assert torch.equal(loaded.module(x), net(x))
    assert not loaded.module.head.weight.requires_grad
    assert torch.equal(saved.make()(x), net(x))
    assert torch.equal(sparkdl.load_module(tmp_path / "saved" / "m")(x), net(x))
    assert torch.equal(saved.weights()["head.bias"], net.head.bias)
    other = store(nn.Sequential(nn.Linear(3, 2)), tmp_path / "other")
    with pytest.raises(StorageError, match="no tensor for"):
        StoredModule.of(trained(recurrent), LocalStorage(tmp_path / "other"), "w")
    assert other.mesh is not None


def test_a_changed_byte_is_found_when_all_is_read(tmp_path: Path) -> None:
    stored = store(trained(recurrent), tmp_path)
    prepare_stored(stored, Net, example_inputs=None, extra={}, others={}).write(
        LocalStorage(tmp_path), "m"
    )
    file = tmp_path / "m" / stored.weights.files[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(StorageError, match="SHA-256"):
        open_module(LocalStorage(tmp_path), "m")
    file.write_bytes(data + b"1")
    open_module(LocalStorage(tmp_path), "m", is_lazy=True)  # no reader asks for that byte
    file.write_bytes(data[:-1])
    with pytest.raises(StorageError, match="too early"):
        open_module(LocalStorage(tmp_path), "m", is_lazy=True).make()


def test_weights_behind_a_url(s3_url: str, tmp_path: Path) -> None:
    net, x = trained(recurrent), torch.randn(3, 5, 3)
    here = store(net, tmp_path)
    folder = open_storage(s3_url)
    for name in (*here.weights.files, INDEX):
        folder.write(f"w/{name}", LocalStorage(tmp_path).read(f"w/{name}"))
    stored = StoredModule.of(copy.deepcopy(net), folder, "w")
    assert torch.equal(stored.module(x), net(x))
    rows = stored.at.open().rows("recurrent.weight_ih_l0", 2, 5)
    assert torch.equal(rows, net.state_dict()["recurrent.weight_ih_l0"][2:5])
    prepare_stored(stored, Net, example_inputs=None, extra={}, others={}).write(folder, "m")
    assert torch.equal(sparkdl.load_module(f"{s3_url}/m")(x), net(x))


def test_a_place_that_is_gone_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot be read from .*/w: .*model.save"):
        WeightsAt(url=str(tmp_path / "gone"), path="w").open()


def test_what_files_of_weights_can_hold() -> None:
    assert can_be_stored(Net())
    assert not can_be_stored(nn.LazyLinear(3))
    assert not can_be_stored(nn.Linear(2, 2, dtype=torch.complex64))


def test_a_module_that_was_packed_whole_needs_no_weights() -> None:
    packed = pack(Net())
    assert unpack(packed.skeleton, packed.tensors).head.bias.shape == (2,)
