"""How does a job search for hyperparameters? Optuna chooses, each trial is a fit over one spool."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pyspark.sql import DataFrame, SparkSession

from sparkdl.checkpoint.storage import LocalStorage, Storage, without_password
from sparkdl.errors import ConfigError, SparkDLError
from sparkdl.job import read_training_data
from sparkdl.jobobjects import make_estimator
from sparkdl.spark.hadoop import open_on_driver
from sparkdl.spark.sharing import Spools
from sparkdl.studyfile import Space, StudySection, TuneJob

if TYPE_CHECKING:
    import optuna
    from optuna import Study

    from sparkdl.estimator import TorchEstimator

logger = logging.getLogger(__name__)

_REMEDY = "a search needs Optuna and matplotlib; install them: pip install 'sparkdl-torch[tune]'"


@dataclass(frozen=True, kw_only=True)
class TuneReport:
    """What a search has found."""

    path: str
    """Folder with a folder for each trial."""
    best: int | None
    """Number of the best trial; None: none came to its end."""
    value: float | None
    params: Mapping[str, Any] = field(default_factory=dict)
    states: Mapping[str, int] = field(default_factory=dict)
    """``complete``, ``pruned``, ``failed`` -> trials."""


def run_tune(job: TuneJob, spark: SparkSession) -> TuneReport:
    """Search, and keep each trial's parameters, history and model.

    Under ``output.path`` each trial has a folder ``trial-00007`` with ``trial.json`` and, if it
    came to its end, ``model``; ``study.json`` and ``study.png`` show the whole. A trial that fails
    does not end the search.

    Raises:
        ConfigError: Optuna is not installed, or no storage for the study can be chosen.
        DataError: the data cannot be read.
        StorageError: nothing can be written to ``output.path``.
    """
    make_estimator(job)  # what is wrong with the file itself is found before any trial
    place = open_on_driver(spark, job.output.path)
    study = _study(job, place)
    rows = read_training_data(spark, job)
    spools = Spools()
    try:
        _go_on(study)
        left = job.study.trials - sum(trial.state.is_finished() for trial in study.trials)
        study.optimize(
            partial(_try_one, job, rows, place, spools),
            n_trials=max(0, left),
            n_jobs=job.study.parallel,
            catch=(SparkDLError,),
        )
    finally:
        spools.close()
    report = _report(job, study)
    from sparkdl.studyplot import plot

    place.write("study.png", plot(job.study, study.trials))
    place.write("study.json", json.dumps(report_values(report), indent=2).encode())
    return report


def report_values(report: TuneReport) -> dict[str, Any]:
    """The report as values of JSON."""
    return {
        "best": None if report.best is None else folder_of(report.best),
        "value": report.value,
        "params": dict(report.params),
        "states": dict(report.states),
    }


def folder_of(number: int) -> str:
    """Folder of a trial."""
    return f"trial-{number:05d}"


def _optuna() -> Any:
    try:
        import matplotlib  # noqa: F401  # for the plot at the end
        import optuna
    except ImportError as error:
        raise ConfigError(_REMEDY) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _study(job: TuneJob, place: Storage) -> Study:
    """The study, new or from its storage."""
    optuna = _optuna()
    section = job.study
    samplers = {
        "tpe": partial(optuna.samplers.TPESampler, seed=section.seed),
        "random": partial(optuna.samplers.RandomSampler, seed=section.seed),
    }
    pruner = optuna.pruners.NopPruner()
    if section.pruner == "median":
        pruner = optuna.pruners.MedianPruner(
            n_startup_trials=section.startup_trials, n_warmup_steps=section.warmup_epochs
        )
    study: Study = optuna.create_study(
        study_name=section.name,
        storage=_storage(section, place),
        sampler=samplers[section.sampler](),
        pruner=pruner,
        direction=section.direction,
        load_if_exists=True,
    )
    return study


def _storage(section: StudySection, place: Storage) -> Any:
    """Optuna's storage: a journal in a local file, or what a URL names."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    where = section.storage
    if where is not None and "://" in where:
        return where
    if where is None:
        if not isinstance(place, LocalStorage):
            raise ConfigError(
                f"{place} is not on a local disk, so the study needs a place of its own; set "
                "study.storage to a local file, or to the URL of a database such as "
                "postgresql://..."
            )
        where = str(Path(str(place)) / "study.log")
    Path(where).parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(where))


def _go_on(study: Study) -> None:
    """Have trials that a killed search has left behind tried again, with the same values."""
    from optuna.trial import TrialState

    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
        study.enqueue_trial(trial.params)
        logger.warning("trial %d was cut off; it is tried again", trial.number)


def _try_one(
    job: TuneJob, rows: DataFrame, place: Storage, spools: Spools, trial: optuna.Trial
) -> float:
    """Train with the values of one trial.

    Raises:
        optuna.TrialPruned: the others are better.
        SparkDLError: it failed.
    """
    values = {key: _suggest(trial, key, space) for key, space in job.study.search.items()}
    folder = folder_of(trial.number)
    watch = _Watch(job.study, trial)
    told: dict[str, Any] = {"params": values, "state": "failed"}
    try:
        path = f"{job.output.path.rstrip('/')}/{folder}/model"
        estimator = cast("TorchEstimator", make_estimator(job.trial(values, path)))
        model = estimator.fit_sharing(rows, spools, watch)
        told["state"] = "complete"
        model.write().overwrite().save(path)
        return watch.value()
    except SparkDLError as error:
        told["error"] = without_password(str(error))
        logger.warning("trial %d failed: %s", trial.number, told["error"].splitlines()[0])
        raise
    except _optuna().TrialPruned:
        told["state"] = "pruned"
        raise
    finally:
        told |= {"value": watch.best, "history": watch.history}
        place.write(f"{folder}/trial.json", json.dumps(told, indent=2).encode())


class _Watch:
    """Sees a trial's epochs, and ends it when it promises nothing."""

    def __init__(self, section: StudySection, trial: optuna.Trial) -> None:
        self._section = section
        self._trial = trial
        self.best: float | None = None
        self.history: list[dict[str, float]] = []

    def __call__(self, record: Mapping[str, float]) -> None:
        """Take note of an epoch."""
        self.history.append(dict(record))
        value = record.get(self._section.metric)
        if value is None:
            raise ConfigError(
                f"study.metric is {self._section.metric!r}, which the history does not have; it "
                f"has {', '.join(record)}; val_... needs a section [validation]"
            )
        if math.isfinite(value):
            better = min if self._section.direction == "minimize" else max
            self.best = value if self.best is None else better(self.best, value)
        if self.best is not None:
            self._trial.report(self.best, step=int(record["epoch"]))
            if self._trial.should_prune():
                raise _optuna().TrialPruned

    def value(self) -> float:
        """What the trial has come to.

        Raises:
            ConfigError: no epoch had a finite value.
        """
        if self.best is None:
            raise ConfigError(f"no epoch of the trial had a finite {self._section.metric}")
        return self.best


def _suggest(trial: optuna.Trial, key: str, space: Space) -> Any:
    if space.choices:
        return trial.suggest_categorical(key, space.choices)
    low, high = space.low, space.high
    assert low is not None and high is not None
    if space.is_whole:
        step = 1 if space.step is None else int(space.step)
        return trial.suggest_int(key, int(low), int(high), step=step, log=space.log)
    return trial.suggest_float(key, low, high, step=space.step, log=space.log)


def _report(job: TuneJob, study: Study) -> TuneReport:
    from optuna.trial import TrialState

    names = {
        TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"
    }  # fmt: skip
    states = dict.fromkeys(names.values(), 0)
    for trial in study.trials:
        if trial.state in names:
            states[names[trial.state]] += 1
    best = study.best_trial if states["complete"] else None
    return TuneReport(
        path=job.output.path,
        best=None if best is None else best.number,
        value=None if best is None else best.value,
        params={} if best is None else best.params,
        states=states,
    )
