"""`tune`: a search for the hyperparameters of an estimator that train best, and its result."""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sparkdl.config import EarlyStopping, Mode
from sparkdl.errors import ConfigError, TrainingFailed, import_or
from sparkdl.runtime.arguments import plain_arguments
from sparkdl.runtime.json_values import finite, plain
from sparkdl.runtime.tracebacks import plainly
from sparkdl.spark.frames.shared_spools import Spools
from sparkdl.spark.frames.user_data import spark_frame, user_data
from sparkdl.spark.params.stage_metadata import check_place
from sparkdl.spark.session.failures import raise_if_ended
from sparkdl.storage.hadoop_storage import open_on_driver
from sparkdl.sync.population.population import Competition
from sparkdl.tuning.basis import digest_of_rows, params_in_common
from sparkdl.tuning.search import (
    EPOCHS,
    ERROR,
    SHOWN,
    Fitted,
    OnEpoch,
    PlannedTrial,
    Search,
    folder_of,
)
from sparkdl.tuning.space import Chooser, Space, with_values
from sparkdl.tuning.study import StudyOptions, finished, import_optuna, open_study
from sparkdl.tuning.trial_table import make_table, plot

if TYPE_CHECKING:
    import pandas as pd
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial
    from pyspark.sql import DataFrame

    from sparkdl.data.source import Source
    from sparkdl.estimator import _TorchEstimator
    from sparkdl.model import TorchModel

E = TypeVar("E", bound="_TorchEstimator")


@plain_arguments
@plainly
def tune(
    estimator: E,
    space: Space,
    dataset: DataFrame | Source,
    *,
    trials: int = 20,
    parallel: int = 1,
    monitor: str | Sequence[str] = "val_loss",
    mode: Mode | Sequence[Mode] = "auto",
    sampler: str | BaseSampler = "tpe",
    pruner: str | BasePruner = "asha",
    seed: int = 0,
    name: str = "tune",
    storage: str | Path | BaseStorage | None = None,
    path: str | None = None,
) -> TuneResult[E]:
    """Search for the values of an estimator's Params that train best.

    Optuna chooses the values. Each trial is a fit, and all trials that need the same columns share
    one spool. A trial that promises nothing ends early, and its slots go to the next one. A trial
    that fails is noted, and the search goes on; it ends if the first three all fail.

    Example::

        found = sparkdl.tune(
            classifier,
            {"learningRate": sparkdl.Range(1e-4, 1e-1, log=True), "batchSize": [16, 32, 64]},
            train,
            trials=30,
        )
        found.best_model.transform(test)

    Args:
        estimator: what is trained; its Params hold where the space says nothing. Unless it has
            ``earlyStopping``, each trial ends with the weights of its best epoch.
        space: a dict from Params to their values: a `Range`, an `Around`, or a list of values.
            ``optimizerParams.momentum`` is an entry of a Param that is a dict,
            ``syncStrategy.averaging_period`` a field of one that is an object, and
            ``module.width`` an argument of the function or class that makes the module. Or a
            function that gets a trial of Optuna's, and returns a dict from Params to values.
        dataset: as for ``fit``.
        trials: trials in all, with those of earlier runs of the same study.
        parallel: trials at a time, as far as there are slots for them.
        monitor: key of the history by which trials are judged; several give a Pareto front, and
            no trial ends early.
        mode: whether smaller (``"min"``) or larger values (``"max"``) are better; one for all, or
            for each. ``"auto"`` goes by the name, see `EarlyStopping.mode`.
        sampler: ``"tpe"``, ``"random"``, or a sampler of Optuna's.
        pruner: ``"asha"``, ``"hyperband"``, ``"median"``, ``"none"``, or a pruner of Optuna's. It
            sees the best value of a trial after each of its epochs.
        seed: of the sampler.
        name: of the study; trials are called ``tune-0``, ``tune-1`` and so on.
        storage: where Optuna keeps the study, from which the same search goes on: a file, a URL
            such as ``sqlite:///study.db``, or a storage of Optuna's. None: ``study.log`` in
            ``path``, otherwise memory.
        path: folder or URL in which each trial's record and model are kept, with a plot of all.

    Returns:
        The best estimator and model, all trials, and the study.

    Raises:
        ConfigError: the space or an option is wrong, found before any trial; Optuna is not
            installed; or the study was begun with another search, other Params or other rows.
        DataError: the data is none that can be trained on.
        StorageError: the study or the trials cannot be kept.
        TrainingFailed: the first three trials have failed, or no trial came to its end.
    """
    monitors = (monitor,) if isinstance(monitor, str) else tuple(monitor)
    options = StudyOptions(
        name=name,
        trials=trials,
        parallel=parallel,
        monitors=monitors,
        modes=(mode,) * len(monitors) if isinstance(mode, str) else tuple(mode),
        sampler=sampler,
        pruner=pruner,
        seed=seed,
        storage=storage,
    )
    chooser = Chooser(space, estimator)
    return tune_made(partial(with_values, estimator), chooser, dataset, options, path)


def tune_made(
    make: Callable[[Mapping[str, Any]], E],
    chooser: Chooser,
    dataset: DataFrame | Source,
    options: StudyOptions,
    path: str | None,
) -> TuneResult[E]:
    """`tune`, with a function that makes the estimator of a trial from its values."""
    optuna = import_optuna()
    if path is not None:
        with import_or(ConfigError(f"tune draws a plot in {path}: pip install matplotlib")):
            import matplotlib  # noqa: F401
    dataset = spark_frame(dataset)
    data = user_data(dataset)
    # An unknown name is found before any trial. The values are the same in each process.
    first = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)).ask()
    values = chooser(first)
    sample = make(values)
    if data.source is None:
        _check_validation(sample, options)
    place = None
    if path is not None:
        check_place(path, data.spark)
        place = open_on_driver(data.spark, path)
    basis: dict[str, Any] = {}
    if place is not None or options.storage is not None:  # a later search may go on
        basis = params_in_common(sample, values)
        if (rows := digest_of_rows(sample, data)) is not None:
            basis["rows"] = rows
    study = open_study(options, chooser.described(), place, basis)
    spools = Spools()

    def fit(attempt: PlannedTrial, on_epoch: OnEpoch) -> Fitted:
        estimator = trial_estimator(make(attempt.values), attempt, options)
        watched = partial(on_epoch, begun=epochs_before(estimator))
        model = estimator.fit_sharing(dataset, spools, watched)
        if path is not None:
            model.write().overwrite().save(_model_path(path, attempt.number))
        summary = model.summary
        assert summary.weights_of is not None  # the run has at least one epoch
        return Fitted(model=model, history=summary.history, kept=summary.weights_of.values)

    table = make_table(options, verbose=sample.value("verbose"))
    for old in finished(study):
        value = None if options.monitor is None else old.value
        table.earlier(old.number, old.user_attrs.get(SHOWN, {}), _state(old), value)
    search = Search(
        options=options,
        study=study,
        choose=chooser,
        fit=fit,
        table=table,
        place=place,
        queue=spools.queue,
        check_alive=partial(raise_if_ended, data.spark),
    )
    try:
        search.run()
    finally:
        spools.close()
    result = TuneResult(
        study=study, options=options, path=path, models=search.models, make=make, chooser=chooser
    )
    result._require_front()
    if place is not None:
        text = json.dumps(finite(result.to_dict()), indent=2, allow_nan=False)
        place.write("study.json", text.encode())
        place.write("study.png", plot(options, study.trials))
    return result


@dataclass(frozen=True, kw_only=True)
class TrialResult(Generic[E]):
    """One trial that came to its end."""

    number: int
    """Its place in the study, from 0."""
    name: str
    """Name of the trial, ``tune-7`` for example."""
    params: Mapping[str, Any]
    """Its values by Param."""
    values: Mapping[str, float]
    """Values that it was judged by, of the epoch whose weights its model has."""
    _result: TuneResult[E] = field(repr=False)
    """Result that it belongs to."""

    @property
    def estimator(self) -> E:
        """The estimator with the trial's values."""
        return self._result.make(self.params)

    @property
    def model_path(self) -> str | None:
        """The place where the trial's model is kept; None: nowhere."""
        path = self._result.path
        return None if path is None else _model_path(path, self.number)

    @property
    def model(self) -> TorchModel:
        """The trial's model.

        Raises:
            ConfigError: an earlier search has trained it, and did not keep it.
        """
        result = self._result
        if self.number in result.models:
            model: TorchModel = result.models[self.number]
            return model
        if self.model_path is None:
            raise ConfigError(
                f"{self.name} was trained by an earlier search, which did not keep its model; fit "
                "its estimator again, or give tune a path in which models are kept"
            )
        estimator = self.estimator
        factory = getattr(estimator.value("module"), "func", estimator.value("module"))
        package = str(getattr(factory, "__module__", type(factory).__module__)).partition(".")[0]
        reader: Any = estimator._model_class.read()
        loaded: TorchModel = reader.trusting(package).load(self.model_path)
        return loaded


@dataclass(frozen=True, kw_only=True, repr=False)
class TuneResult(Generic[E]):
    """The results of `tune`.

    With one value to judge by, ``best_...`` tell of the best trial. With several, ``front`` has the
    trials that no other beats in all of them.
    """

    study: Study
    """Optuna's own object, for its plots and its importances."""
    options: StudyOptions
    """Options that say what was searched for, and how."""
    path: str | None
    """Place where the trials are kept, if anywhere."""
    models: Mapping[int, Any]
    """Number of a trial -> model; of the best ones that were trained in this process."""
    make: Callable[[Mapping[str, Any]], E]
    """Makes the estimator of a trial from its values."""
    chooser: Chooser
    """Gives the values of a trial of the study."""

    @property
    def front(self) -> list[TrialResult[E]]:
        """The best trial; with several values to judge by all that no other beats in all values."""
        trials = self.study.best_trials if self.options.monitor is None else [self.study.best_trial]
        return [self._found(trial) for trial in trials]

    @property
    def best(self) -> TrialResult[E]:
        """The best trial.

        Raises:
            ConfigError: there are several values to judge by.
        """
        if self.options.monitor is None:
            raise ConfigError(
                f"trials were judged by {' and '.join(self.options.monitors)}, so none is the "
                "best; choose one of result.front"
            )
        return self.front[0]

    @property
    def best_params(self) -> Mapping[str, Any]:
        """The best values by Param."""
        return self.best.params

    @property
    def best_value(self) -> float:
        """The value that the best trial has reached."""
        return next(iter(self.best.values.values()))

    @property
    def best_estimator(self) -> E:
        """The estimator with the best values."""
        return self.best.estimator

    @property
    def best_model(self) -> TorchModel:
        """The model of the best trial; see `TrialResult.model`."""
        return self.best.model

    @property
    def trials(self) -> pd.DataFrame:
        """A table with a row for each trial that has ended, also in earlier runs of the study."""
        import pandas as pd

        return pd.DataFrame(self._rows())

    def to_dict(self) -> dict[str, Any]:
        """The best trials, and how many trials ended in which way, as plain values."""
        states = [row["state"] for row in self._rows()]
        found = [
            {"trial": t.number, "values": dict(t.values), "params": plain(t.params)}
            for t in self.front
        ]
        return {
            "best": found,
            "states": {state: states.count(state) for state in sorted({*states})},
        }

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                "number": trial.number,
                "name": self._name(trial),
                "state": _state(trial),
                **dict(zip(self.options.monitors, trial.values or (), strict=False)),
                **trial.user_attrs.get(SHOWN, {}),
                "epochs": trial.user_attrs.get(EPOCHS),
                "seconds": None if (spent := trial.duration) is None else spent.total_seconds(),
                "error": trial.user_attrs.get(ERROR, ""),
            }
            for trial in finished(self.study)
        ]

    def _name(self, trial: FrozenTrial) -> str:
        return f"{self.options.name}-{trial.number}"

    def _found(self, trial: FrozenTrial) -> TrialResult[E]:
        return TrialResult(
            number=trial.number,
            name=self._name(trial),
            params=self.chooser(trial),
            values=dict(zip(self.options.monitors, trial.values, strict=True)),
            _result=self,
        )

    def _require_front(self) -> None:
        """Raise TrainingFailed, with what the last failure said, if no trial came to its end."""
        rows = self._rows()
        if not any(row["state"] == "complete" for row in rows):
            said = [row["error"] for row in rows if row["error"]]
            last = f"; the last failure: {said[-1]}" if said else ""
            raise TrainingFailed(f"none of {len(rows)} trials came to its end{last}")

    def __repr__(self) -> str:
        found = self.to_dict()
        states = ", ".join(f"{number} {state}" for state, number in found["states"].items())
        lines = [f"TuneResult of {self.options.name}: {states}"]
        for trial in found["best"]:
            values = ", ".join(f"{name} {value:.6g}" for name, value in trial["values"].items())
            params = ", ".join(f"{name}={value!r}" for name, value in trial["params"].items())
            lines.append(f"  trial {trial['trial']}: {values}; {params}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        table: str = self.trials.to_html(index=False, float_format="%.5g", na_rep="")
        return f"<pre>{html.escape(repr(self))}</pre>{table}"


def _state(trial: FrozenTrial) -> str:
    names = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
    return names[trial.state.name]


def _model_path(path: str, number: int) -> str:
    return f"{path.rstrip('/')}/{folder_of(number)}/model"


def _check_validation(estimator: _TorchEstimator, options: StudyOptions) -> None:
    """Raise ConfigError if trials are judged by validation rows, of which a DataFrame has none."""
    has_rows = any(
        estimator.value(name) for name in ("validationIndicatorCol", "validationFraction")
    )
    wanted = [name for name in options.monitors if name.startswith("val_")]
    if wanted and not has_rows and not isinstance(estimator.value("syncStrategy"), Competition):
        raise ConfigError(
            f"trials are judged by {wanted[0]!r}, which needs validation rows; set "
            "validationFraction=0.1, mark some with validationIndicatorCol, or set monitor='loss'"
        )


def epochs_before(estimator: _TorchEstimator) -> int:
    """Epochs of the fit that ``initialState`` goes on from; the history counts on from there."""
    initial = estimator.value("initialState")
    return 0 if initial is None else int(initial.read()[1].epoch)


def trial_estimator(estimator: E, attempt: PlannedTrial, options: StudyOptions) -> E:
    """The estimator with what belongs to the trial rather than to its values."""
    own: dict[str, Any] = {}
    if estimator.value("verbose") == 1:
        own["verbose"] = 0  # the table shows the trials
    if estimator.hasParam("runName"):
        own["runName"] = attempt.name
    if folder := estimator.value("checkpointDir"):
        own["checkpointDir"] = f"{folder.rstrip('/')}/{attempt.folder}"
    monitor = options.monitor or ""
    is_restorable = monitor == "loss" or monitor.startswith("val_")
    if isinstance(estimator.value("syncStrategy"), Competition):
        is_restorable = False  # its result is the best member at the end
    if estimator.value("earlyStopping") is None and is_restorable:
        # The weights of the best epoch, of all epochs.
        own["earlyStopping"] = EarlyStopping(
            monitor=monitor, mode=options.modes[0], patience=sys.maxsize
        )
    return estimator._set(**own)
