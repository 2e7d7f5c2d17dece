"""What a search shows while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from sparkdl.tuning import trial_table
from sparkdl.tuning.study import StudyOptions
from sparkdl.tuning.trial_table import TrialTable, make_table


def test_each_trial_that_begins_or_ends_is_a_line() -> None:
    lines: list[str] = []
    table = TrialTable(
        StudyOptions(trials=3, monitors=("val_loss",), modes=("min",)), write=lines.append
    )
    table.earlier(0, {"learningRate": 0.1}, "complete", 0.5)
    for number, loss in ((1, 0.6), (2, 0.25)):
        table.begin(number, {"learningRate": 0.01, "optimizer": "adam"})
        table.epoch(number, 2, {"val_loss": 0.9})
        table.end(number, "complete", {"val_loss": loss}, "")
    assert lines[0] == "trial 1 begins: learningRate 0.01, optimizer adam"
    assert lines[1].startswith(
        "trial 1 complete after 2 epochs: val_loss 0.6; learningRate 0.01, optimizer adam; "
    )
    assert "val_loss 0.25 (best so far)" in lines[3]
    assert lines[3].endswith("3 of 3 trials ended (3 complete)")


def test_a_failure_has_no_line_as_it_is_logged_already() -> None:
    lines: list[str] = []
    table = TrialTable(
        StudyOptions(trials=3, monitors=("val_loss",), modes=("min",)), write=lines.append
    )
    table.begin(1, {})
    table.end(1, "failed", {"val_loss": float("nan")}, "no such column")
    assert lines == ["trial 1 begins"]


def test_a_notebook_has_one_table_in_which_the_best_trial_stands_out() -> None:
    shown: list[Mapping[str, str]] = []

    def show(name: str, bundle: Mapping[str, str]) -> None:
        assert name == "trials"
        shown.append(bundle)

    table = TrialTable(StudyOptions(trials=4, monitors=("val_acc",), modes=("max",)), show=show)
    for number, accuracy in ((0, 0.5), (1, 0.75), (2, 0.75)):
        table.begin(number, {"optimizer": "<adam>"})
        table.end(number, "complete", {"val_acc": accuracy}, "")
    table.begin(3, {"batchSize": 16})
    text, page = shown[-1]["text/plain"], shown[-1]["text/html"]
    lines = [line.split() for line in text.splitlines()]
    assert text.startswith("3 of 4 trials ended (3 complete, 1 running)\n")
    assert lines[1] == ["trial", "state", "epochs", "val_acc", "optimizer", "batchSize"]
    assert lines[3] == ["1", "complete,", "best", "0.75", "<adam>"]
    assert lines[-1] == ["3", "running", "16"]
    assert page.count(", best") == 1
    assert "&lt;adam&gt;" in page


def test_several_values_have_no_best_trial() -> None:
    lines: list[str] = []
    table = TrialTable(
        StudyOptions(trials=1, monitors=("a", "b"), modes=("min", "max")), write=lines.append
    )
    table.begin(0, {})
    table.end(0, "complete", {"a": 1.0, "b": 2.0}, "")
    assert "a 1, b 2" in lines[1]
    assert "best" not in lines[1]


@pytest.mark.parametrize("verbose", [0, 1])
def test_without_a_notebook_lines_go_to_the_console_unless_the_user_wants_none(
    verbose: int, capsys: pytest.CaptureFixture[str]
) -> None:
    table = make_table(StudyOptions(trials=1, monitors=("loss",)), verbose=verbose)
    table.begin(0, {})
    table.end(0, "pruned", {"loss": 1.0}, "")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("trial 0 begins\ntrial 0 pruned: loss 1; ") is bool(verbose)


def test_a_notebook_has_the_table_in_place_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(trial_table, "in_notebook", lambda: True)
    monkeypatch.setattr(trial_table, "CellOutputs", lambda: lambda *bundle: shown.append(bundle))
    table = make_table(StudyOptions(trials=1, monitors=("loss",)), verbose=1)
    table.begin(0, {})
    assert len(shown) == 1
