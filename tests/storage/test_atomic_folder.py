"""Is every damaged byte of a saved folder found before anything is made of it?"""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.errors import StorageError
from sparkdl.serialization.saved_module import (
    open_module,
    prepare_module,
)
from sparkdl.storage.atomic_folder import digest, read_files, read_index, write_folder
from tests.describable import NeedsWidth
from tests.serialization.saving import load_module_from, save_module
from tests.storage.memory import MemoryStorage

INDEX = "index.json"
VERSIONS = range(1, 3)
STEP = 13
"""Every so many bytes one is damaged; no divisor of the lengths of words in the files."""


class Unimportable(nn.Module):
    __module__ = "__main__"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@functools.cache
def saved(way: str) -> dict[str, bytes]:
    """The files of a module that was saved in one of the three ways."""
    storage = MemoryStorage()
    module, factory, inputs = {
        "factory": (NeedsWidth(5), functools.partial(NeedsWidth, 5), None),
        "description": (nn.Sequential(nn.Linear(3, 2), nn.Tanh()), None, None),
        "program": (Unimportable(), None, (torch.zeros(2, 3),)),
    }[way]
    prepared = prepare_module(
        module, factory, example_inputs=inputs, extra={"a": 1}, others={"notes.json": b"{}"}
    )
    prepared.write(storage, "m")
    return {name: storage.read(f"m/{name}") for name in storage.list("m")}


def laid_out(files: dict[str, bytes]) -> MemoryStorage:
    storage = MemoryStorage()
    for name, data in files.items():
        storage.write(f"m/{name}", data)
    return storage


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        raise AssertionError("something was made of a damaged folder")

    for way in ("factory", "description", "program"):
        saved(way)
    for name in (
        "sparkdl.serialization.saved_module.restore",
        "sparkdl.serialization.saved_module.read_program",
        "sparkdl.serialization.saved_module.views",
        "sparkdl.serialization.json_objects.import_object",
    ):
        monkeypatch.setattr(name, run)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("way", ["factory", "description", "program"])
def test_flipped_bytes_are_found_everywhere_before_anything_runs(way: str) -> None:
    files = saved(way)
    for name, data in files.items():
        for at in range(0, len(data), STEP if len(data) < 3000 else 10 * STEP):
            for bit in (0x01, 0x20, 0x80):
                flipped = data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
                with pytest.raises(StorageError, match=name):
                    load_module_from(laid_out({**files, name: flipped}), "m")


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("way", ["factory", "description", "program"])
def test_truncation_extension_and_loss_are_found_before_anything_runs(way: str) -> None:
    files = saved(way)
    for name, data in files.items():
        cuts = [data[:length] for length in range(0, len(data), len(data) // 20 + 1)]
        for changed in (*cuts, data + b" ", data + b"\0"):
            with pytest.raises(StorageError, match=name):
                load_module_from(laid_out({**files, name: changed}), "m")
        rest = {other: data for other, data in files.items() if other != name}
        with pytest.raises(StorageError, match=name):
            load_module_from(laid_out(rest), "m")


@pytest.mark.usefixtures("nothing_runs")
def test_files_of_another_module_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    files, others = saved("factory"), saved("description")
    mixed = {**files, "weights.safetensors": others["weights.safetensors"]}
    with pytest.raises(StorageError, match=r"weights\.safetensors is damaged"):
        load_module_from(laid_out(mixed), "m")


def test_a_seal_does_not_make_an_index_without_a_recipe_valid() -> None:
    index = {k: v for k, v in json.loads(saved("factory")["module.json"]).items() if k != "sha256"}
    for body in ({**index, "recipe": {}}, {**index, "recipe": 5}, {**index, "files": {}},
                 {k: v for k, v in index.items() if k != "extra"}):  # fmt: skip
        text = json.dumps({**body, "sha256": digest(body)}, indent=1).encode()
        with pytest.raises(StorageError, match="does not say how"):
            open_module(laid_out({**saved("factory"), "module.json": text}), "m")


def test_an_index_cannot_name_files_elsewhere() -> None:
    body = {"version": 2, "files": {"../x": {"size_bytes": 0, "sha256": ""}}}
    text = json.dumps({**body, "sha256": digest(body)}, indent=1).encode()
    with pytest.raises(StorageError, match=r"a file called '\.\./x'"):
        read_index(laid_out({INDEX: text}), "m", INDEX, VERSIONS)


def test_a_later_version_is_told_from_damage() -> None:
    storage = laid_out({INDEX: b'{"version": 3, "unknown": true}'})
    with pytest.raises(StorageError, match=r"version 3; this sparkdl reads up to 2.*newer"):
        read_index(storage, "m", INDEX, VERSIONS)


def test_pieces_are_written_as_they_come_and_listed() -> None:
    storage = MemoryStorage()
    write_folder(storage, "m", INDEX, {"version": 2}, {"a": iter([b"12", memoryview(b"3")])})
    index = read_index(storage, "m", INDEX, VERSIONS)
    assert read_files(storage, "m", index) == {"a": b"123"}
    assert index["files"]["a"].size_bytes == 3


def test_a_folder_whose_writing_was_interrupted_is_damaged() -> None:
    def broken() -> Any:
        yield b"1"
        raise OSError("the disk is gone")

    storage = MemoryStorage()
    write_folder(storage, "m", INDEX, {"version": 2}, {"a": b"1"})
    with pytest.raises(OSError, match="gone"):
        write_folder(storage, "m", INDEX, {"version": 2}, {"a": broken()})
    with pytest.raises(StorageError, match=r"cannot read m/index\.json"):
        read_index(storage, "m", INDEX, VERSIONS)


def test_an_intact_folder_comes_back() -> None:
    for way in ("factory", "description", "program"):
        module, extra = load_module_from(laid_out(saved(way)), "m")
        assert extra == {"a": 1} and not module.training
    saved_module = open_module(laid_out(saved("factory")), "m")
    assert saved_module.files["notes.json"] == b"{}"


def test_what_is_loaded_does_not_share_memory_with_the_file() -> None:
    storage = MemoryStorage()
    save_module(nn.Linear(3, 2), None, storage, "m", example_inputs=None, extra={})
    before = storage.read("m/weights.safetensors")[:]
    module, _ = load_module_from(storage, "m")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(7.0)
    assert storage.read("m/weights.safetensors") == before
    again, _ = load_module_from(storage, "m")
    assert not torch.equal(next(again.parameters()), next(module.parameters()))
