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
from sparkdl.storage.checkpoint_format import (
    MANIFEST,
    Writer,
    folders,
    latest,
    load_rank,
    load_shared,
    read_manifest,
)
from sparkdl.storage.checkpoint_writer import MAX_FAILURES, CheckpointManager
from sparkdl.storage.lease import Lease
from sparkdl.storage.retried import Retried
from sparkdl.storage.storage import Data, LocalStorage, Storage, failure, pieces
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

    def delete(self, key: str) -> bool:
        return self._keys.pop(key, None) is not None

    def __len__(self) -> int:
        return len(self._keys)


def make(
    storage: Storage,
    *,
    keys: Keys | None = None,
    rank: int = 0,
    world_size: int = 1,
    keep: int = 2,
    interval: int = 1,
    timeout: float = 10.0,
    run_id: str = "a",
    attempt: int = 0,
    is_required: bool = True,
    copies: bool = True,
    pauses: Sequence[float] = (),
) -> CheckpointManager:
    return CheckpointManager(
        storage,
        CheckpointConfig(keep=keep, interval=interval),
        rank=rank,
        world_size=world_size,
        writer=Writer(run_key="run", run_id=run_id, attempt=attempt),
        environment={"torch": torch.__version__},
        signal=Keys() if keys is None else keys,
        timeout_seconds=timeout,
        is_required=is_required,
        copies=copies,
        pauses=pauses,
    )


def steps(storage: Storage) -> list[int]:
    """Those of all folders, whole or not."""
    return [folder.step for folder in folders(storage, "run")]


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
    assert storage.list("run/a-0") == ["step-00000004", "step-00000005"]
    assert len(keys) == 1  # not those of each checkpoint


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


def test_without_copies_a_save_returns_when_the_state_is_written() -> None:
    storage, weights = SlowStorage(), torch.ones(1000)
    manager = make(storage, copies=False)
    threading.Timer(0.3, storage.go.set).start()
    manager.save(1, {"w": weights}, {"turned": torch.ones(2, 3).t()})
    weights.zero_()
    assert manager._shared is not None and manager._own is not None
    assert all(kept.data_ptr() == weights.data_ptr() for kept in manager._shared.tensors.values())
    assert manager.stall_seconds > 0.2
    info = latest(storage, "run")
    assert info is not None and load_shared(info)["w"].tolist() == [1] * 1000
    assert load_rank(info, 0)["turned"].tolist() == [[1, 1]] * 3


def test_without_copies_a_save_that_hangs_tells_nothing_that_changes_meanwhile() -> None:
    storage, keys, weights = SlowStorage(), Keys(), torch.ones(10)
    manager = make(storage, keys=keys, rank=1, world_size=2, timeout=0.1, copies=False)
    manager.save(1, None, {"w": weights})
    weights.zero_()
    storage.go.set()
    wait_until(lambda: not any(t.name.startswith("write-") for t in threading.enumerate()))
    assert len(keys) == 0


def test_the_last_checkpoint_is_not_copied() -> None:
    storage, weights = MemoryStorage(), torch.ones(10)
    manager = make(storage)
    manager.final(1, {"w": weights}, {})
    assert manager._shared is not None
    assert manager._shared.tensors["w"].data_ptr() == weights.data_ptr()


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


@pytest.mark.parametrize("keep", [1, 3, 4, 6])
def test_the_newest_are_kept_and_older_wrecks_removed(keep: int) -> None:
    storage = MemoryStorage()
    storage.write("run/b-0/step-00000001/rank-00000.safetensors", b"wreck")
    storage.write("run/notes", b"not ours")
    manager = make(storage, keep=keep)
    for step in range(2, 7):
        manager.save(step, {}, {})
    manager.close()
    assert steps(storage) == list(range(max(2, 7 - keep), 7))
    assert storage.list("run") == ["a-0", "notes"]


def test_a_wreck_does_not_count_as_one_of_the_kept() -> None:
    storage = MemoryStorage()
    manager = make(storage, keep=2)
    manager.save(1, {}, {})
    manager.close()
    storage.write("run/a-0/step-00000002/shared.safetensors", b"wreck")
    manager.save(3, {}, {})
    manager.close()
    assert steps(storage) == [1, 3]


def test_training_outlives_a_checkpoint_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    storage = FullStorage(lambda path: "step-00000002" in path)
    manager = make(storage)
    manager.save(1, {}, {})
    manager.save(2, {}, {})
    manager.close()
    assert "there is no checkpoint run/a-0/step-00000002: cannot write run/a-0" in caplog.text
    info = latest(storage, "run")
    assert info is not None and info.step == 1
    manager.save(3, {}, {})
    manager.close()
    assert steps(storage) == [1, 3]


@pytest.mark.parametrize("is_required", [True, False])
def test_a_place_that_is_of_no_use_ends_training_where_the_user_has_chosen_it(
    *, is_required: bool, caplog: pytest.LogCaptureFixture
) -> None:
    storage = FullStorage(lambda path: "rank-0" in path)
    manager = make(storage, is_required=is_required)
    for step in range(1, MAX_FAILURES + 1):
        manager.save(step, {}, {})
    if is_required:
        with pytest.raises(StorageError, match=r"5 checkpoints in a row .* memory; .*full"):
            manager.save(9, {}, {})
    else:
        manager.save(9, {}, {})
    assert caplog.text.count("there is no checkpoint") == MAX_FAILURES


def test_a_save_that_finds_no_space_leaves_nothing_that_takes_some() -> None:
    class Small(MemoryStorage):
        """Has room for 3300 bytes."""

        def write(self, path: str, data: Data) -> None:
            held = sum(map(len, self._files.values()))
            found = b"".join(map(bytes, pieces(data)))
            if held + len(found) > 3300:
                full = OSError(errno.ENOSPC, "No space left on device")
                raise failure("write", path, full) from full
            super().write(path, found)

    storage = Small()
    with make(storage) as manager:
        for step, size in ((1, 1000), (2, 250)):  # the first finds room for its rank's file only
            manager.save(step, {"w": torch.zeros(size)}, {"r": torch.zeros(250)})
    assert steps(storage) == [2]
    found = latest(storage, "run")
    assert found is not None and found.step == 2


def test_failures_are_counted_anew_after_a_success() -> None:
    storage = FullStorage(lambda path: "-00000005/" not in path)
    manager = make(storage)
    for step in range(1, 10):
        manager.save(step, {}, {})
    manager.close()
    assert latest(storage, "run").step == 5  # type: ignore[union-attr]


def test_a_finished_run_is_not_lost_for_its_last_checkpoint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = make(FullStorage(lambda path: True))
    for step in range(1, MAX_FAILURES):
        manager.save(step, {}, {})
    manager.final(9, {}, {})
    assert "there is no checkpoint run/a-0/step-00000009-final" in caplog.text
    manager.final(9, {"function": print}, {})
    assert "the last checkpoint is missing" in caplog.text


def test_the_way_that_is_lost_too_often_is_for_a_restart() -> None:
    class Lost(MemoryStorage):
        def write(self, path: str, data: Data) -> None:
            raise CommunicationError("nobody there")

    manager = make(Lost(), is_required=False)
    for step in range(1, MAX_FAILURES + 1):
        manager.save(step, {}, {})
    with pytest.raises(CommunicationError, match="nobody there"):
        manager.save(9, {}, {})


def test_rank_0_hears_at_once_that_another_rank_could_not_write(
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage, keys = FullStorage(lambda path: "rank-00001" in path), Keys()
    managers = [make(storage, keys=keys, rank=rank, world_size=2, timeout=30) for rank in (0, 1)]
    began = time.monotonic()
    for manager in managers:
        manager.save(1, {}, {})
    for manager in managers:
        manager.close()
    assert "rank 1 could not write step-00000001: " in caplog.text
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
    for step in range(1, MAX_FAILURES + 1):
        for manager in managers:
            manager.save(step, {}, {})
    for manager in managers:
        with pytest.raises(CommunicationError, match="nobody there"):
            manager.save(9, {}, {})


def test_a_rank_that_never_writes_does_not_hang_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    storage = MemoryStorage()
    manager = make(storage, world_size=2, timeout=0.3)
    manager.save(1, {}, {})
    time.sleep(0.4)
    manager.close()
    assert "not all 2 ranks had written step-00000001" in caplog.text
    assert latest(storage, "run") is None


def test_a_storage_that_hangs_does_not_hang_training(caplog: pytest.LogCaptureFixture) -> None:
    storage = SlowStorage()
    manager = make(storage, timeout=1.0)
    weights = torch.ones(10)
    manager.save(1, {"w": weights}, {})
    weights += 1
    manager.save(2, {"w": weights}, {})
    began = time.monotonic()
    manager.save(3, {"w": weights}, {})  # does not wait for the first one again
    assert time.monotonic() - began < 0.9
    assert "took more than 1 s; raise checkpointInterval" in caplog.text
    assert "step-00000003: step-00000001 is still being written to memory" in caplog.text
    assert storage.list("") == []
    storage.go.set()
    wait_until(lambda: not any(t.name.startswith("write-") for t in threading.enumerate()))
    # What it was still writing has the weights of its step, and is none of the whole ones.
    manager.save(4, {"w": weights}, {})
    manager.close()
    assert steps(storage) == [4]
    info = latest(storage, "run")
    assert info is not None and load_shared(info)["w"].tolist() == [2] * 10


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_whose_storage_hangs_says_so_to_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    storage, slow, keys = MemoryStorage(), SlowStorage(), Keys()
    first = make(storage, keys=keys, world_size=2, timeout=20)
    second = make(slow, keys=keys, rank=1, world_size=2, timeout=0.1)
    second.save(1, {}, {})
    second.save(2, {}, {})
    began = time.monotonic()
    first.save(2, {}, {})
    first.close()
    assert time.monotonic() - began < 5
    assert "rank 1 could not write step-00000002: step-00000001 is still being" in caplog.text
    slow.go.set()


class LossyKeys(Keys):
    """Loses the first request of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[str] = set()

    def lose_first(self, kind: str) -> None:
        if kind not in self.lost:
            self.lost.add(kind)
            raise CommunicationError("connection reset by peer")

    def set(self, key: str, value: bytes) -> None:
        self.lose_first("set")
        super().set(key, value)

    def get(self, key: str) -> bytes | None:
        self.lose_first("get")
        return super().get(key)

    def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        self.lose_first("wait")
        super().wait(keys, timeout_seconds)

    def delete(self, key: str) -> bool:
        self.lose_first("delete")
        return super().delete(key)


def test_what_gets_lost_between_the_ranks_is_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rank 0 has waited for ten minutes for a word that was lost once."""
    storage, keys = MemoryStorage(), LossyKeys()
    managers = [
        make(storage, keys=keys, rank=rank, world_size=2, timeout=5, pauses=(0.01,))
        for rank in (1, 0)
    ]
    for step in (1, 2):
        for manager in managers:
            manager.save(step, {}, {})
    for manager in managers:
        manager.close()
    assert keys.lost == {"set", "get", "wait", "delete"}
    info = latest(storage, "run")
    assert info is not None and info.step == 2
    assert "there is no checkpoint" not in caplog.text


def test_abort_returns_at_once_and_makes_no_checkpoint() -> None:
    storage = SlowStorage()
    manager = make(storage)
    manager.save(1, {}, {})
    assert storage.writing.wait(5)
    began = time.monotonic()
    manager.close(abort=True)
    assert time.monotonic() - began < 5
    storage.go.set()
    manager.close()
    assert latest(storage, "run") is None


def test_what_cannot_be_stored_is_refused_on_the_training_thread() -> None:
    manager = make(MemoryStorage())
    with pytest.raises(CheckpointError, match=r"scheduler.*builtins.function"):
        manager.save(1, {"scheduler": lambda: None}, {})


KILLED = """
import sys, torch
from sparkdl.storage.checkpoint_format import Writer
from sparkdl.storage.checkpoint_writer import CheckpointManager
from sparkdl.storage.storage import LocalStorage
from sparkdl.config import CheckpointConfig

class Keys(dict):
    def set(self, key, value): self[key] = value
    def wait(self, keys, timeout_seconds): assert all(key in self for key in keys)

manager = CheckpointManager(
    LocalStorage(sys.argv[1]), CheckpointConfig(keep=1), rank=0, world_size=1,
    writer=Writer(run_key="run", run_id="a", attempt=0), environment={}, signal=Keys())
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
    for seconds in (0.0, 0.03):
        command = [sys.executable, "-c", KILLED, str(tmp_path), str(step)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"going\n"
            time.sleep(seconds)
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


def test_every_prefix_of_the_writes_leaves_a_whole_checkpoint(
    caplog: pytest.LogCaptureFixture,
) -> None:
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
        caplog.clear()
        manager.close()
        assert "stopped" in caplog.text
        info = latest(storage, "run")
        assert info is not None and info.step == 1


class Counting(MemoryStorage):
    """Something happens at the request of a given number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.num_requests = 0

    def happen(self) -> None:
        raise NotImplementedError

    def _count(self) -> None:
        self.num_requests += 1
        if self.num_requests - 1 == self.number:
            self.happen()

    def write(self, path: str, data: Data) -> None:
        content = b"".join(pieces(data))  # so that a test sees whether they are made anew
        self._count()
        super().write(path, content)

    def read(self, path: str) -> bytes:
        self._count()
        return super().read(path)

    def list(self, path: str) -> list[str]:
        self._count()
        return super().list(path)

    def remove(self, path: str) -> None:
        self._count()
        super().remove(path)

    def exists(self, path: str) -> bool:
        self._count()
        return super().exists(path)


class FailsAt(Counting):
    """One request fails, as a busy server has it."""

    def happen(self) -> None:
        cause = OSError(errno.EIO, "503 Slow Down")
        raise failure("ask", "memory", cause) from cause


def small_run(storage: Storage, *, attempt: int = 0, first: int = 1) -> None:
    """Four checkpoints and the last one."""
    manager = make(storage, attempt=attempt)
    for step in range(first, first + 4):
        manager.save(step, {"step": step}, {"rank": step})
    manager.final(first + 4, {"step": first + 4}, {"rank": first + 4})


def content(storage: MemoryStorage) -> dict[str, bytes]:
    names = [f"{f.path}/{name}" for f in folders(storage, "run") for name in storage.list(f.path)]
    return {name: storage.read(name) for name in names}


def num_requests() -> int:
    storage = FailsAt(-1)
    small_run(storage)
    return storage.num_requests


def test_whichever_request_fails_the_run_ends_and_can_be_resumed() -> None:
    total = num_requests()
    assert total > 30
    for number in range(total):
        storage = FailsAt(number)
        small_run(storage)
        storage.number = -1
        found = latest(storage, "run")
        assert found is not None, number
        assert found.step >= 4  # at most the last one is missing
        assert load_shared(found) == {"step": found.step}
        small_run(storage, attempt=1, first=6)  # and removes what the first one has left
        assert steps(storage) == [9, 10], number


def test_whichever_request_fails_it_is_tried_again_and_nothing_is_missing() -> None:
    undisturbed = MemoryStorage()
    small_run(undisturbed)
    for number in range(num_requests()):
        storage = FailsAt(number)
        manager = CheckpointManager(
            Retried(storage, (0.0,)),
            CheckpointConfig(keep=2, interval=1),
            rank=0,
            world_size=1,
            writer=Writer(run_key="run", run_id="a", attempt=0),
            environment={"torch": torch.__version__},
            signal=Keys(),
            pauses=(0.0,),
        )
        for step in range(1, 5):
            manager.save(step, {"step": step}, {"rank": step})
        manager.final(5, {"step": 5}, {"rank": 5})
        storage.number = -1
        assert content(storage) == content(undisturbed), number


def test_whichever_request_fails_while_looking_for_the_newest() -> None:
    storage = FailsAt(-1)
    small_run(storage)
    before = storage.num_requests
    whole = latest(storage, "run")
    for number in range(storage.num_requests - before):
        storage.num_requests, storage.number = 0, number
        assert latest(Retried(storage, (0.0,)), "run").path == whole.path  # type: ignore[union-attr]
        storage.num_requests = 0
        with pytest.raises(StorageError, match="503"):
            latest(storage, "run")


class Vanishes(Counting):
    """All of it is gone."""

    def happen(self) -> None:
        self._files.clear()


def test_a_folder_that_vanishes_at_whichever_request_ends_no_run() -> None:
    def run(storage: Storage) -> None:
        with Lease(storage, "run", "a") as lease:
            lease.begin(0, None)
            small_run(storage)

    undisturbed = Vanishes(-1)
    run(undisturbed)
    for number in range(undisturbed.num_requests):
        storage = Vanishes(number)
        run(storage)
        found = latest(storage, "run")
        assert number >= 15 or found is not None, number
        assert found is None or load_shared(found) == {"step": found.step}


def test_a_manifest_is_tried_as_often_as_the_storage_does() -> None:
    class Refuses(MemoryStorage):
        num_tries = 0

        def write(self, path: str, data: Data) -> None:
            if path.endswith(MANIFEST):
                self.num_tries += 1
                cause = OSError(errno.EIO, "503 Slow Down")
                raise failure("write", path, cause) from cause
            super().write(path, data)

    storage = Refuses()
    config = CheckpointConfig(keep=2, interval=1)
    with CheckpointManager(
        Retried(storage, (0.0, 0.0)), config, rank=0, world_size=1, pauses=(0.0, 0.0),
        writer=Writer(run_key="run", run_id="a", attempt=0), environment={}, signal=Keys(),
    ) as manager:  # fmt: skip
        manager.save(1, {}, {})
    assert storage.num_tries == 3


def test_a_failure_to_remove_is_no_failure_of_the_checkpoint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Keeps(MemoryStorage):
        def remove(self, path: str) -> None:
            raise StorageError("read-only for some")

    storage = Keeps()
    manager = make(storage, keep=1)
    for step in range(1, MAX_FAILURES + 3):
        manager.save(step, {}, {})
    manager.close()
    assert len(steps(storage)) == MAX_FAILURES + 2
    assert "older checkpoints could not be removed: read-only for some" in caplog.text


def test_a_late_writer_of_an_earlier_attempt_harms_no_later_one() -> None:
    storage, slow = MemoryStorage(), SlowStorage()
    slow._files, slow._lock = storage._files, storage._lock  # one place, seen by a slow host
    late = make(slow)
    late.save(2, {"by": 0}, {})
    later = make(storage, attempt=1)
    later.save(2, {"by": 1}, {})
    later.close()
    slow.go.set()
    late.close()
    written = [load_shared(read_manifest(storage, f.path)) for f in folders(storage, "run")]
    assert written == [{"by": 0}, {"by": 1}]
