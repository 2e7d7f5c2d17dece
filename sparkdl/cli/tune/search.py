"""A search for hyperparameters: Optuna chooses values, each trial is a fit over one spool."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from pyspark.sql import DataFrame, SparkSession

from sparkdl.cli.job_files.job_objects import make_estimator
from sparkdl.cli.job_files.read_rows import read_training_data
from sparkdl.cli.job_files.study_file import Space, StudySection, TuneJob
from sparkdl.cli.tune.study_storage import finished, first_number, import_optuna, open_study
from sparkdl.errors import ConfigError, SparkDLError
from sparkdl.runtime.json_values import finite
from sparkdl.spark.frames.shared_spools import Spools
from sparkdl.spark.params.stage_metadata import check_place
from sparkdl.storage.hadoop_storage import open_on_driver
from sparkdl.storage.storage import Storage, without_password

if TYPE_CHECKING:
    import optuna
    from optuna import Study

    from sparkdl.estimator import TorchEstimator

logger = logging.getLogger(__name__)

_STATES = {"complete": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
"""The ends of a trial, as ``trial.json`` and as Optuna names them."""

History = Sequence[Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class TuneReport:
    """What a search has found."""

    path: str
    """Folder with a folder for each trial."""
    best: int | None = None
    """Number of the best trial; None: none came to its end."""
    value: float | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    states: Mapping[str, int] = field(default_factory=dict)
    """``complete``, ``pruned``, ``failed`` -> trials."""


def run_tune(job: TuneJob, spark: SparkSession) -> TuneReport:
    """Search, and keep each trial's parameters, history and model.

    Under ``output.path`` each trial has a folder ``trial-00007`` with ``trial.json`` and, if it
    came to its end, ``model``; ``study.json`` and ``study.png`` show the whole. A trial that fails
    does not end the search.

    Raises:
        ConfigError: Optuna is not installed, the study was begun with another search, or no
            storage for it can be chosen.
        DataError: the data cannot be read.
        StorageError: nothing can be written to ``output.path``.
    """
    make_estimator(job)  # what is wrong with the file itself is found before any trial
    check_place(job.output.path, spark)
    place = open_on_driver(spark, job.output.path)
    study = open_study(job.study, place)
    search = _Search(job=job, study=study, rows=read_training_data(spark, job), place=place)
    try:
        search.run(job.study.trials - len(finished(study)))
    finally:
        search.spools.close()
    report = _report(job, study)
    best = None if report.best is None else folder_of(report.best)
    found = {"value": report.value, "params": report.params, "states": report.states}
    _write(place, "study.json", {"best": best, **found})
    from sparkdl.cli.tune.study_plot import plot

    place.write("study.png", plot(job.study, study.trials))
    return report


def folder_of(number: int) -> str:
    """Folder of a trial."""
    return f"trial-{number:05d}"


class _CutOff(Exception):
    """The search is ending, so this trial has to end too."""


@dataclass(frozen=True, kw_only=True)
class _Search:
    """Tries one set of values after the other."""

    job: TuneJob
    study: Study
    rows: DataFrame
    place: Storage
    spools: Spools = field(default_factory=Spools)
    is_ending: threading.Event = field(default_factory=threading.Event)

    def run(self, num_trials: int) -> None:
        """Try so many trials, as many at a time as the file says.

        What ends this, such as Ctrl-C, leaves the trials that run unfinished in the study, from
        where the next search takes them. `Study.optimize` would count them as failed.
        """
        if self.job.study.parallel == 1:
            for _ in range(num_trials):
                self._next()
            return
        with ThreadPoolExecutor(self.job.study.parallel) as pool:
            running = [pool.submit(self._next) for _ in range(num_trials)]
            try:
                for trial in as_completed(running):
                    trial.result()
            except BaseException:
                self.is_ending.set()
                self.spools.queue.end()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _next(self) -> None:
        """Ask for values, try them, and tell what came of it."""
        from optuna.trial import TrialState

        trial = self.study.ask()
        record = self._try(trial)
        # Before Optuna knows, so that each trial that has ended has its record.
        _write(self.place, f"{folder_of(trial.number)}/trial.json", record)
        value = record["value"] if record["state"] == "complete" else None
        self.study.tell(trial, value, state=TrialState[_STATES[record["state"]]])

    def _try(self, trial: optuna.Trial) -> dict[str, Any]:
        """Train with the values of one trial, keep its model, and give what ``trial.json`` says."""
        section = self.job.study
        values = {key: _suggest(trial, key, space) for key, space in section.search.items()}
        watch = _Watch(section, trial, self.is_ending)
        path = f"{self.job.output.path.rstrip('/')}/{folder_of(trial.number)}/model"
        record: dict[str, Any] = {"params": values}
        try:
            one = self.job.trial(values, path, folder_of(first_number(trial)))
            estimator = cast("TorchEstimator", make_estimator(one))
            model = estimator.fit_sharing(self.rows, self.spools, watch)
            record["history"] = history = model.summary.history
            best = best_value(section, history)
            if best is None:
                raise ConfigError(f"no epoch of the trial had a finite {section.metric}")
            record["value"] = best
            record["last"] = history[-1][section.metric]  # of the weights, where none are restored
            model.write().overwrite().save(path)
            return {"state": "complete", **record}
        except import_optuna().TrialPruned:
            return {"state": "pruned", "value": watch.best, "history": watch.history, **record}
        except Exception as error:  # whatever the user's code raises for some values
            if self.is_ending.is_set():
                raise _CutOff from error
            # One that is not ours with its type, which says more.
            of = "" if isinstance(error, SparkDLError) else f"{type(error).__name__}: "
            said = without_password(f"{of}{error}")
            logger.warning("trial %d failed: %s", trial.number, said.splitlines()[0])
            seen = {"value": watch.best, "history": watch.history}
            return {"state": "failed", "error": said, **seen, **record}


def best_value(section: StudySection, history: History) -> float | None:
    """The best value of the study's metric over the epochs; None: none is finite.

    Raises:
        ConfigError: the history does not have the metric.
    """
    for record in history:
        if section.metric not in record:
            raise ConfigError(
                f"study.metric is {section.metric!r}, which the history does not have; it "
                f"has {', '.join(record)}; val_... needs a section [validation]"
            )
    values = [record[section.metric] for record in history]
    better = min if section.direction == "minimize" else max
    return better(filter(math.isfinite, values), default=None)


@dataclass
class _Watch:
    """Sees the epochs of a trial that the driver hears of, and ends it when it promises nothing."""

    section: StudySection
    trial: optuna.Trial
    is_ending: threading.Event
    _records: dict[float, dict[str, float]] = field(default_factory=dict)

    @property
    def history(self) -> list[dict[str, float]]:
        """The epochs that were seen."""
        return list(self._records.values())

    @property
    def best(self) -> float | None:
        """The best of their values."""
        seen = [record for record in self.history if self.section.metric in record]
        return best_value(self.section, seen)

    def __call__(self, record: Mapping[str, float]) -> None:
        """Take note of an epoch, or of an evaluation within one, which prunes nothing.

        Raises:
            optuna.TrialPruned: the other trials are better.
            ConfigError: the history does not have the metric.
        """
        if self.is_ending.is_set():
            raise _CutOff
        epoch = record["epoch"]
        is_repeated = epoch in self._records  # the gang was started again, from a checkpoint
        self._records[epoch] = dict(record)
        best = best_value(self.section, self.history)
        if best is not None and not is_repeated and epoch == int(epoch):
            self.trial.report(best, step=int(epoch))
            if self.trial.should_prune():
                raise import_optuna().TrialPruned


def _suggest(trial: optuna.Trial, key: str, space: Space) -> Any:
    if space.choices:
        return trial.suggest_categorical(key, space.choices)
    low, high = space.low, space.high
    assert low is not None and high is not None
    if space.is_whole:
        step = 1 if space.step is None else int(space.step)
        return trial.suggest_int(key, int(low), int(high), step=step, log=space.log)
    return trial.suggest_float(key, low, high, step=space.step, log=space.log)


def _write(place: Storage, path: str, values: dict[str, Any]) -> None:
    """As JSON, which has no NaN: the learning rate of an optimizer without one, for example."""
    place.write(path, json.dumps(finite(values), indent=2, allow_nan=False).encode())


def _report(job: TuneJob, study: Study) -> TuneReport:
    counts = Counter(trial.state.name for trial in finished(study))
    states = {name: counts[optunas] for name, optunas in _STATES.items()}
    found = TuneReport(path=job.output.path, states=states)
    if not states["complete"]:
        return found
    best = study.best_trial
    return replace(found, best=best.number, value=best.value, params=best.params)
