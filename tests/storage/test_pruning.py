"""What is removed is nobody's any more, however runs and their requests are interleaved."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sparkdl.comm.channel import Hub
from sparkdl.config import CheckpointConfig
from sparkdl.errors import StorageError
from sparkdl.storage.checkpoint_format import (
    MANIFEST,
    SHARED,
    StepFolder,
    Writer,
    folders,
    latest,
    load_shared,
)
from sparkdl.storage.checkpoint_writer import CheckpointManager
from sparkdl.storage.lease import STALE_SECONDS, Lease, lease_name
from sparkdl.storage.pruning import prune, surplus
from sparkdl.storage.storage import Data, LocalStorage, Storage
from tests.storage.memory import MemoryStorage


def step(run_id: str, attempt: int, number: int, *, is_final: bool = False) -> StepFolder:
    writer = Writer(run_key="run", run_id=run_id, attempt=attempt)
    return StepFolder(writer=writer, step=number, is_final=is_final)


def test_as_many_stay_as_were_asked_for_whatever_lies_there() -> None:
    random = Random(3)
    for _ in range(3000):
        candidates = {
            step(random.choice("ab"), random.randrange(2), random.randrange(1, 8),
                 is_final=random.random() < 0.2)
            for _ in range(random.randrange(10))
        }  # fmt: skip
        newest = step("a", 1, random.randrange(1, 8))
        candidates.add(newest)
        whole = {one for one in candidates if random.random() < 0.7} | {newest}
        used = {one.path for one in candidates if random.random() < 0.1}
        keep = random.randrange(1, 10)
        gone = set(surplus(candidates, newest, keep, whole.__contains__, used))
        older = {one for one in candidates if one.age <= newest.age}
        left = whole & older - gone
        assert newest in left and gone <= older
        free = {one for one in left if one.path not in used or one == newest}
        assert len(free) == min(keep, len({o for o in whole & older if o.path not in used} | free))
        assert not {one.path for one in gone} & used
        # No wreck stays, and of the run's own only the newest.
        assert {one for one in older - gone if one.path not in used} <= whole
        own_gone = [one.age for one in gone & whole if one.writer.run_id == "a"]
        own_left = [one.age for one in free if one.writer.run_id == "a"]
        assert not own_gone or max(own_gone) <= min(own_left)


def put(storage: Storage, folder: StepFolder) -> StepFolder:
    for name in (SHARED, MANIFEST):
        storage.write(f"{folder.path}/{name}", b"")
    return folder


def paths(storage: Storage) -> list[str]:
    return [folder.path for folder in folders(storage, "run")]


def test_what_belongs_to_a_living_run_stays_until_it_has_ended() -> None:
    storage = MemoryStorage()
    theirs = [put(storage, step("b", 0, number)).path for number in (1, 2, 3)]
    own = put(storage, step("a", 0, 3))
    with Lease(storage, "run", "b"):
        prune(storage, own, 1)
        assert set(paths(storage)) == {*theirs, own.path}
    prune(storage, own, 1)
    assert paths(storage) == [own.path]
    assert storage.list("run") == ["a-0"]


def test_folders_of_others_with_such_a_name_stay() -> None:
    storage = MemoryStorage()
    storage.write("run/backup-1/weights.pt", b"mine")
    prune(storage, put(storage, step("a", 0, 3)), 1)
    assert storage.read("run/backup-1/weights.pt") == b"mine"


def test_what_others_have_put_between_checkpoints_holds_up_nothing(tmp_path: Path) -> None:
    """Links that lead back to themselves or nowhere, and files in place of folders."""
    storage = LocalStorage(tmp_path / "all")
    for run_id in ("old", "run"):
        for number in (1, 2, 3):
            for name in (MANIFEST, SHARED):
                storage.write(f"{step(run_id, 0, number).path}/{name}", b"{}")
    key, elsewhere = tmp_path / "all" / "run", tmp_path / "elsewhere" / "step-00000001"
    (elsewhere / MANIFEST).parent.mkdir(parents=True)
    (key / "aa-0").symlink_to("aa-0")
    (key / "bb-0").symlink_to("n" * 300)
    (key / "cc-0").symlink_to(elsewhere.parent)
    (key / "dd-0").mkdir()
    (key / "dd-0" / "step-00000001").write_text("no folder")
    (key / lease_name("ee")).symlink_to(lease_name("ee"))
    assert [folder.step for folder in folders(storage, "run")] == [1, 1, 1, 1, 2, 2, 3, 3]
    assert latest(storage, "run") is None  # none can be read, and none is waited for
    with pytest.raises(StorageError, match="cannot remove"):  # which is a warning, see its caller
        prune(storage, step("run", 0, 3), 2)
    left = [folder.path for folder in folders(storage, "run")]
    assert [path for path in left if "/old-" in path or "/run-" in path] == [
        step("run", 0, 2).path,
        step("run", 0, 3).path,
    ]
    assert elsewhere.is_dir()


def test_what_is_ahead_stays() -> None:
    storage = MemoryStorage()
    ahead = [put(storage, step("b", 0, 9)), put(storage, step("a", 0, 8))]
    own = put(storage, step("a", 1, 3))
    prune(storage, own, 1)
    assert paths(storage) == [own.path, ahead[1].path, ahead[0].path]


def test_an_attempt_that_was_given_up_removes_nothing() -> None:
    storage = MemoryStorage()
    needed, newest = put(storage, step("a", 0, 1)), put(storage, step("a", 0, 2))
    with Lease(storage, "run", "a") as lease:
        lease.begin(1, needed.path)
        prune(storage, newest, 1)
        assert paths(storage) == [needed.path, newest.path]


def test_what_a_living_run_began_from_stays() -> None:
    storage = MemoryStorage()
    needed, newest = put(storage, step("a", 0, 1)), put(storage, step("a", 0, 2))
    with Lease(storage, "run", "b") as lease:
        lease.begin(0, needed.path)
        prune(storage, newest, 1)
        assert paths(storage) == [needed.path, newest.path]
    prune(storage, newest, 1)
    assert paths(storage) == [newest.path]


def test_a_run_whose_lease_is_old_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    put(storage, step("b", 0, 1))
    own = put(storage, step("a", 0, 2))
    with Lease(storage, "run", "b"):
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + STALE_SECONDS + 1)
        prune(storage, own, 1)
    assert storage.list("run") == ["a-0"]


class Turns:
    """Lets one of several runs at a time do one request, as a random number says."""

    def __init__(self, seed: int, names: list[str]) -> None:
        self._random = Random(seed)
        self._names = names
        self._changed = threading.Condition()
        self._next = self._random.choice(names)

    def take(self, name: str, act: Callable[[], Any]) -> Any:
        with self._changed:
            assert self._changed.wait_for(lambda: self._next == name, 20)
            try:
                return act()
            finally:
                self._pass_on()

    def leave(self, name: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._next == name, 20)
            self._names.remove(name)
            self._pass_on()

    def _pass_on(self) -> None:
        if self._names:
            self._next = self._random.choice(self._names)
            self._changed.notify_all()


class InTurn:
    """One place, seen by one of several runs."""

    def __init__(self, storage: Storage, turns: Turns, name: str) -> None:
        self._storage, self._turns, self._name = storage, turns, name

    def write(self, path: str, data: Data) -> None:
        self._turns.take(self._name, lambda: self._storage.write(path, data))

    def read(self, path: str) -> bytes:
        return bytes(self._turns.take(self._name, lambda: self._storage.read(path)))

    def list(self, path: str) -> list[str]:
        return list(self._turns.take(self._name, lambda: self._storage.list(path)))

    def remove(self, path: str) -> None:
        self._turns.take(self._name, lambda: self._storage.remove(path))

    def exists(self, path: str) -> bool:
        return bool(self._turns.take(self._name, lambda: self._storage.exists(path)))


KEEP = 2


def train(storage: Storage, run_id: str, seed: int, ends: int) -> None:
    """A run that is lost now and then, goes on from the newest of its key, and comes to its end.

    After each checkpoint the newest ones of this living run must be there.
    """
    random = Random(f"{seed}{run_id}")
    attempt, reached = 0, 0
    with Lease(storage, "run", run_id) as lease:
        while reached < ends:
            found = latest(storage, "run", lambda shared: shared["step"] <= ends)
            begun = 0 if found is None else found.step
            assert begun >= reached or attempt == 0, "what was whole has been lost"
            lease.begin(attempt, None if found is None else found.path)
            manager = CheckpointManager(
                storage,
                CheckpointConfig(keep=KEEP, interval=1),
                writer=Writer(run_key="run", run_id=run_id, attempt=attempt),
                rank=0, world_size=1, environment={}, signal=Hub(), pauses=(),
            )  # fmt: skip
            written = []
            for number in range(begun + 1, begun + 1 + random.randrange(1, 4)):
                if number > ends:
                    break
                manager.save(number, {"step": number}, {})
                manager.close()
                written.append(f"{manager_path(run_id, attempt)}/step-{number:08d}/{MANIFEST}")
                assert all(storage.exists(path) for path in written[-KEEP:])
                reached = number
            reached = max(reached, begun)
            attempt += 1


def manager_path(run_id: str, attempt: int) -> str:
    return Writer(run_key="run", run_id=run_id, attempt=attempt).path


@pytest.mark.parametrize("seed", range(12))
def test_two_runs_of_one_key_never_harm_each_other(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    storage, names = MemoryStorage(), ["a", "b"]
    turns = Turns(seed, list(names))
    failures: list[BaseException] = []

    def work(name: str, ends: int) -> None:
        try:
            train(InTurn(storage, turns, name), name, seed, ends)
        except BaseException as error:
            failures.append(error)
        finally:
            turns.leave(name)

    threads = [threading.Thread(target=work, args=(name, 7 + 3 * (name == "b"))) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    assert "there is no checkpoint" not in caplog.text
    assert "could not be removed" not in caplog.text
    found = latest(storage, "run")
    assert found is not None and load_shared(found) == {"step": 10}
    assert not any(name == lease_name(run) for name in storage.list("run") for run in names)
    # The next run removes what both have left.
    train(storage, "c", seed, 13)
    assert {folder.writer.run_id for folder in folders(storage, "run")} == {"c"}
    assert len(folders(storage, "run")) == KEEP
