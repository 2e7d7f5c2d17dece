from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from sparkdl.errors import SparkDLError, StorageError
from sparkdl.report.summary import TrainingSummary


@pytest.fixture
def summary() -> TrainingSummary:
    return TrainingSummary(
        history=[
            {"epoch": 1, "loss": 2.0, "val_loss": 2.5, "val_accuracy": 0.5},
            {"epoch": 2, "loss": 1.0, "val_loss": 1.5, "val_accuracy": 0.75},
        ],
        phase_seconds={"spool": 1.25, "train": 10.0},
        restarts=1,
        rows=1000,
        validation_rows=100,
        steps=64,
        world_size=2,
        throughput_by_rank=[100.0, 98.5],
        seconds=12.5,
    )


def test_json_round_trip(summary: TrainingSummary) -> None:
    assert TrainingSummary.from_dict(json.loads(json.dumps(summary.to_dict()))) == summary


def test_json_holds_no_nan() -> None:
    diverged = TrainingSummary(history=[{"epoch": 0, "loss": math.nan}], seconds=math.inf)
    text = json.dumps(diverged.to_dict(), allow_nan=False)
    assert math.isnan(TrainingSummary.from_dict(json.loads(text)).history[0]["loss"])


def test_values_of_something_else_are_refused(summary: TrainingSummary) -> None:
    with pytest.raises(StorageError, match="'colour'"):
        TrainingSummary.from_dict({**summary.to_dict(), "colour": "red"})
    with pytest.raises(StorageError, match="known keys"):
        TrainingSummary.from_dict({"rows": 3})


def test_pandas_has_a_row_per_epoch(summary: TrainingSummary) -> None:
    frame = summary.to_pandas()
    assert list(frame.columns) == ["epoch", "loss", "val_loss", "val_accuracy"]
    assert frame["val_accuracy"].tolist() == [0.5, 0.75]


def test_curves_pair_training_and_validation(summary: TrainingSummary) -> None:
    assert summary.curves() == {
        "loss": {"loss": ([1, 2], [2.0, 1.0]), "val_loss": ([1, 2], [2.5, 1.5])},
        "accuracy": {"val_accuracy": ([1, 2], [0.5, 0.75])},
    }


def test_plot_writes_a_picture(summary: TrainingSummary, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = summary.plot(tmp_path / "curves.png")
    assert [axis.get_title() for axis in figure.axes] == ["loss", "accuracy"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_names_the_extra(
    summary: TrainingSummary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SparkDLError, match=r"sparkdl-torch\[plot\]"):
        summary.plot()


def test_repr_tells_the_facts(summary: TrainingSummary) -> None:
    for text in (repr(summary), summary._repr_html_()):
        for fact in ("1,000 training, 100 validation", "2, 64 steps on 2 worker(s)", "12.5", "98"):
            assert fact in text
    assert "<table" in summary._repr_html_()
    assert "TrainingSummary" in repr(TrainingSummary(history=[]))


def test_a_saved_model_has_a_page_of_its_curves(summary: TrainingSummary, tmp_path: Path) -> None:
    path = summary.write_report(tmp_path / "deep" / "report.html")
    text = path.read_text(encoding="utf-8")
    assert "Learning curves" in text and "1,000" in text
    with pytest.raises(StorageError, match="choose another path"):
        summary.write_report(path / "below a file")
