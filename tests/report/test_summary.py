from __future__ import annotations

import dataclasses
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkdl.errors import SparkDLError, StorageError
from sparkdl.report.summary import TrainingSummary, WeightsOf


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
        run_name="digits, wide",
        weights_of=WeightsOf(
            values={"epoch": 1, "loss": 1.0, "val_loss": 1.5},
            best="val_loss",
            planned_epochs=10,
            last_epoch=4,
            stopped_early=True,
        ),
        chosen={"numWorkers": {"value": 2, "reason": "an epoch takes <12 s"}},
    )


def test_it_names_the_mesh(summary: TrainingSummary) -> None:
    assert "2, 64 steps on 2 workers\n" in repr(summary)
    along = dataclasses.replace(summary, mesh="data=2, shard=2")
    assert "2, 64 steps on 2 workers, along data=2, shard=2\n" in repr(along)
    assert TrainingSummary.from_dict(json.loads(json.dumps(along.to_dict()))) == along


def test_it_says_where_it_went_on(summary: TrainingSummary) -> None:
    assert "went on from" not in repr(summary)
    assert "went on from     step 1,040\n" in repr(dataclasses.replace(summary, first_step=1040))


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("loss", "; each epoch has one: history[-1]['loss'] is that of the last"),
        ("step", "; did you mean 'steps'?"),
        ("nothing_like_it", ""),
    ],
)
def test_a_name_that_it_has_not_is_told(summary: TrainingSummary, name: str, remedy: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(summary, name)
    assert str(caught.value) == f"TrainingSummary has no {name!r}{remedy}"


def test_json_round_trip(summary: TrainingSummary) -> None:
    assert TrainingSummary.from_dict(json.loads(json.dumps(summary.to_dict()))) == summary


def test_a_summary_of_before_does_not_know_the_weights(summary: TrainingSummary) -> None:
    values = summary.to_dict()
    del values["weights_of"]
    assert TrainingSummary.from_dict(values).weights_of is None


@pytest.mark.parametrize(
    ("values", "more", "text"),
    [
        ({"epoch": 7.0, "val_loss": 0.1234567}, {"best": "val_loss", "stopped_early": True},
         "epoch 7 (best val_loss 0.1235), of 10 epochs; stopped early after epoch 8"),
        ({"epoch": 6.25, "val_loss": 0.5}, {"best": "val_loss"},
         "epoch 6.25 (best val_loss 0.5), of 10 epochs"),
        ({"epoch": 8, "loss": 0.5}, {}, "epoch 8, of 10 epochs"),
        ({"epoch": 1, "loss": 0.5}, {"planned_epochs": 1}, "epoch 1, of 1 epoch"),
    ],
)  # fmt: skip
def test_which_weights_a_model_has(
    values: dict[str, float], more: dict[str, Any], text: str
) -> None:
    found = WeightsOf(**{"values": values, "planned_epochs": 10, "last_epoch": 8, **more})
    assert str(found) == text
    assert found.epoch == values["epoch"]


def test_the_text_fits_a_terminal_and_its_phases_add_up() -> None:
    spent = {"preflight": 1.0, "spool": 2.0, "train": 30.0, "clean up": 0.01, "other": 0.49}
    mine = dict.fromkeys(("data", "compute", "communication", "waiting", "evaluate"), 5.0)
    mine |= {"checkpoint": 0.0, "other": 0.02, "checkpoint stall": 0.04}
    found = TrainingSummary(
        history=[{"epoch": 1, **{f"val_metric_{n}": 0.123456 for n in range(9)}}],
        phase_seconds={
            **{f"fit: {name}": value for name, value in spent.items()},
            **{f"rank 0: {name}": value for name, value in mine.items()},
        },
        seconds=33.5,
        throughput_by_rank=[float(rank) for rank in range(100)],
    )
    text = repr(found)
    assert max(map(len, text.splitlines())) <= 80
    assert "33.5 (checks 1.0, writing rows to local disks 2.0, train 30.0, other 0.5)" in " ".join(
        text.split()
    )
    assert "0 to 99, median 50, of 100 ranks" in text
    of_rank = " ".join(text.partition("of train, rank 0")[2].partition("rows/s")[0].split())
    assert of_rank == (
        "starting 4.9, data 5.0, compute 5.0, communication 5.0, waiting 5.0, evaluate 5.0, "
        "other 0.1"
    )


def test_json_holds_no_nan() -> None:
    diverged = TrainingSummary(history=[{"epoch": 0, "loss": math.nan}], seconds=math.inf)
    text = json.dumps(diverged.to_dict(), allow_nan=False)
    assert math.isnan(TrainingSummary.from_dict(json.loads(text)).history[0]["loss"])


def test_values_of_something_else_are_refused(summary: TrainingSummary) -> None:
    with pytest.raises(StorageError, match="'colour'"):
        TrainingSummary.from_dict({**summary.to_dict(), "colour": "red"})
    with pytest.raises(StorageError, match="known keys"):
        TrainingSummary.from_dict({"rows": 3})
    for name, odd in (("phase_seconds", None), ("rows", "3"), ("steps", True), ("chosen", [])):
        with pytest.raises(StorageError, match=rf"values \['{name}'\] of a .* of other types"):
            TrainingSummary.from_dict({**summary.to_dict(), name: odd})


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
    with pytest.raises(SparkDLError, match="pip install matplotlib"):
        summary.plot()


def test_repr_tells_the_facts(summary: TrainingSummary) -> None:
    assert "epoch 1 (best val_loss 1.5), of 10 epochs; stopped" in repr(summary)
    assert repr(summary).count("val_accuracy") == 1  # of the last epoch, which is another one
    for text in (repr(summary), summary._repr_html_()):
        for fact in (
            "1,000 training, 100 validation",
            "2, 64 steps on 2 workers",
            "12.5",
            "98",
            "digits, w",
        ):
            assert fact in text
    changed = replace(summary, gang_sizes=[[0, 2], [10, 2], [10, 1], [40, 3]])
    assert changed.workers_text == "2 workers, 1 from step 10, 3 from step 40"
    assert "<table" in summary._repr_html_()
    assert "2: an epoch takes <12 s" in repr(summary)
    assert "100 validation, in 8 shards" in repr(replace(summary, shards="8 shards"))
    assert "TrainingSummary" in repr(TrainingSummary(history=[]))


def test_a_saved_model_has_a_page_of_its_curves(summary: TrainingSummary, tmp_path: Path) -> None:
    path = summary.write_report(tmp_path / "deep" / "report.html")
    text = path.read_text(encoding="utf-8")
    assert "Learning curves" in text and "1,000" in text and "<h1>digits, wide</h1>" in text
    assert "has the weights of epoch 1 (best val_loss 1.5), of 10 epochs" in text
    assert "an epoch takes &lt;12 s" in text
    with pytest.raises(StorageError, match="choose another path"):
        summary.write_report(path / "below a file")
