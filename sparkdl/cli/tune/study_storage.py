"""A search is kept as a study of Optuna's, and goes on where it ended."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.cli.job_files.study_file import StudySection
from sparkdl.errors import ConfigError, StorageError, import_or
from sparkdl.storage.storage import LocalStorage, Storage

if TYPE_CHECKING:
    import optuna
    from optuna import Study
    from optuna.trial import FrozenTrial

logger = logging.getLogger(__name__)

_REMEDY = "a search needs Optuna and matplotlib; install them: pip install optuna matplotlib"
_BEGUN_WITH = "sparkdl: begun with"
"""Attribute of a study: what makes its trials comparable."""
_REPLACES = "sparkdl: replaces"
"""Attribute of a trial: the numbers of those that were cut off and had its values."""


def import_optuna() -> Any:
    """Optuna, which logs warnings only.

    Raises:
        ConfigError: it is not installed, or matplotlib is not.
    """
    with import_or(ConfigError(_REMEDY)):
        import matplotlib  # noqa: F401  # for the plot at the end
        import optuna
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_study(section: StudySection, place: Storage) -> Study:
    """The study, new, or as an earlier run left it with its unfinished trials in the queue.

    Raises:
        ConfigError: it was begun with another search, or there is no place to keep it.
        StorageError: that place cannot be made.
    """
    optuna = import_optuna()
    pruner = optuna.pruners.NopPruner()
    if section.pruner == "median":
        pruner = optuna.pruners.MedianPruner(
            n_startup_trials=section.startup_trials, n_warmup_steps=section.warmup_epochs
        )
    study: Study = optuna.create_study(
        study_name=section.name,
        storage=_storage(section, place),
        pruner=pruner,
        direction=section.direction,
        load_if_exists=True,
    )
    _check_same(study, section)
    samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    # With the seed alone, a search that goes on would draw its first values again.
    study.sampler = samplers[section.sampler](seed=section.seed + len(study.trials))
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
    try:
        Path(where).parent.mkdir(parents=True, exist_ok=True)
        return JournalStorage(JournalFileBackend(where))
    except OSError as error:
        raise StorageError(
            f"the study cannot be kept in {where}: {error}; set study.storage to a file that can "
            "be written"
        ) from error


def _check_same(study: Study, section: StudySection) -> None:
    """Refuse to mix trials that cannot be compared."""
    search = {key: asdict(space) for key, space in section.search.items()}
    values = {"metric": section.metric, "direction": section.direction, "search": search}
    values = json.loads(json.dumps(values))  # as a storage gives them back
    before = study.user_attrs.get(_BEGUN_WITH)
    if before is None:
        study.set_user_attr(_BEGUN_WITH, values)
        return
    changed = [name for name, value in values.items() if before[name] != value]
    if changed:
        raise ConfigError(
            f"the study {section.name!r} was begun with another study.{changed[0]}, so its trials "
            f"cannot be compared with new ones; it was {before[changed[0]]}; set study.name and "
            "output.path to others, or the value to what it was"
        )


def _queue_cut_off(study: Study) -> None:
    """Have trials tried again, with the same values, that an ended search has left unfinished."""
    from optuna.trial import TrialState

    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        replaced = [*trial.user_attrs.get(_REPLACES, ()), trial.number]
        study.tell(trial.number, state=TrialState.FAIL)
        study.enqueue_trial(trial.params, user_attrs={_REPLACES: replaced})
        logger.warning("trial %d was cut off; its values are tried again", trial.number)
