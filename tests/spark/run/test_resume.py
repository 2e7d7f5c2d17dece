"""A fit goes on from its own checkpoints, but never from beyond its end."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from sparkdl.data.plan import HOMES, Shard, TrainPlan, make_plan
from sparkdl.data.shuffle_windows import WINDOWS, Windows
from sparkdl.data.source import Wanted
from sparkdl.errors import StorageError
from sparkdl.spark.fit import fit
from sparkdl.spark.frames import row_table
from sparkdl.spark.frames.row_table import SourceTable, TableSpec
from sparkdl.spark.run import resume
from sparkdl.spark.run.resume import (
    find_checkpoint,
    newest,
    table_to_go_on,
    windows_to_go_on,
)
from sparkdl.storage.checkpoint_format import (
    SHARED,
    CheckpointInfo,
    encode,
    rank_file,
    write_file,
    write_manifest,
)
from sparkdl.storage.lease import Lease
from sparkdl.storage.storage import LocalStorage, Storage, failure
from sparkdl.storage.tensor_tree import snapshot
from sparkdl.train.state import TrainState
from tests.storage.memory import MemoryStorage


def write(storage: Storage, state: TrainState, *, run_key: str = "run", shared: Any = None) -> None:
    path = f"{run_key}/a-0/step-{state.step:08d}"
    files = {}
    usual = {"state": state.state_dict()}
    for name, content in (
        (SHARED, encode(snapshot(usual if shared is None else shared))),
        (rank_file(0), encode(snapshot(usual))),
    ):
        files[name] = write_file(storage, f"{path}/{name}", content)
    write_manifest(
        CheckpointInfo(
            storage=storage, path=path, step=state.step, world_size=1, run_key=run_key,
            complete=False, environment={}, files=files,
        )
    )  # fmt: skip


def found(storage: MemoryStorage, *, epochs: int, max_steps: int = -1) -> int | None:
    plan = SimpleNamespace(end_epoch=epochs, end_step=max_steps)
    run: Any = SimpleNamespace(run_key="run", plan=plan)
    info = find_checkpoint(run, storage)
    return None if info is None else info.step


@pytest.mark.parametrize(
    ("epochs", "max_steps", "step"),
    [
        (9, -1, 20),
        (2, -1, 20),
        (1, -1, 10),
        (9, 20, 20),
        (9, 19, 15),
        (9, 9, None),
    ],
)
def test_a_shorter_fit_does_not_take_the_result_of_a_longer_one(
    epochs: int, max_steps: int, step: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    storage = MemoryStorage()
    write(storage, TrainState(epoch=1, step=10))
    write(storage, TrainState(epoch=1, step=15, step_in_epoch=5))
    write(storage, TrainState(epoch=2, step=20))
    assert found(storage, epochs=epochs, max_steps=max_steps) == step
    passed_over = "passed over run/a-0/step-00000020: this fit ends before step 20"
    assert (passed_over in caplog.text) == (step != 20)


@pytest.mark.parametrize(
    "shared", [[], 3, {}, {"state": 5}, {"state": {"a": 1}}, {"state": {"step": "x"}}]
)
def test_a_state_of_another_form_is_passed_over(
    shared: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its sums are right, as where somebody else has written it."""
    storage = MemoryStorage()
    write(storage, TrainState(epoch=1, step=10))
    write(storage, TrainState(epoch=2, step=20), shared=shared)
    assert found(storage, epochs=9) == 10
    assert "passed over run/a-0/step-00000020" in caplog.text


def test_what_lies_beside_is_told(caplog: pytest.LogCaptureFixture) -> None:
    storage = MemoryStorage()
    storage.write("initial.safetensors", b"")
    with caplog.at_level(logging.INFO):
        assert found(storage, epochs=1) is None
        assert caplog.text == ""
        write(storage, TrainState(epoch=1, step=10), run_key="other")
        assert found(storage, epochs=1) is None
    assert "memory holds checkpoints of other runs, but none of these rows, module" in caplog.text


SMALL = Windows(group_rows=3, groups_together=4)


def resumed(storage: MemoryStorage | None) -> Windows | None:
    return windows_to_go_on(storage, "0123456789abcdef", lambda: SMALL)


def note(storage: MemoryStorage, step: int, environment: dict[str, str]) -> None:
    path = f"0123456789abcdef/a-0/step-{step:08d}"
    write_manifest(
        CheckpointInfo(
            storage=storage, path=path, step=step, world_size=1, run_key="0123456789abcdef",
            complete=False, environment=environment, files={},
        )
    )  # fmt: skip


def test_the_newest_checkpoint_that_says_so_decides() -> None:
    storage = MemoryStorage()
    assert resumed(None) == resumed(storage) == SMALL
    note(storage, 5, {WINDOWS: "7x8"})
    assert resumed(storage) == Windows(group_rows=7, groups_together=8)
    note(storage, 10, {WINDOWS: "whole"})
    assert resumed(storage) is None
    note(storage, 15, {WINDOWS: "damaged"})
    assert resumed(storage) is None
    note(storage, 20, {})  # of an older version
    assert resumed(storage) == SMALL


def test_shards_stay_those_of_the_newest_checkpoint() -> None:
    storage, key = MemoryStorage(), "0123456789abcdef"
    table: Any = SimpleNamespace(homes="[[0,1],[]]", dealt_by=lambda homes: f"dealt by {homes}")
    for place in (None, storage):
        assert table_to_go_on(place, key, table) is table
    note(storage, 5, {HOMES: "[[1,0],[]]"})
    storage.write(f"{key}/a-0/step-00000007/manifest.json", b"half")
    assert table_to_go_on(storage, key, table) == "dealt by [[1,0],[]]"
    anywhere: Any = SimpleNamespace(homes=None)
    assert table_to_go_on(storage, key, anywhere) is anywhere
    note(storage, 10, {HOMES: table.homes})
    assert table_to_go_on(storage, key, table) is table
    note(storage, 20, {})  # of an older version
    assert table_to_go_on(storage, key, table) is table


def test_the_plan_of_a_fit_notes_by_which_homes_its_table_is_dealt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shard = Shard(shard_id=0, num_rows=4, num_validation_rows=0, fingerprint="f")

    def contents(wanted: Wanted) -> Any:
        return SimpleNamespace(homes=wanted.homes or "as they lie now", shards=(shard,))

    def plan_of(columns: Any, shards: Any) -> TrainPlan:
        return make_plan(columns=columns, shards=shards, world_size=1, batch_size=4, epochs=1)

    for name in ("frame_of", "_spooled"):
        monkeypatch.setattr(row_table, name, lambda *_: ())
    monkeypatch.setattr(fit.check_rows, "check_plan", lambda *_, **__: None)
    monkeypatch.setattr(SourceTable, "windows", lambda *_: None)
    anything: Any = MagicMock(make_plan=plan_of)
    anything.request.validation = None
    anything.columns, anything.checkpoints = [], None
    source: Any = SimpleNamespace(contents=contents)
    table = SourceTable(anything, source, TableSpec(columns=(), num_shards=1))
    table.collect()
    for own, homes in ((table, "as they lie now"), (table.dealt_by("as before"), "as before")):
        part: Any = SimpleNamespace(shard=shard)
        rows = fit.MadeRows(anything, own, [part], anything, num_skipped=0)
        plan = fit.plan_run(rows, anything, "key")
        assert plan.notes()[HOMES] == homes
    assert HOMES not in replace(plan, homes=None).notes()


class Unsteady(MemoryStorage):
    """Does not answer a number of requests, or never reads some files."""

    def __init__(self) -> None:
        super().__init__()
        self.num_failures = 0
        self.unread = "nothing"

    def _ask(self, path: str) -> None:
        self.num_failures -= 1
        if self.num_failures >= 0 or self.unread in path:
            cause = OSError("503 Slow Down")
            raise failure("ask", path, cause) from cause

    def list(self, path: str) -> list[str]:
        self._ask(path)
        return super().list(path)

    def read(self, path: str) -> bytes:
        self._ask(path)
        return super().read(path)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those that were made; time passes in them only."""
    made: list[float] = []
    clock = SimpleNamespace(sleep=made.append, monotonic=lambda: sum(made))
    monkeypatch.setattr(resume, "time", clock)
    return made


def test_a_storage_that_does_not_answer_is_asked_again(
    pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    storage = Unsteady()
    write(storage, TrainState(epoch=1, step=10))
    storage.num_failures = 5
    assert found(storage, epochs=9) == 10
    assert pauses == [1, 3, 10, 10, 10]
    assert caplog.text.count("503 Slow Down") == 5
    assert "training waits, and tries again in 10 s" in caplog.text
    storage.num_failures = 10**6
    with pytest.raises(StorageError, match="503"):
        found(storage, epochs=9)
    assert sum(pauses) > 300


def test_a_checkpoint_that_stays_unreadable_is_passed_over(
    pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    storage = Unsteady()
    for step in (10, 20):
        write(storage, TrainState(epoch=1, step=step))
    storage.unread = "step-00000020"
    assert found(storage, epochs=9) == 10
    assert sum(pauses) > 250
    assert "looking for an older checkpoint" in caplog.text


class Mount:
    """A folder whose file system goes away, and leaves an empty mount point, and comes back."""

    def __init__(self, root: Path) -> None:
        self.storage = LocalStorage(root)
        self._root, self._aside = root, root.with_name("aside")

    def go(self) -> None:
        self._root.rename(self._aside)
        self._root.mkdir()

    def come(self) -> None:
        shutil.rmtree(self._root)
        self._aside.rename(self._root)


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    mount = Mount(tmp_path / "mounted")
    write(mount.storage, TrainState(epoch=1, step=10))
    return mount


def test_a_mount_that_has_gone_is_waited_for_and_not_taken_for_an_empty_folder(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[float] = []

    def sleep(seconds: float) -> None:
        made.append(seconds)
        if len(made) == 3:
            mount.come()

    monkeypatch.setattr(resume, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: sum(made)))
    with Lease(mount.storage, "run", "b") as lease:
        mount.go()
        assert newest(mount.storage, "run") is None  # another run cannot know
        info = newest(mount.storage, "run", lease=lease)
        assert info is not None and info.step == 10
    assert len(made) == 3
    assert "has lost run/lease-b.json, which this run has written there" in caplog.text
    assert "training waits, and tries again in 1 s" in caplog.text


def test_a_mount_that_does_not_come_back_ends_the_fit(mount: Mount, pauses: list[float]) -> None:
    with Lease(mount.storage, "run", "b") as lease:
        mount.go()
        with pytest.raises(StorageError, match=r"has lost run/lease-b.json.* bring it back"):
            newest(mount.storage, "run", lease=lease)
    assert sum(pauses) > 250


def test_what_is_written_after_the_loss_is_gone_on_from(mount: Mount) -> None:
    with Lease(mount.storage, "run", "b") as lease:
        mount.go()
        write(mount.storage, TrainState(epoch=2, step=20))
        info = newest(mount.storage, "run", lease=lease)
        assert info is not None and info.step == 20


def test_what_workers_could_not_read_is_taken_only_if_there_is_no_other() -> None:
    storage = MemoryStorage()
    paths = []
    for step in (10, 20):
        write(storage, TrainState(epoch=1, step=step))
        paths.append(f"run/a-0/step-000000{step}")

    def step_without(*passed_over: str) -> int:
        info = newest(storage, "run", passed_over=passed_over)
        assert info is not None
        return info.step

    assert step_without() == 20
    assert step_without(paths[1]) == 10
    assert step_without(*paths) == 20
