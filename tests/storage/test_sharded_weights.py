"""Weights in several files are what other readers take them for, and are read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparkdl.errors import StorageError
from sparkdl.storage.sharded_weights import (
    INDEX,
    ShardedWeights,
    file_pieces,
    index_text,
    plan_files,
)
from sparkdl.storage.storage import LocalStorage


def test_files_are_about_equal_and_hold_whole_tensors() -> None:
    sizes = {"a": 40, "b": 30, "c": 50, "d": 0, "e": 10}
    assert plan_files(sizes, 1) == {"model-00001-of-00001.safetensors": list(sizes)}
    assert list(plan_files(sizes, 2).values()) == [["a"], ["b"], ["c", "d", "e"]]
    assert list(plan_files(sizes, 1, most_bytes=35).values()) == [["a"], ["b"], ["c"], ["d", "e"]]
    assert list(plan_files({"a": 0}, 4).values()) == [["a"]]


TENSORS = {
    "first": torch.arange(12.0, dtype=torch.float64).reshape(4, 3),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "half": torch.randn(3, 2).bfloat16(),
    "nothing": torch.empty(0, 4),
    "number": torch.tensor(7),
}


def write(path: Path) -> LocalStorage:
    storage = LocalStorage(path)
    sizes = {name: value.nbytes for name, value in TENSORS.items()}
    files = plan_files(sizes, 3)
    assert len(files) > 1
    for file, names in files.items():
        own = {name: TENSORS[name] for name in names}
        storage.write(f"m/{file}", file_pieces(own, {"again": "first"}))
    storage.write(f"m/{INDEX}", index_text(files, sizes))
    return storage


def test_others_read_it(tmp_path: Path) -> None:
    write(tmp_path)
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(value.nbytes for value in TENSORS.values())}
    assert index["weight_map"].keys() == TENSORS.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "m" / file)[name], TENSORS[name])


def test_it_is_read_tensor_by_tensor(tmp_path: Path) -> None:
    weights = ShardedWeights(write(tmp_path), "m")
    assert set(weights.names) == TENSORS.keys()
    assert "again" in weights and "other" not in weights
    assert weights.num_bytes == sum(value.nbytes for value in TENSORS.values())
    for name, value in TENSORS.items():
        assert torch.equal(weights.read(name), value)
        assert weights.blank(name).shape == value.shape and weights.blank(name).is_meta
    assert torch.equal(weights.read("again"), TENSORS["first"])
    assert torch.equal(weights.rows("first", 1, 3), TENSORS["first"][1:3])
    assert weights.rows("first", 2, 2).shape == (0, 3)
    for file in weights.files:
        assert b"".join(weights.pieces(file)) == (tmp_path / "m" / file).read_bytes()


def test_what_is_changed_in_memory_stays_there(tmp_path: Path) -> None:
    weights = ShardedWeights(write(tmp_path), "m")
    weights.read("first").zero_()
    assert torch.equal(weights.read("first"), TENSORS["first"])


def test_files_of_others_are_read(tmp_path: Path) -> None:
    save_file({"odd": torch.arange(3, dtype=torch.uint8), "w": torch.ones(2)}, tmp_path / "x.st")
    index = {"metadata": {}, "weight_map": {"odd": "x.st", "w": "x.st"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    weights = ShardedWeights(LocalStorage(tmp_path), ".")
    assert torch.equal(weights.read("w"), torch.ones(2))


def test_damage_is_found(tmp_path: Path) -> None:
    storage = write(tmp_path)
    file = tmp_path / "m" / "model-00001-of-00002.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(StorageError, match="too early"):
        ShardedWeights(storage, "m").read("first")
    deep = (200_000).to_bytes(8, "little") + b"[" * 200_000
    for damaged in (whole[:4], b"\xff" * 8 + whole[8:], whole[:8] + b"{" * 8 + whole[16:], deep):
        file.write_bytes(damaged)
        with pytest.raises(StorageError, match="damaged"):
            ShardedWeights(storage, "m")
    file.write_bytes(
        whole.replace(b'"shape":[4,3]', b'"shape":[4,4]').replace(
            b'"shape": [4, 3]', b'"shape": [4, 4]'
        )
    )
    with pytest.raises(StorageError, match="a tensor"):
        ShardedWeights(storage, "m")
    file.write_bytes(whole)
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    (tmp_path / "m" / INDEX).write_text("[" * 200_000)
    with pytest.raises(StorageError, match="damaged"):
        ShardedWeights(storage, "m")
    index["weight_map"]["more"] = file.name
    (tmp_path / "m" / INDEX).write_text(json.dumps(index))
    with pytest.raises(StorageError, match="other tensors"):
        ShardedWeights(storage, "m")
