"""Is a checkpoint recognized exactly when it is whole?"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load

from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.storage.checkpoint_format import (
    SHARED,
    CheckpointInfo,
    check_run_key,
    decode,
    encode,
    folder_name,
    latest,
    load_rank,
    load_shared,
    rank_file,
    read_manifest,
    views,
    write_file,
    write_manifest,
)
from sparkdl.storage.tensor_tree import DTYPES, snapshot
from tests.storage.memory import MemoryStorage


def write(storage: MemoryStorage, step: int, *, is_final: bool = False) -> CheckpointInfo:
    path = f"run/{folder_name(step, is_final=is_final)}"
    files = {}
    for name in (SHARED, rank_file(0), rank_file(1)):
        state = snapshot({"w": torch.full((100,), step), "name": name})
        files[name] = write_file(storage, f"{path}/{name}", encode(state))
    info = CheckpointInfo(
        storage=storage,
        path=path,
        step=step,
        world_size=2,
        run_key="run",
        complete=is_final,
        environment={"torch": "x"},
        files=files,
    )
    write_manifest(info)
    return info


def test_what_was_written_is_read() -> None:
    storage = MemoryStorage()
    write(storage, 10)
    info = write(storage, 20)
    found = latest(storage, "run")
    assert found == info and found is not None and not found.complete
    assert load_shared(found)["w"].tolist() == [20] * 100
    assert load_rank(found, 1)["name"] == rank_file(1)


def test_other_safetensors_readers_can_read_the_tensors() -> None:
    tensors = {"b": torch.tensor([True]), "a": torch.randn(3, 2), "half": torch.ones(3).bfloat16()}
    back = load(b"".join(encode(snapshot(tensors))))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_views_are_what_decode_gives_without_a_copy() -> None:
    tree = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES}
    tree |= {"empty": torch.empty(0, 3), "number": torch.tensor(7.0), "other": (1, "a")}
    data = b"".join(encode(snapshot(tree)))
    seen, copied = views(data, "x"), decode(data, "x")
    assert seen.keys() == copied.keys() and seen["other"] == (1, "a")
    for name, tensor in copied.items():
        if isinstance(tensor, torch.Tensor):
            assert (seen[name].dtype, seen[name].shape) == (tensor.dtype, tensor.shape)
            ours, theirs = (t.reshape(-1).view(torch.uint8).tolist() for t in (seen[name], tensor))
            assert ours == theirs
    first, again = (views(data, "x")["torch.float64"].data_ptr() for _ in range(2))
    assert first == again


def test_steps_are_ordered_as_numbers_and_the_final_one_is_last() -> None:
    storage = MemoryStorage()
    for step, is_final in ((99999999, False), (100000000, False), (100000000, True), (5, True)):
        write(storage, step, is_final=is_final)
    found = latest(storage, "run")
    assert found is not None and found.complete and found.step == 100000000


def test_no_folder_no_checkpoint() -> None:
    assert latest(MemoryStorage(), "run") is None


def truncate(data: bytes) -> bytes:
    return data[:-1]


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("name", [SHARED, rank_file(1), "manifest.json"])
@pytest.mark.parametrize("damage", [truncate, flip, lambda data: b"", None])
def test_a_damaged_one_is_passed_over_with_a_line_in_the_log(
    name: str, damage: Callable[[bytes], bytes] | None, caplog: pytest.LogCaptureFixture
) -> None:
    storage = MemoryStorage()
    write(storage, 10)
    newest = write(storage, 20)
    place = f"{newest.path}/{name}"
    data = storage.read(place)
    storage.remove(place)
    if damage is not None:
        storage.write(place, damage(data))
    with caplog.at_level(logging.WARNING):
        found = latest(storage, "run")
    assert found is not None and found.step == 10
    assert "passed over run/step-00000020" in caplog.text
    with pytest.raises(CheckpointError, match="step-00000020"):
        load_shared(read_manifest(storage, newest.path))
        load_rank(newest, 1)


def test_a_rank_that_did_not_write_is_named() -> None:
    info = write(MemoryStorage(), 10)
    with pytest.raises(CheckpointError, match=r"2 ranks; it has no state of rank 2"):
        load_rank(info, 2)


def test_a_later_version_is_refused() -> None:
    storage = MemoryStorage()
    info = write(storage, 10)
    place = f"{info.path}/manifest.json"
    storage.write(place, storage.read(place).replace(b'"version": 1', b'"version": 9'))
    with pytest.raises(CheckpointError, match="format version 9"):
        read_manifest(storage, info.path)


@pytest.mark.parametrize("data", [b"", b"12345678", b"\xff" * 20, b"\2" + b"\0" * 7 + b"{}"])
@pytest.mark.parametrize("read", [decode, views])
def test_other_files_are_damaged_checkpoints(
    read: Callable[[bytes, str], Any], data: bytes
) -> None:
    with pytest.raises(CheckpointError, match="there is damaged"):
        read(data, "there")


@pytest.mark.parametrize("key", ["", "a/b", "..", ".hidden", "a b"])
def test_a_run_key_must_be_fit_for_a_folder(key: Any) -> None:
    with pytest.raises(ConfigError, match="run key"):
        check_run_key(key)
