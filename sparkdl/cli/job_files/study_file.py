"""The section of a job file about a search for hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from sparkdl.cli.job_files.job_file import TrainJob
from sparkdl.cli.job_files.job_objects import check_training
from sparkdl.cli.job_files.toml_values import build, put, to_tables
from sparkdl.config import ExplainOptions, require
from sparkdl.errors import ConfigError
from sparkdl.sync.population.ranges import Range

Value = str | int | float | bool

_VARIED = ("estimator", "model")
"""Sections that each trial reads anew."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """The values that a key may have: a range of numbers, or a list of choices."""

    low: int | float | None = None
    high: int | float | None = None
    """Last value that is tried. Whole numbers where both ends are."""
    log: bool = False
    """True if the logarithms are spread evenly, as suits learning rates."""
    step: int | float | None = None
    """Distance between the values that are tried."""
    choices: tuple[Value, ...] = ()

    def __post_init__(self) -> None:
        is_range = self.low is not None and self.high is not None
        if is_range == bool(self.choices) or (self.low is None) != (self.high is None):
            raise ConfigError("needs either 'low' and 'high', or 'choices'")
        if self.choices and (self.log or self.step is not None):
            raise ConfigError("'log' and 'step' are for ranges, not for 'choices'")
        numbers = [value for value in self.choices if isinstance(value, int | float)]
        require(all(map(math.isfinite, numbers)), "values must be finite numbers", numbers)
        _ = self.domain  # which checks itself

    @property
    def domain(self) -> Range | tuple[Value, ...]:
        """The values as `tune` takes them."""
        if self.low is None or self.high is None:
            return self.choices
        return Range(self.low, self.high, log=self.log, step=self.step)

    @property
    def first(self) -> Value:
        """A value that a trial may have."""
        return self.choices[0] if self.low is None else self.low


@dataclass(frozen=True, kw_only=True)
class StudySection:
    """``[study]``: the search."""

    search: Mapping[str, Space]
    """Keys of the file, such as ``"estimator.learning_rate"``, in quotes, and their values."""
    trials: int = 20
    """Trials in all, with those of earlier runs of the same study, less those cut off."""
    metric: str = "val_loss"
    """Key of a trial's history. Unless there is ``estimator.early_stopping``, each trial ends with
    the weights of its best epoch, whose value counts."""
    direction: Literal["minimize", "maximize"] = "minimize"
    parallel: int = 1
    """Trials at a time; each takes as many slots as ``estimator.num_workers``."""
    sampler: Literal["tpe", "random"] = "tpe"
    seed: int = 0
    pruner: Literal["asha", "hyperband", "median", "none"] = "asha"
    """``asha`` and ``hyperband`` let the best quarter or third of the trials go on after 1, 4, 16
    or 1, 3, 9 epochs and so on. ``median`` ends a trial whose best value so far is worse than the
    median of the others' at that epoch."""
    startup_trials: int = 5
    """Trials before ``median`` ends any."""
    warmup_epochs: int = 1
    """Epochs of a trial before it may be ended."""
    storage: str | None = None
    """File or URL in which Optuna keeps the study; None: ``study.log`` in the folder of the trials,
    if that is on a local disk. The same study goes on where an earlier run ended or was killed."""
    name: str = "sparkdl"

    def __post_init__(self) -> None:
        if not self.search:
            raise ConfigError("search is empty; name at least one key and its values")
        least = {"trials": 1, "parallel": 1, "startup_trials": 0, "warmup_epochs": 0}
        for name, limit in least.items():
            value = getattr(self, name)
            require(value >= limit, f"{name} must be at least {limit}", value)


@dataclass(frozen=True, kw_only=True)
class TuneJob(TrainJob):
    """A file for ``jobs/tune.py``: a job for ``jobs/train.py``, and what to vary in it."""

    study: StudySection

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.test is not None:
            raise ConfigError(
                "a search leaves the rows of [test] alone; leave that section out, and measure "
                "the best model with jobs/evaluate.py"
            )
        if self.explain != ExplainOptions():
            raise ConfigError(
                "a search explains nothing, so [explain] has no place; leave that section out, and "
                "try jobs/train.py --explain with the same data and model"
            )
        if self.output.overwrite:
            raise ConfigError(
                "a search goes on where an earlier one ended, so output.overwrite has no place; "
                "to begin anew choose another output.path"
            )
        for key, space in self.study.search.items():
            try:
                section = key.partition(".")[0]
                if section in (item.name for item in fields(TrainJob)) and section not in _VARIED:
                    raise ConfigError(
                        f"all trials share the section [{section}], as their rows are read once "
                        "and their session is one; keys of [estimator] and [model] can be varied"
                    )
                self.trial({key: space.first})
            except ConfigError as error:
                raise ConfigError(f"study.search, {key!r}: {error}") from error

    def trial(self, values: Mapping[str, Any]) -> TrainJob:
        """The job without its study and with other values, as ``--set`` would give them."""
        tables = to_tables(self)
        del tables["study"]
        for key, value in values.items():
            put(tables, key.split("."), value)
        return build(TrainJob, tables)


def check_search(job: TuneJob) -> None:
    """Raise ConfigError for wrong values of a trial, as `check_training` does of a job's."""
    check_training(job.trial({key: space.first for key, space in job.study.search.items()}))
