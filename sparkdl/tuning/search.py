"""The loop of a search: it asks Optuna for values, has them tried, and keeps what came of it."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from sparkdl.errors import ConfigError, SparkDLError, TrainingDiverged, TrainingFailed
from sparkdl.runtime.json_values import finite, plain
from sparkdl.spark.frames.shared_spools import SlotQueue
from sparkdl.spark.session import interrupts, termination
from sparkdl.storage.storage import Storage, without_password
from sparkdl.tuning.study import StudyOptions, finished, first_number
from sparkdl.tuning.trial_table import TrialTable

if TYPE_CHECKING:
    import optuna
    from optuna import Study

logger = logging.getLogger(__name__)

ERROR, SHOWN, EPOCHS = "sparkdl: error", "sparkdl: values", "sparkdl: epochs"
"""Attributes of a trial: why it failed, its values as text, and how many epochs it trained."""
_STATES = {"complete": "COMPLETE", "pruned": "PRUNED", "diverged": "PRUNED", "failed": "FAIL"}
"""The ends of a trial, and what each is for Optuna, whose samplers learn from what is pruned."""
_FIRST_FAILURES = 3
"""So many failed trials, and no other, end a search: the fault is not in the values."""

Record: TypeAlias = Mapping[str, float]
OnEpoch: TypeAlias = Callable[..., None]
"""Is given the record of an epoch, and ``begun``, the epochs of the fit that it goes on from."""


@dataclass(frozen=True, kw_only=True)
class PlannedTrial:
    """One trial to train: its name, folder and values."""

    number: int
    name: str
    folder: str
    """For checkpoints; that of the trial that it repeats, if any."""
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The results of a trial that was trained to its end."""

    model: Any
    history: Sequence[Record]
    kept: Record
    """The record of the epoch whose weights the model has."""


Fit: TypeAlias = Callable[[PlannedTrial, OnEpoch], Fitted]


class Pruned(Exception):
    """The other trials are better, so this one ends."""


class CutOff(Exception):
    """The search is ending, so this trial has to end too."""


class UnknownMonitor(ConfigError):
    """No trial can be judged: the history does not have the value."""


def folder_of(number: int) -> str:
    """Folder of a trial."""
    return f"trial-{number:05d}"


@dataclass(kw_only=True)
class Search:
    """Tries one set of values after the other. Its trials run in several threads."""

    options: StudyOptions
    study: Study
    choose: Callable[[Any], Mapping[str, Any]]
    """Draws the values of a trial of Optuna's."""
    fit: Fit
    table: TrialTable
    place: Storage | None = None
    """Storage to which the record of each trial is written."""
    queue: SlotQueue = field(default_factory=SlotQueue)
    """Queue of slots, for which the trials wait."""
    check_alive: Callable[[Exception], None] = lambda error: None
    """Raises if no trial can be tried any more after the error."""

    def __post_init__(self) -> None:
        self.models: dict[int, Any] = {}
        """Number -> model, of the best trial, or of all that no other beats in all values."""
        self._is_ending = threading.Event()
        self._lock = threading.Lock()
        self._failures: float = 0
        """Failed trials, as long as no other has ended; then minus infinity."""

    def run(self) -> None:
        """Try as many values as are left to be tried, so many at a time as the options say.

        What ends this, such as Ctrl-C, leaves the trials that run unfinished in the study, unlike
        `Study.optimize`. Raises TrainingFailed if the first trials have all failed.
        """
        interrupts.listen()
        termination.listen()
        self._presses = interrupts.presses()
        done = finished(self.study)
        if any(trial.state.name != "FAIL" for trial in done):
            self._failures = -math.inf
        left = self.options.trials - len(done)
        if self.options.parallel == 1:
            for _ in range(left):
                self._next()
            return
        with ThreadPoolExecutor(self.options.parallel) as pool:
            running = [pool.submit(self._next_or_end) for _ in range(left)]
            try:
                for trial in as_completed(running):
                    trial.result()
            except BaseException:
                self._end()
                pool.shutdown(wait=False, cancel_futures=True)  # the end of the block waits
                raise

    @property
    def _is_over(self) -> bool:
        return self._is_ending.is_set() or interrupts.presses() > self._presses

    def _end(self) -> None:
        self._is_ending.set()
        self.queue.end()

    def _next_or_end(self) -> None:
        """`_next` of one of several threads: what it raises ends the trials of the others too."""
        try:
            self._next()
        except BaseException:
            self._end()
            raise

    def _next(self) -> None:
        """Ask for values, try them, tell what came of it; raises ConfigError if others do too."""
        from optuna.exceptions import UpdateFinishedTrialError

        if self._is_over:
            raise CutOff
        trial = self.study.ask()
        try:
            record, model = self._try(trial)
            self._tell(trial, record, model)
        except UpdateFinishedTrialError as error:
            raise ConfigError(
                f"another process works on the study {self.options.name!r} as well, and has taken "
                f"over trial {trial.number}; only one at a time may: wait until that has ended, or "
                "give this search another name or storage"
            ) from error

    def _tell(self, trial: optuna.Trial, record: Mapping[str, Any], model: Any) -> None:
        from optuna.trial import TrialState

        state, error = record["state"], record.get("error", "")
        epochs = [float(entry["epoch"]) for entry in record["history"]]
        trial.set_user_attr(SHOWN, finite(record["params"]))
        trial.set_user_attr(EPOCHS, sum(map(float.is_integer, epochs)))
        if error:
            trial.set_user_attr(ERROR, error)
        # Before Optuna knows that it has ended, so that each trial that has ended has its record.
        if self.place is not None:
            text = json.dumps(finite(record), indent=2, allow_nan=False)
            self.place.write(f"{folder_of(trial.number)}/trial.json", text.encode())
        optunas, values = _STATES[state], None
        if state == "complete":
            values = [record["values"][name] for name in self.options.monitors]
        elif self.options.monitor is None:
            optunas = "FAIL"  # Optuna prunes by one value only
        self.study.tell(trial, values, state=TrialState[optunas])
        with self._lock:
            if state == "complete":
                self.models[trial.number] = model
                best = {trial.number for trial in self.study.best_trials}
                self.models = {n: kept for n, kept in self.models.items() if n in best}
            self._failures = self._failures + 1 if state == "failed" else -math.inf
        self.table.end(trial.number, state, record["values"], error)
        if self._failures >= _FIRST_FAILURES:
            raise TrainingFailed(
                f"the first {self._failures:.0f} trials have all failed, so the search ends; the "
                f"last one: {error}"
            )

    def _try(self, trial: optuna.Trial) -> tuple[dict[str, Any], Any]:
        """Train with the values of one trial; its record, and its model if it came to its end."""
        from optuna.exceptions import UpdateFinishedTrialError

        attempt = PlannedTrial(
            number=trial.number,
            name=f"{self.options.name}-{trial.number}",
            folder=folder_of(first_number(trial)),
            values=self.choose(trial),
        )
        params = plain(attempt.values)
        self.table.begin(attempt.number, params)
        watch = _Watch(self, trial)
        error = ""
        try:
            fitted = self.fit(attempt, watch)
            values = {name: watch.value(fitted.kept, name) for name in self.options.monitors}
            if not all(map(math.isfinite, values.values())):
                raise TrainingDiverged(f"the trial has no finite {' and '.join(values)}")
            found = {"values": values, "history": list(fitted.history)}
            return {"params": params, "state": "complete", **found}, fitted.model
        except Pruned:
            state = "pruned"
        except (UnknownMonitor, CutOff, UpdateFinishedTrialError):
            raise
        except Exception as raised:  # whatever the user's code raises for some values
            if self._is_over:
                raise CutOff from raised
            self.check_alive(raised)
            # One that is not ours with its type, which says more.
            of = "" if isinstance(raised, SparkDLError) else f"{type(raised).__name__}: "
            error = without_password(f"{of}{raised}")
            state = "diverged" if isinstance(raised, TrainingDiverged) else "failed"
            logger.warning("trial %d %s: %s", trial.number, state, error.splitlines()[0])
        ended = {"state": state, **({"error": error} if error else {}), **watch.seen()}
        return {"params": params, **ended}, None


class _Watch:
    """Sees the epochs of a trial that the driver hears of, and ends it when it promises nothing."""

    def __init__(self, search: Search, trial: optuna.Trial) -> None:
        self._search = search
        self._trial = trial
        self._records: dict[float, Record] = {}
        self._is_pruned = False
        """True from when the fit shall end; epochs may come until it has."""

    def value(self, record: Record, name: str) -> float:
        """Return a record's value by which trials are judged; raises UnknownMonitor."""
        if name not in record:
            raise UnknownMonitor(
                f"trials are judged by {name!r}, which the history does not have; it has "
                f"{', '.join(record)}; what begins with 'val_' needs validation rows"
            )
        return record[name]

    def seen(self) -> dict[str, Any]:
        """Return what is known of a trial that did not come to its end."""
        history = list(self._records.values())
        last = history[-1] if history else {}
        values = {name: last.get(name, math.nan) for name in self._search.options.monitors}
        if (monitor := self._search.options.monitor) is not None and history:
            values[monitor] = self._best(monitor)
        return {"values": values, "history": history}

    def _best(self, monitor: str) -> float:
        better = min if self._search.options.directions[0] == "min" else max
        values = [self.value(record, monitor) for record in self._records.values()]
        return better(filter(math.isfinite, values), default=math.nan)

    def __call__(self, record: Record, begun: int = 0) -> None:
        """Take note of an epoch, or of an evaluation within one, which prunes nothing.

        ``record`` has its entries of the history; ``begun`` are the epochs of the fit that this one
        goes on from. Raises Pruned, UnknownMonitor or CutOff.
        """
        search = self._search
        if search._is_over:
            raise CutOff
        if self._is_pruned:
            raise Pruned
        epoch = record["epoch"] - begun
        is_repeated = epoch in self._records  # the gang was started again, from a checkpoint
        self._records[epoch] = dict(record)
        values = {name: self.value(record, name) for name in search.options.monitors}
        search.table.epoch(self._trial.number, epoch, values)
        if (monitor := search.options.monitor) is None or is_repeated or epoch != int(epoch):
            return
        if math.isfinite(best := self._best(monitor)):
            self._trial.report(best, step=int(epoch))
            if self._trial.should_prune():
                self._is_pruned = True
                raise Pruned
