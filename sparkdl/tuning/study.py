"""A search is kept as a study of Optuna's, and goes on where it ended."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from sparkdl.config import Mode, direction, require
from sparkdl.errors import ConfigError, StorageError, import_or
from sparkdl.storage.storage import LocalStorage, Storage, without_password

if TYPE_CHECKING:
    import optuna
    from optuna import Study
    from optuna.trial import FrozenTrial

logger = logging.getLogger(__name__)

SAMPLERS = ("tpe", "random")
PRUNERS = ("asha", "hyperband", "median", "none")

_REMEDY = "a search for hyperparameters needs Optuna; install it on the driver: pip install optuna"
_BEGUN_WITH = "sparkdl: begun with"
"""Attribute of a study: what makes its trials comparable."""
_REPLACES = "sparkdl: replaces"
"""Attribute of a trial: the numbers of those that were cut off and had its values."""


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """The options of a search; `tune` says what each field means."""

    name: str = "tune"
    trials: int = 20
    parallel: int = 1
    monitors: tuple[str, ...] = ("val_loss",)
    modes: tuple[Mode, ...] = ("auto",)
    sampler: Any = "tpe"
    pruner: Any = "asha"
    seed: int = 0
    storage: Any = None

    def __post_init__(self) -> None:
        for name in ("trials", "parallel"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1", getattr(self, name))
        require(bool(self.monitors), "monitor must name a value of the history", self.monitors)
        if len(self.modes) != len(self.monitors):
            raise ConfigError(
                f"monitor names {len(self.monitors)} values and mode {len(self.modes)} directions; "
                "give one mode for all, or one for each"
            )
        for pair in zip(self.monitors, self.modes, strict=True):
            direction(*pair)
        for what, known in (("sampler", SAMPLERS), ("pruner", PRUNERS)):
            given = getattr(self, what)
            if isinstance(given, str) and given not in known:
                raise ConfigError(
                    f"unknown {what} {given!r}; known: {', '.join(known)}, or pass one of Optuna's"
                )

    @property
    def directions(self) -> tuple[Literal["min", "max"], ...]:
        """Return, of each monitor, whether smaller or larger values are better."""
        return tuple(direction(*pair) for pair in zip(self.monitors, self.modes, strict=True))

    @property
    def monitor(self) -> str | None:
        """The only value that trials are judged by; None: there are several."""
        return self.monitors[0] if len(self.monitors) == 1 else None


def import_optuna() -> Any:
    """Optuna, which logs warnings only; raises ConfigError if it is not installed."""
    with import_or(ConfigError(_REMEDY)):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def make_pruner(given: Any, *, startup_trials: int = 5, warmup_epochs: int = 1) -> Any:
    """One of Optuna's pruners, by its name; the user's own is returned as it is."""
    if not isinstance(given, str):
        return given
    pruners = import_optuna().pruners
    least = max(1, warmup_epochs)
    if given == "asha":
        return pruners.SuccessiveHalvingPruner(min_resource=least)
    if given == "hyperband":
        return pruners.HyperbandPruner(min_resource=least)
    if given == "median":
        return pruners.MedianPruner(n_startup_trials=startup_trials, n_warmup_steps=warmup_epochs)
    return pruners.NopPruner()


def open_study(
    options: StudyOptions,
    space: Any,
    place: Storage | None,
    basis: Mapping[str, Any] = MappingProxyType({}),
) -> Study:
    """The study, new or as an earlier run left it; raises ConfigError if that is another.

    ``basis`` has what trials have in common besides the options and the space, by name: a plain
    value, or a dict with its digest.
    """
    optuna = import_optuna()
    storage = _storage(options.storage, place)
    try:
        study: Study = optuna.create_study(
            study_name=options.name,
            storage=storage,
            pruner=make_pruner(options.pruner),
            directions=[f"{mode}imize" for mode in options.directions],
            load_if_exists=True,
        )
    except Exception as error:  # of the database's driver, or of SQLAlchemy
        where = without_password(str(options.storage))
        raise StorageError(
            f"the study cannot be kept in {where}: {type(error).__name__}: "
            f"{without_password(str(error))}; set storage to a file that can be written, or to the "
            "URL of a database such as sqlite:///study.db"
        ) from error
    _check_same(study, options, space, basis)
    # With the seed alone, a search that goes on would draw its first values again.
    study.sampler = _sampler(options.sampler, options.seed + len(study.trials))
    _queue_cut_off(study)
    return study


def finished(study: Study) -> list[FrozenTrial]:
    """The trials that have come to an end, whichever; not those that were cut off."""
    trials = study.trials
    cut_off = {number for trial in trials for number in trial.user_attrs.get(_REPLACES, ())}
    return [t for t in trials if t.state.is_finished() and t.number not in cut_off]


def first_number(trial: optuna.Trial) -> int:
    """Number under which the values of a trial were tried for the first time."""
    numbers = [*trial.user_attrs.get(_REPLACES, ()), trial.number]
    return int(numbers[0])


def _sampler(given: Any, seed: int) -> Any:
    """One of Optuna's, by its name, or the user's own; ConfigError if it ends studies itself."""
    samplers = import_optuna().samplers
    if isinstance(given, samplers.GridSampler | samplers.BruteForceSampler):
        raise ConfigError(
            f"{type(given).__name__} ends a study by itself, which a search cannot follow; to try "
            "all values use ParamGridBuilder and fitMultiple, or another sampler"
        )
    known = {"tpe": samplers.TPESampler, "random": samplers.RandomSampler}
    return known[given](seed=seed) if isinstance(given, str) else given


def _storage(given: Any, place: Storage | None) -> Any:
    """Optuna's storage: a journal in a local file, or what a URL names; None: memory."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    if given is not None and not isinstance(given, str | Path):
        return given
    where = None if given is None else str(given)
    if where is not None and "://" in where:
        return where
    if where is None:
        if place is None:
            return None
        if not isinstance(place, LocalStorage):
            raise ConfigError(
                f"{place} is not on a local disk, so the study needs a place of its own; set "
                "storage to a local file, or to the URL of a database such as postgresql://..."
            )
        where = str(Path(str(place)) / "study.log")
    try:
        Path(where).parent.mkdir(parents=True, exist_ok=True)
        return JournalStorage(JournalFileBackend(where))
    except OSError as error:
        raise StorageError(
            f"the study cannot be kept in {where}: {error}; set storage to a file that can be "
            "written"
        ) from error


def _check_same(study: Study, options: StudyOptions, space: Any, basis: Mapping[str, Any]) -> None:
    """Refuse to mix trials that cannot be compared."""
    given = {"monitor": options.monitors, "mode": options.directions, "space": space, **basis}
    values: dict[str, Any] = json.loads(json.dumps(given))  # as a storage gives them back
    before: Mapping[str, Any] | None = study.user_attrs.get(_BEGUN_WITH)
    if before is None:
        study.set_user_attr(_BEGUN_WITH, values)
        return
    # Earlier versions of sparkdl have noted less, or knew fewer Params.
    changed = [name for name in values.keys() & before.keys() if before[name] != values[name]]
    if changed:
        differences = [_difference(name, before[name], values[name]) for name in sorted(changed)]
        raise ConfigError(
            f"the study {options.name!r} was begun with {', '.join(differences)}, so its trials "
            "cannot be compared with new ones; choose another name or place (storage or path) for "
            "this study, remove the old one, or go on with what it was begun with"
        )


def _difference(name: str, before: Any, now: Any) -> str:
    """Say what a study was begun with, and what there is now, as far as that can be read."""
    if _is_digest(before):
        return f"other {name}" if name == "rows" else f"another {name}"
    return f"another {name} ({before!r}, now {'another' if _is_digest(now) else repr(now)})"


def _is_digest(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"digest"}


def _queue_cut_off(study: Study) -> None:
    """Have trials tried again, with the same values, that an ended search has left unfinished."""
    from optuna.trial import TrialState

    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        replaced = [*trial.user_attrs.get(_REPLACES, ()), trial.number]
        study.tell(trial.number, state=TrialState.FAIL)
        study.enqueue_trial(trial.params, user_attrs={_REPLACES: replaced})
        logger.warning("trial %d was cut off; its values are tried again", trial.number)
