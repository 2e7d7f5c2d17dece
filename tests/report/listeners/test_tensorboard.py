from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest

from sparkdl.errors import SparkDLError
from sparkdl.report.listeners.listener import RunStart
from sparkdl.report.listeners.tensorboard import TensorBoard
from sparkdl.serialization.json_objects import describe, restore
from tests.report.runs import record

START = RunStart(run_id="r1", name="Test", folder="20260101-000000-Test-r1", params={"a|b": "1"})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = TensorBoard(log_dir=str(tmp_path)).start(START)
    run.facts({"rows": 10})
    run.step(5, {"loss": 0.5, "rows_per_second": 100.0})
    run.step(9, {"loss": float("nan")})
    run.epoch(10, {"epoch": 1, "steps": 10, "loss": 0.4, "val_loss": 0.45})
    run.epoch(20, {"epoch": 2, "steps": 10, "loss": 0.2, "val_loss": 0.25})
    run.failure("a worker was lost")
    run.end(record(), None)

    found = EventAccumulator(str(tmp_path / START.folder))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {
        "step/loss", "step/rows_per_second", "epoch/loss", "epoch/val_loss",
    }  # fmt: skip
    values = [(event.step, event.value) for event in found.Scalars("epoch/loss")]
    assert values == [(10, pytest.approx(0.4)), (20, pytest.approx(0.2))]
    assert len(found.Scalars("step/loss")) == 1  # what is not finite is left out
    texts = {
        tag: found.Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val[0].decode()
        for tag in ("params", "facts", "failures", "status")
    }
    assert "| a | 1 |" not in texts["params"] and "a\\|b" in texts["params"]
    assert texts["failures"] == "a worker was lost"
    assert texts["status"] == "succeeded"


def test_without_the_package_the_remedy_is_named(tmp_path: Path) -> None:
    hidden = {"torch.utils.tensorboard": None}
    with mock.patch.dict(sys.modules, hidden), pytest.raises(SparkDLError, match="tensorboard\\]"):
        TensorBoard(log_dir=str(tmp_path)).start(START)


def test_options_can_be_saved() -> None:
    options = TensorBoard(log_dir="x", flush_seconds=2.0)
    assert restore(describe(options)) == options
