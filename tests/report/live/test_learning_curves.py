"""Curves of fits that still run: as a picture, and as text."""

from __future__ import annotations

import builtins
import math
from typing import Any

import pytest

from sparkdl.errors import SparkDLError
from sparkdl.report.live.learning_curves import Curves, blocks, panels_of, picture, sketch
from sparkdl.report.record.run_record import add_record


def fit(name: str = "fit 1") -> Curves:
    curves = Curves(name=name, steps_per_epoch=10)
    for step in range(1, 21):
        curves.add_step(step, 1 / step)
    for epoch in (1, 2):
        curves.history.append(
            {"epoch": epoch, "steps": 10, "loss": 1 / epoch, "val_loss": 2 / epoch,
             "val_accuracy": epoch / 2, "seconds": 3.0, "learning_rate": 0.1}
        )  # fmt: skip
    return curves


def test_positions_of_steps_are_epochs() -> None:
    assert fit().steps[0][:3] == [0.1, 0.2, 0.3]
    assert fit().steps[0][-1] == 2.0


def test_a_restart_takes_back_what_was_lost() -> None:
    curves = fit()
    curves.add_step(16, 0.5)
    assert curves.steps[0][-2:] == [1.5, 1.6]
    assert curves.steps[1][-1] == 0.5
    add_record(curves.history, {"epoch": 2, "loss": 0.25})
    assert curves.panels()["loss"]["loss"] == ([1.0, 2.0], [1.0, 0.25])


def test_a_step_that_is_told_again_counts_once_and_one_without_a_loss_not_at_all() -> None:
    curves = Curves(name="fit 1")
    for step, loss in ((1, math.nan), (2, 0.5), (2, 0.4), (3, math.inf)):
        curves.add_step(step, loss)
    assert curves.steps == ([2.0], [0.4])


def test_long_fits_are_thinned_out() -> None:
    curves = Curves(name="fit 1")
    for step in range(5000):
        curves.add_step(step, 1.0)
    assert 400 < len(curves.steps[0]) <= 1000
    assert curves.steps[0][0] == 0


def test_losses_share_a_panel_and_what_is_no_measure_has_none() -> None:
    assert panels_of([fit()]) == ["loss", "accuracy"]


def test_panels_are_of_all_fits_and_not_too_many() -> None:
    other = Curves(name="fit 2")
    other.history.append({"epoch": 1, **{f"val_metric{n}": 1.0 for n in range(9)}})
    assert panels_of([fit(), other]) == ["loss", "accuracy", "metric0", "metric1"]


def test_the_picture_is_a_png_of_all_panels() -> None:
    def width(data: bytes) -> int:
        return int.from_bytes(data[16:20], "big")

    assert picture([fit()]).startswith(b"\x89PNG")
    assert width(picture([fit()])) == 2 * width(picture([Curves(name="a", history=[
        {"epoch": 1, "loss": 1.0}])]))  # fmt: skip
    assert picture([fit(f"fit {n}") for n in range(30)]).startswith(b"\x89PNG")


def test_without_matplotlib_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return found(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(SparkDLError, match="pip install matplotlib"):
        picture([fit()])


def test_the_sketch_has_a_line_for_each_curve() -> None:
    lines = sketch([fit()]).splitlines()
    assert [line.split() for line in lines] == [
        ["loss", "█▁", "0.5"], ["val_loss", "█▁", "1"], ["val_accuracy", "▁█", "1"]
    ]  # fmt: skip
    assert sketch([fit(), fit("fit 2")]).splitlines()[-1].startswith("fit 2 val_accuracy")


def test_the_sketch_of_a_first_epoch_shows_steps() -> None:
    curves = Curves(name="fit 1", steps_per_epoch=10)
    curves.add_step(1, 2.0)
    curves.add_step(2, 1.0)
    assert sketch([curves]).split() == ["loss", "█▁", "1"]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([1.0], "▁ 1"),
        ([0.0, 0.5, 1.0, math.nan], "▁▅█ 1"),
        ([math.nan], "no finite value"),
        ([], "no finite value"),
    ],
)
def test_blocks(values: list[float], shown: str) -> None:
    assert blocks(values) == shown


def test_a_long_curve_keeps_its_last_value() -> None:
    drawn, value = blocks([float(n) for n in range(1000)]).split()
    assert len(drawn) == 40
    assert drawn[-1] == "█"
    assert value == "999"
