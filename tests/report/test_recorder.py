from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkdl.comm import channel
from sparkdl.config import TrainConfig
from sparkdl.errors import DataError, StorageError, TrainingFailed, WorkerError
from sparkdl.report import recorder as module
from sparkdl.report.listeners.listener import Listener, RunListener, RunStart
from sparkdl.report.live.progress import EpochCallback, Progress, View
from sparkdl.report.record.run_folder import RunReader
from sparkdl.report.record.run_record import RunRecord
from sparkdl.report.recorder import described, recording
from sparkdl.report.summary import WeightsOf
from sparkdl.storage.storage import LocalStorage
from tests.train.runs import make_data, plan_for


def start(storage: Any = None, listeners: Any = (), **known: Any) -> Any:
    return recording(
        run_id="0123456789ab",
        name="Test",
        params=[{"name": "checkpointDir", "value": URL, "is_set": True}],
        storage=storage,
        listeners=listeners,
        **known,
    )


URL = "s3://user:secret@bucket/x"


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_events_are_written_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WRITE_SECONDS", 0.05)
    storage = LocalStorage(tmp_path)
    reader = RunReader(storage)
    with start(storage) as recorder:
        (name,) = reader.names()
        recorder.facts(world_size=2, rows=10)
        recorder.attempt(0, 0)
        recorder.progress(0, Progress(step=3, loss=0.5, rows=30, seconds={"compute": 2.0}))

        def steps() -> bool:
            found = reader.read(name)
            return found is not None and len(found.steps) == 1

        until(steps)
        found = reader.read(name)
        assert found is not None
        assert (found.status, found.facts["workers"]) == ("running", 2)
        assert found.silence_seconds >= 30
        assert found.totals() == {"0": {"compute": 2.0}}
        recorder.succeeded([{"epoch": 1, "loss": 0.5}])
    ended = reader.read(name)
    assert ended is not None
    assert (ended.status, ended.history) == ("succeeded", [{"epoch": 1, "loss": 0.5}])
    assert not [t for t in threading.enumerate() if t.name == "sparkdl-record"]


def test_the_folder_is_named_after_the_run(tmp_path: Path) -> None:
    with start(LocalStorage(tmp_path), run_name="digits, wide" + 200 * "!"):
        pass
    (folder,) = tmp_path.iterdir()
    assert folder.name.split("-")[2] == "digits__wide" + 88 * "_"
    assert RunReader(LocalStorage(tmp_path)).names() == [folder.name]


def test_an_error_ends_the_record_and_goes_on(tmp_path: Path) -> None:
    with pytest.raises(DataError), start(LocalStorage(tmp_path)):
        raise DataError("s3://user:secret@bucket is empty")
    (path,) = tmp_path.glob("*/run.json")
    found = RunRecord.from_dict(json.loads(path.read_text()))
    assert found.status == "failed"
    assert found.error == {"type": "DataError", "message": "s3://***@bucket is empty"}


class Full(LocalStorage):
    """A storage that is full after some files."""

    def __init__(self, root: Path, room: int) -> None:
        super().__init__(root)
        self.room = room

    def write(self, path: str, data: Any) -> None:
        self.room -= 1
        if self.room < 0:
            raise StorageError("no space left")
        super().write(path, data)


def test_a_storage_that_fails_later_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_WRITE_SECONDS", 0.02)
    with start(Full(tmp_path, 1)) as recorder:
        until(lambda: "no space left" in caplog.text)
        time.sleep(0.1)
    assert caplog.text.count("no space left") == 1
    assert recorder.page_path is None
    assert recorder.record().status == "succeeded"


@pytest.mark.parametrize("error", [OSError("temporary folder is full"), TypeError("not JSON")])
def test_any_failure_of_the_report_leaves_the_run_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    class Failing(LocalStorage):
        def write(self, path: str, data: Any) -> None:
            if path.endswith("run.json"):
                raise error
            super().write(path, data)

    with start(Failing(tmp_path)) as recorder:
        pass
    assert "the run leaves no report: " in caplog.text
    assert str(error) in caplog.text
    assert recorder.page_path is None


def test_what_cannot_be_recorded_leaves_the_run_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with start(LocalStorage(tmp_path)) as recorder:
        for number in (1, "2", "3"):  # what has no order
            recorder.epoch({"report": number})
    assert caplog.text.count("leaves no report") == 1


def test_names_that_are_no_utf8_can_be_written(tmp_path: Path) -> None:
    """Python has them with lone surrogates, as a worker that warns of a file's name does."""
    with start(LocalStorage(tmp_path)) as recorder:
        recorder.log(0, "skipped caf\udce9.jpg", 30)
    (path,) = tmp_path.glob("*/report.html")
    assert "skipped caf?.jpg" in path.read_text(encoding="utf-8")


def test_no_text_of_a_run_shows_passwords(tmp_path: Path) -> None:
    heard: list[Any] = []

    class All(RunListener):
        def facts(self, facts: Any) -> None:
            heard.append(facts)

        def failure(self, reason: str) -> None:
            heard.append(reason)

        def end(self, record: Any, module: Any) -> None:
            heard.append(record)

    class Options(Listener):
        def start(self, run: RunStart) -> RunListener:
            heard.append(run)
            return All()

    error = WorkerError(0, "OSError", URL, f"File x\n  open({URL!r})")
    with (
        pytest.raises(WorkerError),
        start(LocalStorage(tmp_path), [Options()], spark={"a": [URL]}) as r,
    ):
        r.facts(world_size=1, strategy=URL)
        r.log(0, f"slow: {URL}", 30)
        r.failure(f"lost ({URL})")
        raise error
    for path in tmp_path.glob("*/*.*"):
        text = path.read_text(encoding="utf-8")
        assert "bucket" in text
        assert "secret" not in text
    assert len(heard) == 4
    assert "bucket" in str(heard)
    assert "secret" not in str(heard)


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_what_the_user_has_interrupted_says_so(tmp_path: Path, is_interrupted: bool) -> None:
    """Whatever the jobs raise that were cancelled for it."""
    options = {"is_interrupted": lambda: is_interrupted}
    with pytest.raises(TrainingFailed), start(LocalStorage(tmp_path), **options) as recorder:
        recorder.succeeded([{"epoch": 1}])
        raise TrainingFailed("cancelled")
    (path,) = tmp_path.glob("*/run.json")
    found = RunRecord.from_dict(json.loads(path.read_text()))
    assert (found.status, found.history) == ("failed", [{"epoch": 1}])
    assert found.error is not None
    assert (found.error["type"] == "KeyboardInterrupt") == is_interrupted


def test_an_interrupted_run_says_so() -> None:
    assert described(KeyboardInterrupt()) == {"type": "KeyboardInterrupt", "message": "interrupted"}


@pytest.mark.parametrize(("heard", "loss"), [(9, 1.0), (7, None)])
def test_the_last_step_is_kept(
    heard: int, loss: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STEPS_KEPT", 1)  # the first one, and no sample more
    with start() as recorder:
        recorder.progress(0, Progress(step=1, loss=3.0, rows=1))
        recorder.progress(0, Progress(step=heard, loss=1.0, rows=5))
        recorder.done(9, stopped_early=False)
    steps = [entry[1:3] for entry in recorder.record().steps]
    assert (steps[0], steps[-1]) == ([1, 3.0], [9, loss])


def test_a_phase_ends_where_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    with start() as recorder:
        for now, phase in ((1.0, "preflight"), (2.0, "wait"), (4.0, "preflight"), (7.0, "train")):
            monkeypatch.setattr(recorder, "_now", lambda now=now: now)
            recorder.phase(phase)
        assert recorder.end_phase() == {"preflight": 4.0, "wait": 2.0, "train": 0.0}
        assert recorder.record().phase == "train"
    assert recorder.record().laps == {"preflight": 4.0, "wait": 2.0, "train": 0.0}
    assert recorder.record().phase == ""


def test_a_round_is_begun_again_without_new_spans() -> None:
    with start() as recorder:
        recorder.facts(world_size=1)
        recorder.attempt(0, 0)
        recorder.spent(0, {"compute": 5.0})
        recorder.failure("a worker was lost")
        recorder.begun_again(1, 40)
        recorder.spent(0, {"compute": 8.0})  # the same totals go on
    found = recorder.record()
    assert found.restarts == 1
    assert found.attempts[1]["start_step"] == 40
    assert found.totals() == {"0": {"compute": 8.0}}


def test_a_gang_that_fails_before_it_starts_counts_once() -> None:
    with start() as recorder:
        recorder.attempt(0, 0)
        recorder.failure("a worker was lost")
        recorder.begun_again(1, None)
        recorder.failure("spooling failed")
        recorder.begun_again(2, None)
        recorder.attempt(2, 40)
    found = recorder.record()
    assert found.restarts == 2
    assert [a["start_step"] for a in found.attempts] == [0, None, 40]


def test_a_storage_that_fails_at_once_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError), start(Full(tmp_path, 0)):
        raise AssertionError("the run must not begin")


def test_a_restart_begins_its_own_spans() -> None:
    with start() as recorder:
        recorder.facts(world_size=1)
        recorder.attempt(0, 0)
        recorder.spent(0, {"compute": 5.0})
        recorder.spent(0, {"compute": 5.5})  # not told yet when the attempt fails
        recorder.failure("a worker was lost")
        recorder.attempt(1, 40)
        recorder.spent(0, {"compute": 3.0})
    found = recorder.record()
    assert found.totals() == {"0": {"compute": 8.5}}
    assert found.attempts[1]["start_step"] == 40
    assert found.failures[0]["reason"] == "a worker was lost"


def test_only_warnings_and_new_steps_are_kept() -> None:
    with start() as recorder:
        recorder.log(1, "hello", 20)
        recorder.log(1, "beware", 30)
        for step in (5, 5, 6):
            recorder.progress(0, Progress(step=step, loss=1.0, rows=step))
        recorder.progress(1, Progress(step=9, loss=1.0, rows=9))
    found = recorder.record()
    assert [entry["line"] for entry in found.logs] == ["beware"]
    assert [step for _, step, _, _ in found.steps] == [5, 6]


def test_hardware_and_mistakes_come_as_facts() -> None:
    with start() as recorder:
        recorder.fact(1, {"kind": "hardware", "hardware": {"host": "a"}})
        recorder.fact(0, {"kind": "confusion", "epoch": 2, "counts": [[1]]})
        recorder.fact(0, {"kind": "of a later version"})
    found = recorder.record()
    assert found.hardware == {"1": {"host": "a"}}
    assert found.confusion == {"epoch": 2, "counts": [[1]]}


@pytest.mark.parametrize(
    ("error", "message", "trace"),
    [
        (WorkerError(1, "ValueError", "no", "its own"), "ValueError on rank 1: no", "its own"),
        (TrainingFailed("lost"), "lost", None),
    ],
)  # fmt: skip
def test_errors_are_described(error: Exception, message: str, trace: str | None) -> None:
    found = described(error)
    assert (found["message"], found.get("traceback")) == (message, trace)


def test_an_unexpected_error_comes_with_its_traceback() -> None:
    try:
        raise RuntimeError("x")
    except RuntimeError as error:
        assert "test_recorder.py" in described(error)["traceback"]


def test_views_are_shown_what_is_recorded() -> None:
    seen: list[Any] = []

    class Watching(View):
        def epoch(self, record: Any) -> None:
            seen.append(record["loss"])

        def done(self, steps: int, *, stopped_early: bool) -> None:
            seen.append((steps, stopped_early))

    with start() as recorder:
        for _ in range(2):
            recorder.show(Watching)
        recorder.epoch({"epoch": 1, "steps": 4, "loss": 2.0})
        recorder.done(3, stopped_early=False)
    assert recorder.record().history == [{"epoch": 1, "steps": 4, "loss": 2.0}]
    assert seen == [2.0, 2.0, (3, False), (3, False)]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TrainingFailed("rank 1 was lost\nSpark's words"), "rank 1 was lost"),
        (KeyError("x"), "KeyError: 'x'"),
        (KeyboardInterrupt(), None),
    ],
)
def test_views_are_told_why_a_run_has_failed(error: BaseException, reason: str | None) -> None:
    told: list[str] = []

    class Watching(View):
        def failed(self, reason: str) -> None:
            told.append(reason)

        def close(self) -> None:
            told.append("close")

    with pytest.raises(type(error)), start() as recorder:
        recorder.show(Watching)
        raise error
    assert told == [*([] if reason is None else [reason]), "close"]


def test_a_batch_larger_than_a_workers_rows_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    data = make_data([90, 70])
    with start() as recorder:
        for batch_size in (70, 90, 512):
            recorder.planned(plan_for(data, TrainConfig(batch_size=batch_size), world_size=2))
    assert caplog.messages == [
        "batchSize=512 is more than the 90 rows that a worker has, so an epoch is a single step on "
        "all rows; for 10 steps choose batchSize=9"
    ]


def test_what_is_asked_to_end_the_run_at_an_epoch_ends_it() -> None:
    def stop(record: Any) -> None:
        raise TrainingFailed("pruned")

    with pytest.raises(TrainingFailed), start() as recorder:
        recorder.show(lambda: EpochCallback(stop))
        recorder.epoch({"epoch": 1, "steps": 4, "loss": 2.0})
    assert recorder.record().status == "failed"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_very_many_events_take_little_memory() -> None:
    """A run of months must not fill the driver."""
    before = 0
    with start() as recorder:
        recorder.facts(world_size=2, rows=10, steps_per_epoch=1)
        recorder.attempt(0, 0)
        for number in range(1, 100_001):
            recorder.progress(
                0, Progress(step=number, loss=0.5, rows=number, seconds={"a": number})
            )
            recorder.log(1, f"line {number}", logging.WARNING)
            recorder.epoch({"epoch": number, "steps": 1, "loss": 0.5, "val_loss": 0.25})
            recorder.failure(f"reason {number}")
            if number == 25_000:
                before = resident_bytes()
        after = resident_bytes()
    assert after < before + 10 * 2**20  # kept whole, the lists would take more
    found = recorder.record()
    assert [found.history[0]["epoch"], found.history[-1]["epoch"]] == [1, 100_000]
    assert 1000 < len(found.history) <= 4000
    assert found.num_logs == 100_000


def test_events_that_nobody_takes_do_not_fill_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_MOST_EVENTS", 10)
    hub = channel.Hub()
    for _ in range(30):
        hub.report(0, 0, [{"kind": "heartbeat"}, {"kind": "log", "lines": []}, {"kind": "epoch"}])
    kinds = [hub.events.get_nowait().body["kind"] for _ in range(hub.events.qsize())]
    assert kinds.count("epoch") == 30
    assert kinds.count("heartbeat") == kinds.count("log") == 4


def test_the_record_says_which_weights_the_model_has() -> None:
    with start() as recorder:
        first, last = {"epoch": 1.0, "loss": 0.5}, {"epoch": 2.0, "loss": 1.0}
        weights = WeightsOf(values=first, best="loss", planned_epochs=2, last_epoch=2.0)
        recorder.succeeded([first, last], weights=weights)
    found = recorder.record()
    assert found.weights == "epoch 1 (best loss 0.5), of 2 epochs"
    assert found.measured == first and found.history[-1] == last


def test_steps_of_a_fit_that_goes_on_are_counted_from_where_it_began() -> None:
    told: list[int] = []

    class Ear(RunListener):
        def epoch(self, step: int, record: Any) -> None:
            told.append(step)

    class Telling(Listener):
        def start(self, run: RunStart) -> RunListener:
            return Ear()

    with start(listeners=[Telling()]) as recorder:
        recorder.facts(world_size=1, steps_per_epoch=4, first_epoch=2, first_step=11)
        recorder.epoch({"epoch": 3, "steps": 4})
        recorder.epoch({"epoch": 4, "steps": 1})
    assert told == [15, 16]
