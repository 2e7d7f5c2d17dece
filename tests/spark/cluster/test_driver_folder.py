"""The driver's folder gives up older checkpoints before it refuses what is new."""

from __future__ import annotations

import errno
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from sparkdl.comm.channel import Hub
from sparkdl.config import CheckpointConfig
from sparkdl.errors import StorageError
from sparkdl.spark.cluster.link import DriverFolder, driver_folder
from sparkdl.storage.checkpoint_format import Writer, folders, latest
from sparkdl.storage.checkpoint_writer import CheckpointManager
from sparkdl.storage.storage import Data, failure, pieces
from tests.storage.memory import MemoryStorage


class Small(MemoryStorage):
    """Has space for a number of bytes."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes = num_bytes

    def write(self, path: str, data: Data) -> None:
        content = b"".join(pieces(data))
        used = sum(len(there) for name, there in self._files.items() if name != path)
        if used + len(content) > self.num_bytes:
            cause = OSError(errno.ENOSPC, "No space left on device")
            raise failure("write", path, cause) from cause
        super().write(path, content)


def train(storage: DriverFolder, num_checkpoints: int, keep: int) -> None:
    """Checkpoints of about 12 kB each; writers come over the channel, and try again."""
    manager = CheckpointManager(
        storage,
        CheckpointConfig(keep=keep, interval=1),
        writer=Writer(run_key="run", run_id="a", attempt=0),
        rank=0, world_size=1, environment={}, signal=Hub(), is_required=False, pauses=(),
    )  # fmt: skip
    for step in range(1, num_checkpoints + 1):
        manager.save(step, {"text": "x" * 10_000}, {})
    manager.close()


def test_it_keeps_fewer_checkpoints_when_it_is_full(caplog: pytest.LogCaptureFixture) -> None:
    storage = DriverFolder(Small(40_000))
    train(storage, 20, keep=9)
    newest = latest(storage, "run")
    assert newest is not None and newest.step >= 19
    assert caplog.text.count("is full, so it keeps one checkpoint only; set checkpointDir") == 1


def test_without_room_for_two_the_newest_whole_one_stays() -> None:
    storage = DriverFolder(Small(18_000))
    train(storage, 20, keep=2)
    newest = latest(storage, "run")
    assert newest is not None and newest.step == 1
    assert len(folders(storage, "run")) <= 2  # what failed does not pile up


def test_the_final_weights_have_precedence_over_older_checkpoints() -> None:
    small = Small(60_000)
    storage = DriverFolder(small)
    train(storage, 4, keep=4)
    weights = [b"x" * 20_000, b"y" * 10_000]
    with pytest.raises(StorageError, match=r"No space left.*or TMPDIR to a folder with more space"):
        storage.write("final.safetensors", iter(weights))
    storage.write("final.safetensors", iter(weights))  # as the worker does, which makes them anew
    assert storage.read("final.safetensors") == b"".join(weights)
    newest = latest(storage, "run")
    assert newest is not None and newest.step == 4
    small.num_bytes = 0
    with pytest.raises(StorageError, match="TMPDIR"):
        storage.write("value-0.pkl", b"1")


def test_one_that_is_too_small_is_told_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free=700 << 20))
    needs = {"weights_bytes": 50 << 20, "checkpoint_bytes": 150 << 20}
    with driver_folder() as storage:
        assert Path(str(storage)).parent == tmp_path
        storage.check_space(**needs, num_checkpoints=4)
        assert caplog.text == ""
        storage.check_space(**needs, num_checkpoints=5)
        assert f"{storage} has 700 MiB free; this run needs about 850 MiB there" in caplog.text
        assert "5 checkpoint(s) of about 150 MiB" in caplog.text
    assert list(tmp_path.iterdir()) == []
