"""Does a gang leave a whole checkpoint behind, whatever is killed, slow or full?"""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdl.config import CheckpointConfig
from sparkdl.errors import CheckpointError, CommunicationError, StorageError
from sparkdl.storage.checkpoint_format import latest, load_rank, load_shared
from sparkdl.storage.checkpoint_writer import CheckpointManager
from sparkdl.storage.storage import Data, LocalStorage, Storage, pieces
from tests.storage.memory import MemoryStorage


class Keys:
    """The run's key-value store, in memory."""

    def __init__(self) -> None:
        self._keys: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._keys[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes | None:
        return self._keys.get(key)

    def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: set(keys) <= set(self._keys), timeout_seconds):
                raise TimeoutError


def make(
    storage: Storage,
    *,
    keys: Keys | None = None,
    rank: int = 0,
    world_size: int = 1,
    keep: int = 2,
    interval: int = 1,
    timeout: float = 10.0,
) -> CheckpointManager:
    return CheckpointManager(
        storage,
        CheckpointConfig(keep=keep, interval=interval),
        rank=rank,
        world_size=world_size,
        run_key="run",
        environment={"torch": torch.__version__},
        signal=keys or Keys(),
        timeout_seconds=timeout,
    )


class SlowStorage(MemoryStorage):
    """Holds every write until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.writing = threading.Event()

    def write(self, path: str, data: Data) -> None:
        self.writing.set()
        assert self.go.wait(20)
        super().write(path, data)


class FullStorage(MemoryStorage):
    """Has no space for the files that a test names."""

    def __init__(self, is_refused: Callable[[str], bool]) -> None:
        super().__init__()
        self._is_refused = is_refused

    def write(self, path: str, data: Data) -> None:
        if self._is_refused(path):
            raise StorageError(f"cannot write {path}: {OSError(errno.ENOSPC, 'full')}")
        super().write(path, data)


def test_two_ranks_make_one_checkpoint() -> None:
    storage, keys = MemoryStorage(), Keys()
    managers = [make(storage, keys=keys, rank=rank, world_size=2) for rank in (0, 1)]

    def work(rank: int) -> None:
        weights = torch.zeros(1000)
        for step in range(1, 6):
            weights += 1
            # What the other ranks pass as shared state is not read.
            managers[rank].save(step, {"w": weights} if rank == 0 else None, {"rank": rank})
        managers[rank].close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    info = latest(storage, "run")
    assert info is not None and (info.step, info.world_size) == (5, 2)
    assert info.environment == {"torch": torch.__version__}
    assert load_shared(info)["w"].tolist() == [5] * 1000
    assert [load_rank(info, rank) for rank in (0, 1)] == [{"rank": 0}, {"rank": 1}]
    assert storage.list("run") == ["step-00000004", "step-00000005"]


def test_the_state_of_the_moment_is_written_though_training_goes_on() -> None:
    storage = SlowStorage()
    manager = make(storage)
    weights = torch.ones(10)
    manager.save(1, {"w": weights}, {})
    weights.zero_()
    storage.go.set()
    manager.close()
    info = latest(storage, "run")
    assert info is not None and load_shared(info)["w"].tolist() == [1] * 10


def test_a_slow_storage_holds_the_next_save_back_and_the_stall_is_counted() -> None:
    storage = SlowStorage()
    manager = make(storage)
    manager.save(1, {}, {})
    first = manager.stall_seconds
    threading.Timer(0.3, storage.go.set).start()
    manager.save(2, {}, {})
    assert first < 0.2 < manager.stall_seconds
    manager.close()


@pytest.mark.parametrize(
    ("interval", "due"), [(3, [3, 6]), (1, [1, 2, 3, 4, 5, 6]), (-1, []), (7, [])]
)
def test_due_at_multiples_of_the_interval(interval: int, due: list[int]) -> None:
    manager = make(MemoryStorage(), interval=interval)
    assert [step for step in range(7) if manager.due(step)] == due


def test_the_last_checkpoint_is_marked_and_wins_over_one_of_the_same_step() -> None:
    storage = MemoryStorage()
    manager = make(storage)
    manager.save(4, {"history": 1}, {})
    manager.final(4, {"history": 2}, {})
    info = latest(storage, "run")
    assert info is not None and info.complete and load_shared(info) == {"history": 2}


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_are_kept_and_older_wrecks_removed(keep: int) -> None:
    storage = MemoryStorage()
    storage.write("run/step-00000001/rank-00000.safetensors", b"wreck")
    storage.write("run/notes", b"not ours")
    manager = make(storage, keep=keep)
    for step in range(2, 7):
        manager.save(step, {}, {})
    manager.close()
    kept = [f"step-{step:08d}" for step in range(7 - keep, 7)]
    assert storage.list("run") == ["notes", *kept]


def test_a_wreck_does_not_count_as_one_of_the_kept() -> None:
    storage = MemoryStorage()
    manager = make(storage, keep=2)
    manager.save(1, {}, {})
    manager.close()
    storage.write("run/step-00000002/shared.safetensors", b"wreck")
    manager.save(3, {}, {})
    manager.close()
    assert storage.list("run") == ["step-00000001", "step-00000003"]


def test_a_full_disk_is_an_error_at_the_next_save_and_the_old_checkpoint_stays() -> None:
    storage = FullStorage(lambda path: "step-00000002" in path)
    manager = make(storage)
    manager.save(1, {}, {})
    manager.save(2, {}, {})
    with pytest.raises(StorageError, match=r"cannot write run/step-00000002.*full"):
        manager.save(3, {}, {})
    info = latest(storage, "run")
    assert info is not None and info.step == 1
    manager.save(4, {}, {})  # the failure was reported; the next save may succeed
    manager.close()
    info = latest(storage, "run")
    assert info is not None and info.step == 4


def test_rank_0_hears_at_once_that_another_rank_could_not_write() -> None:
    storage, keys = FullStorage(lambda path: "rank-00001" in path), Keys()
    managers = [make(storage, keys=keys, rank=rank, world_size=2, timeout=30) for rank in (0, 1)]
    began = time.monotonic()
    for manager in managers:
        manager.save(1, {}, {})
    with pytest.raises(StorageError, match=r"rank 1 could not write step-00000001: .*full"):
        managers[0].close()
    with pytest.raises(StorageError, match="full"):
        managers[1].close()
    assert time.monotonic() - began < 5 and latest(storage, "run") is None


class LostStorage(MemoryStorage):
    """Cannot be reached when rank 1 writes."""

    def write(self, path: str, data: Data) -> None:
        if "rank-00001" in path:
            raise CommunicationError("nobody there")
        super().write(path, data)


def test_what_a_restart_heals_for_one_rank_it_heals_for_rank_0() -> None:
    storage, keys = LostStorage(), Keys()
    managers = [make(storage, keys=keys, rank=rank, world_size=2, timeout=30) for rank in (0, 1)]
    for manager in managers:
        manager.save(1, {}, {})
    with pytest.raises(CommunicationError, match=r"rank 1 could not write .*nobody there"):
        managers[0].close()
    with pytest.raises(CommunicationError, match="nobody there"):
        managers[1].close()


def test_a_rank_that_never_writes_does_not_hang_rank_0() -> None:
    storage = MemoryStorage()
    manager = make(storage, world_size=2, timeout=0.3)
    manager.save(1, {}, {})
    time.sleep(0.4)
    with pytest.raises(StorageError, match="not all 2 ranks had written step-00000001"):
        manager.close()
    assert latest(storage, "run") is None


def test_a_storage_that_hangs_does_not_hang_close() -> None:
    storage = SlowStorage()
    manager = make(storage, timeout=0.2)
    manager.save(1, {}, {})
    with pytest.raises(StorageError, match=r"took more than 0.2 s"):
        manager.close()
    storage.go.set()


def test_abort_returns_at_once_and_makes_no_checkpoint() -> None:
    storage = SlowStorage()
    manager = make(storage)
    manager.save(1, {}, {})
    assert storage.writing.wait(5)
    began = time.monotonic()
    manager.close(abort=True)
    assert time.monotonic() - began < 0.1
    storage.go.set()
    manager.close()
    assert latest(storage, "run") is None


def test_what_cannot_be_stored_is_refused_on_the_training_thread() -> None:
    manager = make(MemoryStorage())
    with pytest.raises(CheckpointError, match=r"scheduler.*builtins.function"):
        manager.save(1, {"scheduler": lambda: None}, {})


KILLED = """
import sys, torch
from sparkdl.storage.checkpoint_writer import CheckpointManager
from sparkdl.storage.storage import LocalStorage
from sparkdl.config import CheckpointConfig

class Keys(dict):
    def set(self, key, value): self[key] = value
    def wait(self, keys, timeout_seconds): assert all(key in self for key in keys)

manager = CheckpointManager(
    LocalStorage(sys.argv[1]), CheckpointConfig(keep=1), rank=0, world_size=1,
    run_key="run", environment={}, signal=Keys())
weights = torch.zeros(200_000)
for step in range(int(sys.argv[2]), 10**6):
    weights += 1
    manager.save(step, {"w": weights, "first": int(sys.argv[2])}, {"step": step})
    if step == int(sys.argv[2]) + 1:  # so that the first save is whole
        print("going", flush=True)
"""


@pytest.mark.slow
def test_a_writer_killed_anywhere_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    storage, step = LocalStorage(tmp_path), 1
    for trial in range(4):
        command = [sys.executable, "-c", KILLED, str(tmp_path), str(step)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"going\n"
            time.sleep(0.013 * trial)
            process.kill()
        info = latest(storage, "run")
        assert info is not None and info.step >= step
        state = load_shared(info)
        assert load_rank(info, 0) == {"step": info.step}
        assert set(state["w"].tolist()) == {info.step - state["first"] + 1}
        step = info.step + 1


class StopsAfter(MemoryStorage):
    """Dies after a number of bytes, like a killed process; a part of the file stays."""

    def __init__(self, budget: int) -> None:
        super().__init__()
        self.left = budget

    def write(self, path: str, data: Data) -> None:
        content = b"".join(pieces(data))
        fits = content[: max(self.left, 0)]
        self.left -= len(content)
        if fits:
            super().write(path, fits)
        if len(fits) < len(content):
            raise StorageError("stopped")


def test_every_prefix_of_the_writes_leaves_a_whole_checkpoint() -> None:
    state: dict[str, Any] = {"w": torch.arange(50)}
    storage = StopsAfter(10**9)
    manager = make(storage, keep=1)
    manager.save(1, state, {})
    manager.close()
    size = 10**9 - storage.left
    for budget in range(0, size, 97):
        storage = StopsAfter(size + budget)
        manager = make(storage, keep=1)
        manager.save(1, state, {})
        manager.save(2, state, {})
        with pytest.raises(StorageError, match="stopped"):
            manager.close()
        info = latest(storage, "run")
        assert info is not None and info.step == 1
