"""The loop of a search, with a fit that only pretends to train."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest

from sparkdl.errors import ConfigError, TrainingDiverged, TrainingFailed, WorkerError
from sparkdl.storage.storage import open_storage
from sparkdl.sync.population.ranges import Range
from sparkdl.tuning.search import (
    EPOCHS,
    ERROR,
    Fitted,
    OnEpoch,
    PlannedTrial,
    Search,
    UnknownMonitor,
)
from sparkdl.tuning.space import Chooser
from sparkdl.tuning.study import StudyOptions, finished, open_study
from sparkdl.tuning.trial_table import TrialTable

SPACE = {"x": Range(0.0, 1.0)}


def line(attempt: PlannedTrial, on_epoch: OnEpoch, *, epochs: int = 9) -> Fitted:
    """Losses that fall from epoch to epoch, the lower the smaller x is."""
    history = []
    for epoch in range(1, epochs + 1):
        x = attempt.values["x"]
        history.append({"epoch": epoch, "val_loss": x + 1 / epoch, "seconds": 1 - x})
        on_epoch(history[-1])
    return Fitted(model=f"model {attempt.number}", history=history, kept=history[-1])


def search(
    fit: Callable[[PlannedTrial, OnEpoch], Fitted] = line,
    *,
    place: Path | None = None,
    space: Any = SPACE,
    write: Callable[[str], None] | None = None,
    **options: Any,
) -> Search:
    settings = {"trials": 8, "sampler": "random", "pruner": "none", **options}
    chosen = StudyOptions(**settings)
    choose = Chooser(space)
    storage = None if place is None else open_storage(str(place))
    return Search(
        options=chosen,
        study=open_study(chosen, choose.described(), storage),
        choose=choose,
        fit=fit,
        table=TrialTable(chosen, write=write),
        place=storage,
    )


def states(found: Search) -> list[str]:
    return [trial.state.name for trial in found.study.trials]


def test_the_best_model_alone_is_kept(tmp_path: Path) -> None:
    found = search(place=tmp_path)
    found.run()
    assert states(found) == ["COMPLETE"] * 8
    best = found.study.best_trial
    assert best.params["x"] == min(trial.params["x"] for trial in found.study.trials)
    assert found.models == {best.number: f"model {best.number}"}
    kept = json.loads((tmp_path / f"trial-{best.number:05d}" / "trial.json").read_text())
    assert kept["params"] == best.params
    assert kept["values"] == {"val_loss": best.value}
    assert (kept["state"], len(kept["history"])) == ("complete", 9)


def test_asha_ends_what_is_worse_than_a_quarter_of_the_others() -> None:
    epochs: dict[int, int] = {}

    def fit(attempt: PlannedTrial, on_epoch: OnEpoch) -> Fitted:
        def counted(record: Any) -> None:
            epochs[attempt.number] = int(record["epoch"])
            on_epoch(record)

        return line(attempt, counted)

    found = search(fit, pruner="asha", trials=20)
    found.run()
    pruned = [t for t in found.study.trials if t.state.name == "PRUNED"]
    assert len(pruned) >= 10
    assert {epochs[t.number] for t in pruned} <= {1, 4}  # its rungs
    assert found.study.best_trial.params["x"] < 0.3


def test_several_values_give_a_front_and_end_nothing_early() -> None:
    found = search(monitors=("val_loss", "seconds"), modes=("min", "min"), pruner="asha")
    found.run()
    assert states(found) == ["COMPLETE"] * 8
    assert set(found.models) == set(range(8))  # the one falls as the other grows
    both = search(monitors=("val_loss", "seconds"), modes=("min", "max"))
    both.run()
    assert len(both.models) == 1


def test_failures_are_noted_and_what_diverges_teaches_the_sampler(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fit(attempt: PlannedTrial, on_epoch: OnEpoch) -> Fitted:
        if attempt.number == 1:
            raise WorkerError(0, "ValueError", "a bad width\nand more", "traceback")
        if attempt.number == 2:
            on_epoch({"epoch": 1, "val_loss": 3.0})
            raise TrainingDiverged("the loss is nan in step 7")
        if attempt.number == 3:
            raise RuntimeError("of the user's")
        return line(attempt, on_epoch)

    found = search(fit, trials=5)
    found.run()
    assert states(found) == ["COMPLETE", "FAIL", "PRUNED", "FAIL", "COMPLETE"]
    errors = [trial.user_attrs.get(ERROR, "") for trial in found.study.trials]
    assert errors[1].startswith("ValueError on rank 0: a bad width")
    assert errors[2] == "the loss is nan in step 7"
    assert errors[3] == "RuntimeError: of the user's"
    assert found.study.trials[2].intermediate_values == {1: 3.0}
    assert "trial 1 failed: ValueError on rank 0: a bad width" in caplog.text


def test_a_search_whose_first_trials_all_fail_ends() -> None:
    def fit(attempt: PlannedTrial, on_epoch: OnEpoch) -> Fitted:
        raise ConfigError(f"no column {attempt.number}")

    found = search(fit)
    with pytest.raises(TrainingFailed, match=r"first 3 trials have all failed.*no column 2"):
        found.run()
    assert len(found.study.trials) == 3


def test_a_value_that_is_not_measured_ends_the_search_at_once() -> None:
    found = search(monitors=("val_f1",))
    with pytest.raises(UnknownMonitor, match=r"'val_f1', which the history does not have.*seconds"):
        found.run()
    assert len(found.study.trials) == 1


def test_what_was_cut_off_is_tried_again_and_finished_trials_are_not(tmp_path: Path) -> None:
    tried: list[tuple[str, float]] = []

    def fit(attempt: PlannedTrial, on_epoch: OnEpoch) -> Fitted:
        tried.append((attempt.folder, attempt.values["x"]))
        if len(tried) == 3:
            raise KeyboardInterrupt
        return line(attempt, on_epoch)

    with pytest.raises(KeyboardInterrupt):
        search(fit, place=tmp_path, trials=5).run()
    again = search(fit, place=tmp_path, trials=5)
    again.run()
    assert tried[3] == tried[2]  # its values, and its folder of checkpoints
    assert len(tried) == 6
    assert [t.number for t in finished(again.study)] == [0, 1, 3, 4, 5]
    after = search(fit, place=tmp_path, trials=5)
    after.run()
    assert len(tried) == 6


def test_trials_run_at_the_same_time_and_an_end_ends_them_all(tmp_path: Path) -> None:
    together = threading.Barrier(2, timeout=10)
    ended: list[int] = []

    def fit(attempt: PlannedTrial, on_epoch: OnEpoch) -> Fitted:
        together.wait()
        if attempt.number == 1:
            raise SystemExit  # what is no failure of a trial
        try:
            for epoch in range(1, 1000):
                time.sleep(0.01)
                on_epoch({"epoch": epoch, "val_loss": 1.0})
        finally:
            ended.append(attempt.number)
        raise AssertionError("nobody has ended it")

    found = search(fit, parallel=2, place=tmp_path)
    with pytest.raises(SystemExit):
        found.run()
    assert ended == [0]
    assert states(found) == ["RUNNING", "RUNNING"]  # for the next search
    assert list(tmp_path.glob("trial-*")) == []


def test_an_epoch_that_is_seen_twice_is_reported_once() -> None:
    def fit(attempt: PlannedTrial, on_epoch: OnEpoch) -> Fitted:
        for epoch, loss in ((1, 3.0), (2, 9.0), (2, 2.0), (2.5, 4.0), (3, math.nan)):
            on_epoch({"epoch": epoch, "val_loss": loss})
        raise TrainingDiverged("at last")

    found = search(fit, trials=1)
    found.run()
    (trial,) = found.study.trials
    assert trial.intermediate_values == {1: 3.0, 2: 3.0, 3: 2.0}
    assert trial.user_attrs[EPOCHS] == 3


def test_a_trial_without_a_finite_value_has_diverged() -> None:
    def fit(attempt: PlannedTrial, on_epoch: OnEpoch) -> Fitted:
        record = {"epoch": 1, "val_loss": math.nan}
        return Fitted(model=None, history=[record], kept=record)

    found = search(fit, trials=1)
    found.run()
    assert states(found) == ["PRUNED"]
    assert "no finite val_loss" in found.study.trials[0].user_attrs[ERROR]


def test_samplers_and_pruners_of_optunas_may_be_given() -> None:
    sampler = optuna.samplers.NSGAIISampler(seed=3)
    found = search(sampler=sampler, pruner=optuna.pruners.ThresholdPruner(upper=0.5), trials=2)
    found.run()
    assert found.study.sampler is sampler
    assert states(found) == ["PRUNED", "PRUNED"]


def test_another_process_that_works_on_the_study_is_named(tmp_path: Path) -> None:
    def fit(attempt: PlannedTrial, on_epoch: OnEpoch) -> Fitted:
        if attempt.number == 1:
            search(place=tmp_path)  # takes over what it finds unfinished
        return line(attempt, on_epoch)

    with pytest.raises(ConfigError, match=r"another process works on the study 'tune' as well.*1;"):
        search(fit, place=tmp_path).run()
    search(place=tmp_path).run()  # the other goes on unharmed
    with pytest.raises(ConfigError, match="another process works on the study"):
        search(partial(fit_while_another_begins, tmp_path / "p"), place=tmp_path / "p").run()


def fit_while_another_begins(place: Path, attempt: PlannedTrial, on_epoch: OnEpoch) -> Fitted:
    """The study is taken over after the last epoch."""
    fitted = line(attempt, on_epoch)
    search(place=place)
    return fitted


def test_epochs_of_the_fit_that_a_trial_goes_on_from_do_not_count() -> None:
    lines: list[str] = []

    def fit(attempt: PlannedTrial, on_epoch: OnEpoch) -> Fitted:
        history = [{"epoch": epoch, "val_loss": 1.0} for epoch in (3, 4)]
        for record in history:
            on_epoch(record, begun=2)
        return Fitted(model=None, history=history, kept=history[-1])

    found = search(fit, trials=1, write=lines.append)
    found.run()
    assert lines[1].startswith("trial 0 complete after 2 epochs: ")
    (trial,) = found.study.trials
    assert trial.user_attrs[EPOCHS] == 2
    assert set(trial.intermediate_values) == {1, 2}  # what a pruner goes by
