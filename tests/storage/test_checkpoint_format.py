"""Is a checkpoint recognized exactly when it is whole?"""

from __future__ import annotations

import errno
import json
import logging
import math
import struct
import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load

from sparkdl.errors import CheckpointError, ConfigError, StorageError
from sparkdl.storage import checkpoint_format
from sparkdl.storage.checkpoint_format import (
    SHARED,
    CheckpointInfo,
    check_run_key,
    decode,
    encode,
    folders,
    latest,
    load_rank,
    load_shared,
    rank_file,
    read_manifest,
    views,
    write_file,
    write_manifest,
)
from sparkdl.storage.storage import failure
from sparkdl.storage.tensor_tree import DTYPES, snapshot
from tests.storage.memory import MemoryStorage


def write(
    storage: MemoryStorage, step: int, *, is_final: bool = False, ranks: int = 2
) -> CheckpointInfo:
    path = f"run/a-0/step-{step:08d}{'-final' * is_final}"
    files = {}
    for name in (SHARED, *map(rank_file, range(ranks))):
        state = snapshot({"w": torch.full((100,), step), "name": name})
        files[name] = write_file(storage, f"{path}/{name}", encode(state))
    info = CheckpointInfo(
        storage=storage,
        path=path,
        step=step,
        world_size=ranks,
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


def test_of_one_step_the_later_attempts_is_newer() -> None:
    storage = MemoryStorage()
    for writer in ("a-10", "b-0", "a-9", "notes", "a-x"):
        storage.write(f"run/{writer}/step-00000001/x", b"")
    found = [(f.writer.run_id, f.writer.attempt) for f in folders(storage, "run")]
    assert found == [("a", 9), ("a", 10), ("b", 0)]


class Together(MemoryStorage):
    """Gives a rank's file once four are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Barrier(4)

    def read(self, path: str) -> bytes:
        if "/rank-" in path:
            self.gate.wait(20)
        return super().read(path)


def test_files_of_many_ranks_are_read_at_once_but_not_many_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = Together()
    info = write(storage, 3, ranks=8)
    found = latest(storage, "run")
    assert found is not None and found.world_size == 8
    largest = max(record.size_bytes for record in info.files.values())
    monkeypatch.setattr(checkpoint_format, "_MOST_READ_BYTES", 2 * largest)
    storage.gate = threading.Barrier(1)
    most, running, lock = 0, 0, threading.Lock()
    read = storage.read

    def counted(path: str) -> bytes:
        nonlocal most, running
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return read(path)

    monkeypatch.setattr(storage, "read", counted)
    assert latest(storage, "run") is not None and most == 2


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
    assert "passed over run/a-0/step-00000020" in caplog.text
    with pytest.raises(CheckpointError, match="step-00000020"):
        load_shared(read_manifest(storage, newest.path))
        load_rank(newest, 1)


@pytest.mark.parametrize(
    "damage",
    [
        {"step": math.inf},
        {"step": -1},
        {"world_size": 0},
        {"world_size": math.inf},
        {"environment": {"windows": 7}},
        {"environment": [["windows", ["whole"]]]},
        {"files": {"shared.safetensors": {"size_bytes": "2*s0", "sha256": ""}}},
    ],
)
def test_a_manifest_with_wrong_values_is_a_damaged_checkpoint(damage: dict[str, Any]) -> None:
    storage = MemoryStorage()
    write(storage, 10)
    newest = write(storage, 20)
    place = f"{newest.path}/manifest.json"
    storage.write(place, json.dumps(json.loads(storage.read(place)) | damage).encode())
    with pytest.raises(CheckpointError, match=r"step-00000020/manifest\.json is damaged"):
        read_manifest(storage, newest.path)
    found = latest(storage, "run")
    assert found is not None and found.step == 10


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


def mutated(data: bytes, header: int, random: Random) -> bytes:
    """A file with some bytes of its header changed, inserted or missing."""
    changed = bytearray(data)
    for _ in range(random.choice([1, 1, 2, 3])):
        at = random.randrange(8 + header + 4)
        new = [random.choice(b'0123456789-+.eE{}[],:"\\ \x00\xff')]
        changed[at : at + random.randrange(2)] = new[: random.randrange(2)]
    if random.random() < 0.8:  # otherwise only the length is wrong
        changed[:8] = struct.pack("<Q", header + len(changed) - len(data))
    return bytes(changed)


def test_a_changed_header_is_read_or_refused() -> None:
    tree = {"a": torch.arange(6.0), "b": torch.tensor([True]), "c": torch.empty(0, 3), "d": (1,)}
    data = b"".join(encode(snapshot(tree)))
    (header,) = struct.unpack("<Q", data[:8])
    random = Random(7)
    files = [mutated(data, header, random) for _ in range(1500)]
    nested = b'{"__metadata__": ' + b"[" * 99_999
    files += [struct.pack("<Q", size) + bytes(90) for size in (1 << 62, 100_000_001)]
    files.append(struct.pack("<Q", len(nested)) + nested)
    outcomes = set()
    for one in files:
        for read in (decode, views):
            try:
                read(one, "there")
                outcomes.add("read")
            except CheckpointError:
                outcomes.add("refused")
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize("offsets", ["0, 16", "-8, 0", "8, 0", "0, 4", '"0", 8'])
def test_a_tensor_lies_within_its_file(offsets: str) -> None:
    entry = f'"w": {{"dtype": "U8", "shape": [8], "data_offsets": [{offsets}]}}'
    header = f'{{"__metadata__": {{"tree": "{{\\"tensor\\": \\"w\\"}}"}}, {entry}}}'.encode()
    with pytest.raises(CheckpointError, match="there is damaged"):
        decode(struct.pack("<Q", len(header)) + header + bytes(8), "there")


def test_tensors_that_share_their_bytes_are_refused() -> None:
    """Each would be copied: a small file could fill the memory."""
    entry = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
    text = json.dumps({"__metadata__": {"tree": "null"}, "a": entry, "b": entry}).encode()
    with pytest.raises(CheckpointError, match="overlap"):
        decode(struct.pack("<Q", len(text)) + text + bytes(8), "there")


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


def test_what_vanishes_or_cannot_be_read_meanwhile_is_told_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The former is passed over; the latter may pass, so that the newest is not given up."""

    class Gone(MemoryStorage):
        error: OSError = FileNotFoundError(errno.ENOENT, "no such file")

        def read(self, path: str) -> bytes:
            if "step-00000020" in path:
                raise failure("read", path, self.error) from self.error
            return super().read(path)

    storage = Gone()
    write(storage, 10)
    write(storage, 20)
    found = latest(storage, "run")
    assert found is not None and found.step == 10
    storage.error = OSError(errno.EIO, "503")
    with pytest.raises(StorageError, match="503"):
        latest(storage, "run")
    found = latest(storage, "run", is_last_try=True)
    assert found is not None and found.step == 10
    assert latest(storage, "run", is_wanted=lambda folder: folder.step > 20) is None
