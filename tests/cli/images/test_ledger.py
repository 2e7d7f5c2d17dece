from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkdl.cli.images.ledger import Ledger, Record
from sparkdl.cli.images.parts import ImagePart
from sparkdl.errors import ConfigError
from sparkdl.storage.storage import LocalStorage
from tests.storage.memory import MemoryStorage

PLAN: dict[str, Any] = {
    "version": 1, "source": "s", "files": 4, "labels": ["a", "b"], "options": {"rows_per_file": 2}
}  # fmt: skip
ONE = ImagePart(split="train", number=0, rows=np.array([0, 1]))
TWO = ImagePart(split="test", number=0, rows=np.array([2, 3]))
RECORDS = {
    ONE.name: Record(rows=2, rows_by_label={"0": 1, "1": 1}),
    TWO.name: Record(rows=1, rows_by_label={"1": 1}, bad=(("a/3.png", "is broken"),)),
}


def other(**changes: Any) -> dict[str, Any]:
    return {**PLAN, **changes}


def test_a_run_begins_goes_on_and_ends() -> None:
    storage = MemoryStorage()
    ledger = Ledger(storage, PLAN)
    assert ledger.begin(overwrite=False) == "new"
    ledger.write(TWO, RECORDS[TWO.name])
    again = Ledger(storage, PLAN)
    assert again.begin(overwrite=False) == "unfinished"
    assert again.done() == {TWO.name: RECORDS[TWO.name]}
    again.write(ONE, RECORDS[ONE.name])
    report = again.finish(again.done(), [("gone.png", "absent")], ["a", "b"])
    assert report.rows == {"train": 2, "test": 1}
    assert report.rows_by_label == {"train": {"a": 1, "b": 1}, "test": {"a": 0, "b": 1}}
    assert report.bad == (("a/3.png", "is broken"), ("gone.png", "absent"))
    assert not storage.exists("_prepare")
    assert json.loads(storage.read("labels.json")) == ["a", "b"]
    lines = storage.read("bad_files.jsonl").decode().splitlines()
    assert json.loads(lines[0]) == {"path": "a/3.png", "reason": "is broken"}
    third = Ledger(storage, PLAN)
    assert third.begin(overwrite=True) == "finished"
    assert third.report() == report


def test_goes_on_whether_or_not_it_may_overwrite() -> None:
    storage = MemoryStorage()
    Ledger(storage, PLAN).begin(overwrite=True)
    Ledger(storage, PLAN).write(ONE, RECORDS[ONE.name])
    again = Ledger(storage, PLAN)
    assert again.begin(overwrite=True) == "unfinished"
    assert list(again.done()) == [ONE.name]


def test_a_record_that_is_not_whole_is_none() -> None:
    storage = MemoryStorage()
    ledger = Ledger(storage, PLAN)
    ledger.begin(overwrite=False)
    ledger.write(ONE, RECORDS[ONE.name])
    path = "_prepare/done/train-00000.json"
    storage.write(path, storage.read(path)[:-5])
    assert ledger.done() == {}


@pytest.mark.parametrize("is_finished", [False, True])
def test_another_run_is_refused_or_replaced(is_finished: bool) -> None:
    storage = MemoryStorage()
    ledger = Ledger(storage, PLAN)
    ledger.begin(overwrite=False)
    for part in (ONE, TWO):
        storage.write(part.path, b"rows")
        ledger.write(part, RECORDS[part.name])
    if is_finished:
        ledger.finish(RECORDS, [], ["a", "b"])
    changed = Ledger(storage, other(source="t", files=5))
    with pytest.raises(ConfigError, match=r"4 files before, 5 now.*--set output.overwrite=true"):
        changed.begin(overwrite=False)
    assert storage.exists(ONE.path)
    assert changed.begin(overwrite=True) == "new"
    assert storage.list("") == ["_prepare"]
    assert changed.done() == {}


class Dies(MemoryStorage):
    """Fails after so many changes."""

    def __init__(self, changes: int) -> None:
        super().__init__()
        self.left = changes

    def remove(self, path: str) -> None:
        self._count()
        super().remove(path)

    def write(self, path: str, data: Any) -> None:
        self._count()
        super().write(path, data)

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def test_replacing_may_be_interrupted_anywhere() -> None:
    interrupted = 0
    for changes in range(20):
        storage = Dies(1000)
        ledger = Ledger(storage, PLAN)
        ledger.begin(overwrite=False)
        for part in (ONE, TWO):
            storage.write(part.path, b"rows")
            ledger.write(part, RECORDS[part.name])
        ledger.finish(RECORDS, [], ["a", "b"])
        storage.left = changes
        try:
            Ledger(storage, other(source="t")).begin(overwrite=True)
        except KeyboardInterrupt:
            interrupted += 1
        storage.left = 1000
        # Whoever comes next, nothing is taken for done of which a file is missing.
        for plan in (PLAN, other(source="t")):
            following = Ledger(storage, plan)
            state = following.begin(overwrite=True)
            if state == "finished":
                assert storage.exists(ONE.path)
                assert storage.exists(TWO.path)
            else:
                done = following.done()
                assert all(storage.exists(p.path) for p in (ONE, TWO) if p.name in done)
    assert interrupted > 5


def test_finishing_may_be_interrupted_anywhere() -> None:
    for changes in range(6):
        storage = Dies(1000)
        ledger = Ledger(storage, PLAN)
        ledger.begin(overwrite=False)
        for part in (ONE, TWO):
            ledger.write(part, RECORDS[part.name])
        storage.left = changes
        try:
            ledger.finish(ledger.done(), [], ["a", "b"])
        except KeyboardInterrupt:
            storage.left = 1000
            again = Ledger(storage, PLAN)
            if again.begin(overwrite=False) == "unfinished":
                again.finish(again.done(), [], ["a", "b"])
        assert Ledger(storage, PLAN).report().rows == {"train": 2, "test": 1}
        assert storage.list("") == ["bad_files.jsonl", "labels.json", "prepare.json"]


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"dear")
    for plan in (PLAN, other(source="t")):
        with pytest.raises(ConfigError, match=r"other things \(holiday.jpg\); choose a new"):
            Ledger(LocalStorage(tmp_path), plan).begin(overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]
