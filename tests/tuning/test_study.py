"""Where a search is kept, and what may change between two runs of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest

from sparkdl.errors import ConfigError, StorageError
from sparkdl.storage.storage import open_storage
from sparkdl.tuning import study
from sparkdl.tuning.study import StudyOptions, make_pruner, open_study

SPACE = {"learningRate": {"low": 0.1, "high": 0.2}}


@pytest.mark.parametrize(
    ("changes", "space", "what"),
    [
        ({"monitors": ("loss",)}, SPACE, "monitor"),
        ({"modes": ("max",)}, SPACE, "mode"),
        ({}, {"batchSize": [16, 32]}, "space"),
    ],
)
def test_a_study_does_not_go_on_with_what_cannot_be_compared(
    tmp_path: Path, changes: dict[str, Any], space: Any, what: str
) -> None:
    place = open_storage(str(tmp_path))
    open_study(StudyOptions(), SPACE, place)
    open_study(StudyOptions(trials=9, sampler="random", pruner="none"), SPACE, place)
    with pytest.raises(ConfigError, match=rf"another {what}.*choose another name or place"):
        open_study(StudyOptions(**changes), space, place)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 0}, "trials must be at least 1; received 0"),
        ({"parallel": 0}, "parallel must be at least 1; received 0"),
        ({"monitors": ()}, "must name a value"),
        ({"modes": ("minimize",)}, "mode must be 'auto', 'min' or 'max'; received 'minimize'"),
        ({"monitors": ("a", "b")}, "one for each"),
        ({"sampler": "tpo"}, "unknown sampler 'tpo'; known: tpe, random"),
        ({"pruner": "sha"}, "unknown pruner 'sha'; known: asha, hyperband"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StudyOptions(**options)


@pytest.mark.slow
def test_a_database_may_keep_the_study(tmp_path: Path) -> None:
    options = StudyOptions(storage=f"sqlite:///{tmp_path}/study.db")
    open_study(options, SPACE, open_storage(str(tmp_path / "out"))).ask()
    assert (tmp_path / "study.db").exists()
    assert not (tmp_path / "out").exists()
    again = open_study(options, SPACE, None)
    assert [trial.state.name for trial in again.trials] == ["FAIL", "WAITING"]


def test_a_study_is_in_memory_in_a_file_or_where_the_user_says(tmp_path: Path) -> None:
    place = open_storage(str(tmp_path / "out"))
    assert open_study(StudyOptions(), SPACE, None).trials == []
    open_study(StudyOptions(), SPACE, place)
    assert (tmp_path / "out" / "study.log").exists()
    open_study(StudyOptions(storage=tmp_path / "deep" / "study.log"), SPACE, None)
    assert (tmp_path / "deep" / "study.log").exists()
    own = optuna.storages.InMemoryStorage()
    open_study(StudyOptions(storage=own), SPACE, None)
    assert [one.study_name for one in own.get_all_studies()] == ["tune"]


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="set storage to a file"):
        open_study(StudyOptions(storage=str(tmp_path / "file" / "study.log")), SPACE, None)
    with pytest.raises(StorageError, match=r"kept in nosuch://\*+@host: .*sqlite:///study.db"):
        open_study(StudyOptions(storage="nosuch://user:secret@host"), SPACE, None)
    with pytest.raises(ConfigError, match=r"set storage to a local file"):
        open_study(StudyOptions(), SPACE, open_storage("memory://search"))


def test_without_optuna_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ConfigError, match="install it on the driver: pip install optuna"):
        study.import_optuna()


def test_a_sampler_that_ends_a_study_is_refused() -> None:
    sampler = optuna.samplers.GridSampler({"epochs": [1, 2]})
    with pytest.raises(ConfigError, match=r"GridSampler ends a study by itself.*ParamGridBuilder"):
        open_study(StudyOptions(sampler=sampler), SPACE, None)


def test_pruners_begin_after_the_epochs_that_every_trial_has() -> None:
    assert isinstance(make_pruner("asha"), optuna.pruners.SuccessiveHalvingPruner)
    assert make_pruner("asha", warmup_epochs=3)._min_resource == 3
    assert isinstance(make_pruner("hyperband"), optuna.pruners.HyperbandPruner)
    assert isinstance(make_pruner("none"), optuna.pruners.NopPruner)
    assert make_pruner("median", startup_trials=2, warmup_epochs=0)._n_startup_trials == 2
