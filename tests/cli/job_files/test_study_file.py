"""What a job file may say of a search, and the training jobs that follow from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkdl.cli.job_files.job_file import load_job
from sparkdl.cli.job_files.study_file import Space, StudySection, TuneJob, check_search
from sparkdl.config import ExplainOptions
from sparkdl.errors import ConfigError
from sparkdl.sync.population.ranges import Range

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def job() -> TuneJob:
    return load_job(TuneJob, ROOT / "conf" / "tune.toml")


def test_the_file_of_the_project_is_right(job: TuneJob) -> None:
    assert set(job.study.search) == {
        "estimator.learning_rate", "estimator.batch_size", "model.args.dropout"
    }  # fmt: skip
    assert job.study.search["estimator.batch_size"].choices == (16, 32, 64)
    assert job.study.search["estimator.learning_rate"].log


def test_a_trial_is_the_job_with_other_values(job: TuneJob) -> None:
    values = {"estimator.learning_rate": 0.5, "estimator.batch_size": 64, "model.args.dropout": 0.1}
    trial = job.trial(values)
    assert type(trial).__name__ == "TrainJob"
    assert (trial.estimator.learning_rate, trial.estimator.batch_size) == (0.5, 64)
    assert trial.model.args == {"num_classes": 10, "dropout": 0.1}
    assert trial.output == job.output
    assert (trial.data, trial.validation) == (job.data, job.validation)
    assert job.estimator.learning_rate is None  # the job itself is as it was


def test_what_a_search_does_not_do_is_refused(job: TuneJob) -> None:
    with pytest.raises(ConfigError, match=r"\[test\].*jobs/evaluate\.py"):
        replace(job, test=job.data)
    with pytest.raises(ConfigError, match=r"choose another output\.path"):
        replace(job, output=replace(job.output, overwrite=True))
    with pytest.raises(ConfigError, match=r"\[explain\].*jobs/train\.py --explain"):
        replace(job, explain=ExplainOptions(num_rows=1000))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "estimator.lerning_rate",
            "unknown key 'lerning_rate' in .estimator.; did you mean 'learning_rate'",
        ),
        (
            "estimators.epochs",
            "unknown section .estimators.; did you mean 'estimator'",
        ),
        ("study.trials", "unknown section .study."),
        ("estimator.precision", "estimator.precision must be a string; received 7"),
        ("data.path", r"all trials share the section \[data\]"),
        ("validation.fraction", "all trials share"),
        ("spark.master", "all trials share"),
        ("output.path", "all trials share"),
        ("test.path", "all trials share"),
        ("estimator.epochs.more", "epochs is not a table"),
    ],
)
def test_keys_that_cannot_be_varied_are_refused_before_anything_runs(
    job: TuneJob, key: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"study.search, '{key}': .*({message})"):
        replace(job, study=StudySection(search={key: Space(choices=(7,))}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either 'low' and 'high', or 'choices'"),
        ({"low": 1}, "either 'low' and 'high', or 'choices'"),
        ({"low": 1, "high": 2, "choices": (1,)}, "either 'low' and 'high', or 'choices'"),
        ({"choices": (1, 2), "log": True}, "not for 'choices'"),
        ({"low": 3, "high": 2}, "needs low < high; received 3 and 2"),
        ({"low": 1, "high": 2, "log": True, "step": 1}, "either log=True or a step"),
        ({"low": 0, "high": 2, "log": True}, "needs low > 0"),
        ({"low": 0, "high": 2, "step": 0}, "must be a number above 0"),
        ({"low": 0.0, "high": 2.0, "step": -0.5}, "must be a number above 0"),
        ({"low": 0.0, "high": float("inf")}, "needs low < high"),
        ({"choices": (1.0, float("nan"))}, "finite"),
    ],
)
def test_spaces_that_mean_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Space(**options)


def test_a_space_is_what_a_search_takes() -> None:
    assert Space(low=1, high=8, step=2).domain == Range(1, 8, step=2)
    assert Space(low=1e-4, high=0.1, log=True).domain == Range(1e-4, 0.1, log=True)
    assert Space(choices=(16, 32)).domain == (16, 32)


@pytest.mark.parametrize(
    "options",
    [{"trials": 0}, {"parallel": 0}, {"startup_trials": -1}, {"warmup_epochs": -1}, {"search": {}}],
)
def test_numbers_that_mean_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        StudySection(**{"search": {"estimator.seed": Space(low=1, high=2)}, **options})


def test_the_values_of_a_trial_are_checked_without_spark() -> None:
    """What only trials have may be left out elsewhere."""
    search = 'study.search={"model.args.out_features" = {choices = [10]}}'
    settings = ["model.factory=torch.nn:Linear", "model.args={in_features=64}", search]
    file = ROOT / "conf" / "tune.toml"
    assert load_job(TuneJob, file, settings, check_search).study.trials == 12
    wrong = 'study.search={"estimator.learning_rate" = {low = -1.0, high = 1.0}}'
    with pytest.raises(ConfigError, match=r"learning_rate must be positive; received -1\.0"):
        load_job(TuneJob, file, [wrong], check_search)
