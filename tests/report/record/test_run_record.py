from __future__ import annotations

import json
import time

import pytest

from sparkdl.errors import StorageError
from sparkdl.report.record.run_record import RecordBuilder, RunRecord, curve_names, curve_panels
from tests.report.runs import events, record


def test_events_add_up_to_a_record() -> None:
    found = record()
    assert (found.status, found.seconds, found.restarts) == ("succeeded", 62.0, 1)
    assert found.laps == {"preflight": 2.1, "spool": 2.9, "train": 55.5, "clean up": 1.5}
    assert sorted(found.hardware) == sorted(found.spent) == ["0", "1", "2", "3"]
    assert found.facts["workers"] == 4
    assert found.failures[0]["reason"] == "a worker was lost (executor 1 <lost>)"
    assert found.phase == ""
    totals = found.totals()
    assert sum(totals["0"].values()) == pytest.approx(48.0)  # 6 of 54 seconds are lost
    assert totals["3"]["waiting"] < totals["0"]["waiting"]


def test_a_record_in_json_is_the_same_again() -> None:
    found = record()
    assert RunRecord.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_an_epoch_that_is_told_again_after_a_restart_counts_once() -> None:
    builder = begun()
    for loss in (3.0, 2.0):
        builder.take({"kind": "epoch", "at": 1.0, "record": {"epoch": 1, "loss": loss}})
    builder.take({"kind": "epoch", "at": 2.0, "record": {"epoch": 2, "loss": 1.0}})
    assert [entry["loss"] for entry in builder.record().history] == [2.0, 1.0]


def test_looks_at_layers_that_come_again_count_once_and_are_thinned() -> None:
    builder = begun()
    for step in (10, 20, 30, 20, *range(40, 4010, 10)):
        builder.take({"kind": "layers", "at": 1.0, "step": step, "ratios": {"a": step / 1e6}})
    found = builder.record().layers
    steps = [look["step"] for look in found]
    assert steps == sorted(set(steps)) and 100 <= len(steps) <= 200
    assert (steps[0], found[-1]) == (10, {"step": 4000, "ratios": {"a": 0.004}})


def begun() -> RecordBuilder:
    builder = RecordBuilder()
    builder.take({"kind": "begin", "at": 0.0, "run_id": "r", "name": "n", "started": 1.0})
    return builder


def test_reports_of_a_function_are_told_apart_by_their_counter() -> None:
    """It may report its own ``epoch`` several times."""
    builder = begun()
    for number in range(1, 5):
        told = {"report": number, "epoch": (number + 1) // 2, "loss": 1 / number}
        builder.take({"kind": "epoch", "at": 1.0, "record": told})
    assert [entry["report"] for entry in builder.record().history] == [1, 2, 3, 4]


def test_reports_that_come_again_are_in_their_order() -> None:
    builder = begun()
    for number in (1, 2, 3, 4, 2, 3):
        builder.take({"kind": "epoch", "at": 1.0, "record": {"report": number, "loss": 1.0}})
    assert [entry["report"] for entry in builder.record().history] == [1, 2, 3]


def test_many_reports_are_taken_quickly() -> None:
    builder = begun()
    began = time.perf_counter()
    for number in range(20_000):
        builder.take({"kind": "epoch", "at": 1.0, "record": {"report": number, "loss": 1.0}})
    assert time.perf_counter() - began < 2


def test_a_kind_of_a_later_version_is_passed_over() -> None:
    builder = RecordBuilder()
    builder.take({"kind": "hologram", "at": 5.0})
    assert builder.record().seconds == 5.0


def test_of_many_warnings_the_first_are_kept() -> None:
    builder = RecordBuilder()
    for number in range(500):
        line = {"rank": 0, "level": "WARNING", "line": str(number)}
        builder.take({"kind": "log", "at": 0.0, **line})
    found = builder.record()
    assert (found.num_logs, len(found.logs), found.logs[0]["line"]) == (500, 200, "0")


def test_another_version_is_refused() -> None:
    with pytest.raises(StorageError, match="another version"):
        RunRecord.from_dict({**record().to_dict(), "format": 99})


def test_a_record_does_not_change_with_its_builder() -> None:
    builder = RecordBuilder()
    for event in events(ended=False):
        builder.take(event)
    before = builder.record()
    length = len(before.history)
    builder.take({"kind": "epoch", "at": 99.0, "record": {"epoch": 99, "loss": 0.0}})
    assert len(before.history) == length


def test_curves_of_a_history_share_panels_and_leave_out_counts() -> None:
    history = [
        {"epoch": 1, "steps": 9, "seconds": 2.0, "loss": 3.0, "val_loss": 4.0},
        {"epoch": 2, "steps": 9, "seconds": 2.5, "loss": 2.0, "val_f1": 0.5},
    ]
    assert curve_names(history) == ["loss", "val_loss", "val_f1"]
    assert curve_panels(history, has_costs=True) == {
        "loss": {"loss": ([1.0, 2.0], [3.0, 2.0]), "val_loss": ([1.0], [4.0])},
        "f1": {"val_f1": ([2.0], [0.5])},
        "seconds": {"seconds": ([1.0, 2.0], [2.0, 2.5])},
    }
