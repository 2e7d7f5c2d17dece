from __future__ import annotations

import json
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkdl.errors import StorageError
from sparkdl.report.page.report_page import page
from sparkdl.report.page.run_list import run_list
from sparkdl.report.record.run_folder import (
    PAGE,
    RECORD,
    RunFolder,
    RunReader,
    folder_name,
    read_runs,
)
from sparkdl.storage.storage import LocalStorage
from tests.report.runs import events, record


def begun(storage: LocalStorage, name: str, **changes: Any) -> RunFolder:
    """A run that has just told that it is alive."""
    folder = RunFolder(storage, name)
    first, *others = events(ended=False)
    folder.append([{**first, "started": time.time() - 60, **changes}])
    folder.append([*others, {"kind": "alive", "at": 60.0, "silence_seconds": 40.0}])
    return folder


NAMES = [folder_name("TorchRunner", f"{k}abcdef012", 1.7e9 + k) for k in range(3)]


def test_names_sort_by_time_and_hold_nothing_odd() -> None:
    name = folder_name("a b/../c", "0123456789ab", 1.7e9)
    assert name == "20231114-221320-a_b____c-01234567"
    assert sorted(NAMES) == NAMES


def test_runs_are_found_by_their_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = LocalStorage(tmp_path)
    begun(storage, NAMES[0], run_name="digits, wide")
    RunFolder(storage, NAMES[1]).finish(replace(record(), run_name="digits, deep"), "")
    begun(storage, NAMES[2])
    assert list(read_runs(tmp_path)) == NAMES[::-1]
    assert {run.run_name for run in read_runs(tmp_path, "digits*").values()} == {
        "digits, wide", "digits, deep",
    }  # fmt: skip
    (found,) = read_runs(str(tmp_path), name="digits, wide").values()
    assert (found.status, found.title) == ("running", "digits, wide")
    (tmp_path / NAMES[1] / RECORD).write_text("{")
    assert list(read_runs(tmp_path, "digits*")) == [NAMES[0]]
    assert "it is no JSON" in caplog.text


def test_a_list_needs_few_of_a_run_s_values_and_reads_each_file_once(tmp_path: Path) -> None:
    """A server that shows thousands of runs would else keep all that each page shows."""
    storage, wanted = Counting(tmp_path), record()
    names = [folder_name("fit", f"{k:x}abcdef012", 1.7e9 + k) for k in range(12)]
    for name in names:
        RunFolder(storage, name).finish(wanted, "")
    reader = RunReader(storage)
    whole = reader.read(names[0])
    assert whole == wanted
    page = weakref.ref(whole)
    del whole
    for _ in range(2):
        outlines = [(name, reader.outline(name)) for name in names]
    assert storage.num_read == len(names)
    assert page() is None
    assert not outlines[0][1].graph and not outlines[0][1].steps
    assert wanted.graph and wanted.steps
    assert run_list(outlines, {}) == run_list([(name, wanted) for name in names], {})
    assert reader.read(names[0]) == wanted


class Counting(LocalStorage):
    """Counts what is read."""

    num_read = 0

    def read(self, path: str) -> bytes:
        self.num_read += 1
        return super().read(path)


def test_a_run_can_be_read_while_it_grows_and_when_it_has_ended(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    folder, reader = begun(storage, NAMES[0]), RunReader(storage)
    seen = reader.read(NAMES[0])
    assert seen is not None
    assert (seen.status, seen.phase, seen.restarts) == ("running", "train", 1)
    num_epochs = len(seen.history)

    folder.append([{"kind": "epoch", "at": 61.0, "record": {"epoch": 99, "loss": 0.5}}])
    grown = reader.read(NAMES[0])
    assert grown is not None
    assert len(grown.history) == num_epochs + 1

    folder.finish(record(), page(record()))
    assert reader.read(NAMES[0]) == record()
    assert sorted(storage.list(NAMES[0])) == [PAGE, RECORD]  # the events are gone
    assert json.loads((tmp_path / NAMES[0] / RECORD).read_text())["status"] == "succeeded"


def test_a_run_that_is_silent_for_too_long_is_lost(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    begun(storage, NAMES[0], started=time.time() - 200)
    found = RunReader(storage).read(NAMES[0])
    assert found is not None
    assert found.status == "lost"


def test_the_drivers_clock_need_not_be_ours(tmp_path: Path) -> None:
    """What is new to us was said just now, whatever the time there is."""
    folder = begun(LocalStorage(tmp_path), NAMES[0], started=time.time() - 9999)
    reader = RunReader(LocalStorage(tmp_path))

    def status() -> str:
        found = reader.read(NAMES[0])
        assert found is not None
        return found.status

    assert status() == "lost"  # as far as one can know
    folder.append([{"kind": "alive", "at": 61.0, "wall": time.time() - 9000, "silence_seconds": 1}])
    assert status() == "running"
    time.sleep(1.2)
    assert status() == "lost"


def test_a_driver_whose_clock_is_ahead_is_lost_too(tmp_path: Path) -> None:
    folder = begun(LocalStorage(tmp_path), NAMES[0])
    folder.append([{"kind": "alive", "at": 61.0, "wall": time.time() + 9000, "silence_seconds": 1}])
    reader = RunReader(LocalStorage(tmp_path))
    states = []
    for seconds in (0.0, 1.2):
        time.sleep(seconds)
        found = reader.read(NAMES[0])
        assert found is not None
        states.append(found.status)
    assert states == ["running", "lost"]


def test_a_run_whose_driver_has_slept_is_not_lost(tmp_path: Path) -> None:
    """Its own clock of the run does not count what its host has slept."""
    folder = begun(LocalStorage(tmp_path), NAMES[0], started=time.time() - 9999)
    folder.append([{"kind": "alive", "at": 61.0, "wall": time.time(), "silence_seconds": 40.0}])
    found = RunReader(LocalStorage(tmp_path)).read(NAMES[0])
    assert found is not None
    assert found.status == "running"


class Flaky(LocalStorage):
    """Cannot read some parts, for now."""

    bad = ""

    def read(self, path: str) -> bytes:
        if self.bad and path.endswith(self.bad):
            raise StorageError("not now")
        return super().read(path)


def test_what_could_not_be_read_is_read_again_and_counts_once(tmp_path: Path) -> None:
    storage = Flaky(tmp_path)
    folder, reader = begun(storage, NAMES[0]), RunReader(storage)
    reader.read(NAMES[0])
    for _ in range(2):
        folder.append([{"kind": "log", "at": 61.0, "rank": 0, "level": "WARNING", "line": "x"}])
    storage.bad = "000004.jsonl"
    for _ in range(3):
        with pytest.raises(StorageError, match="not now"):
            reader.read(NAMES[0])
    storage.bad = ""
    found = reader.read(NAMES[0])
    fresh = RunReader(storage).read(NAMES[0])
    assert found == fresh
    assert found is not None and found.num_logs == 3


@pytest.mark.parametrize("length", [0, 30, 10_000])
def test_a_part_that_is_still_being_written_is_read_later(tmp_path: Path, length: int) -> None:
    folder, reader = begun(LocalStorage(tmp_path), NAMES[0]), RunReader(LocalStorage(tmp_path))
    folder.append([{"kind": "log", "at": 61.0, "rank": 0, "level": "WARNING", "line": "x"}] * 200)
    path = tmp_path / NAMES[0] / "events" / "000003.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:length])
    before = reader.read(NAMES[0])
    assert before is not None and before.num_logs == 1
    path.write_bytes(whole)
    found = reader.read(NAMES[0])
    assert found is not None and found.num_logs == 201


def test_a_damaged_part_is_an_error(tmp_path: Path) -> None:
    begun(LocalStorage(tmp_path), NAMES[0])
    (tmp_path / NAMES[0] / "events" / "000003.jsonl").write_bytes(b'{"kind": "\xff\n')
    with pytest.raises(StorageError, match="is no JSON"):
        RunReader(LocalStorage(tmp_path)).read(NAMES[0])


def test_other_folders_and_files_are_no_runs(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for name in NAMES:
        begun(storage, name)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    reader = RunReader(storage)
    assert reader.names() == NAMES[::-1]
    for name in ("checkpoints", "notes.txt", "..", "../etc", "", NAMES[0] + "/../" + NAMES[1]):
        assert reader.read(name) is None


def test_a_run_that_has_not_said_a_word_is_not_there_yet(tmp_path: Path) -> None:
    (tmp_path / NAMES[0] / "events").mkdir(parents=True)
    assert RunReader(LocalStorage(tmp_path)).read(NAMES[0]) is None


def test_a_damaged_record_is_an_error(tmp_path: Path) -> None:
    (tmp_path / NAMES[0]).mkdir()
    (tmp_path / NAMES[0] / RECORD).write_text("{")
    with pytest.raises(StorageError, match="is no JSON"):
        RunReader(LocalStorage(tmp_path)).read(NAMES[0])


def test_a_record_that_is_far_too_large_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / NAMES[0]).mkdir()
    with (tmp_path / NAMES[0] / RECORD).open("wb") as file:
        file.truncate((1 << 24) + 1)
    with pytest.raises(StorageError, match="16,777,217 bytes, too many"):
        RunReader(LocalStorage(tmp_path)).read(NAMES[0])


def test_events_that_are_far_too_many_are_not_read(tmp_path: Path) -> None:
    folder = begun(LocalStorage(tmp_path), NAMES[0])
    line = json.dumps({"kind": "alive", "at": 1.0, "silence_seconds": 60.0})
    part = (line + " " * (15 << 20) + "\n").encode()
    for number in range(2, 7):
        (tmp_path / folder.folder / "events" / f"{number:06d}.jsonl").write_bytes(part)
    with pytest.raises(StorageError, match="too many"):
        RunReader(LocalStorage(tmp_path)).read(NAMES[0])
