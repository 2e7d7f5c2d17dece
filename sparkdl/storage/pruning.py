"""The removal of checkpoints that nobody will go on from.

A run removes its own older checkpoints, those of its earlier attempts, and those of runs that have
ended. What belongs to a run that is alive, or is ahead of its own newest checkpoint, stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from sparkdl.errors import StorageError
from sparkdl.storage.checkpoint_format import MANIFEST, SHARED, StepFolder, steps_of, writers
from sparkdl.storage.lease import lease_name, read_leases
from sparkdl.storage.storage import Storage, is_definite


def surplus(
    steps: Iterable[StepFolder],
    newest: StepFolder,
    keep: int,
    is_whole: Callable[[StepFolder], bool],
    in_use: Collection[str] = (),
) -> list[StepFolder]:
    """Return what can be removed once ``newest`` is whole, so that ``keep`` whole ones stay.

    ``steps`` are those of the own run and of runs that have ended; others are not touched. Those
    stay from which others began (``in_use``), then the run's own, then the newest of others.
    ``is_whole`` is asked of as few as possible, since it looks into the storage.
    """
    older = [step for step in steps if step.age <= newest.age and step.path != newest.path]
    run_id = newest.writer.run_id
    older.sort(key=lambda step: (step.writer.run_id == run_id, step.order), reverse=True)
    num_kept, gone = 1, []
    for step in older:
        if step.path in in_use:
            continue
        if num_kept < keep and is_whole(step):
            num_kept += 1
        else:
            gone.append(step)
    return gone


def prune(storage: Storage, newest: StepFolder, keep: int) -> None:
    """Remove what is `surplus`, and what runs that have ended left besides.

    The caller has just written ``newest``; ``keep`` whole ones stay. StorageError if the storage
    failed, or, once all else is removed, if something cannot be; CommunicationError if the way to
    it was lost.
    """
    own, key = newest.writer, newest.writer.run_key
    names = storage.list(key)
    leases = read_leases(storage, key, names)
    mine = leases.pop(own.run_id, None)
    if mine is not None and mine.attempt > own.attempt:
        return  # the run goes on in a later attempt, which may need what is old for this one
    alive = {run_id: note for run_id, note in leases.items() if note.is_alive()}
    mortal = [
        writer
        for writer in writers(names, key)
        if writer.run_id not in alive
        and (writer.run_id != own.run_id or writer.attempt <= own.attempt)
    ]
    steps = steps_of(storage, mortal)
    in_use = {note.begun_from for note in alive.values() if note.begun_from is not None}

    def is_whole(step: StepFolder) -> bool:
        # As far as names tell: a writer that was late may have left a manifest without files.
        return {MANIFEST, SHARED} <= set(storage.list(step.path))

    gone = surplus(steps, newest, keep, is_whole, in_use)
    failures: list[StorageError] = []

    @contextmanager
    def later() -> Iterator[None]:
        """Go on behind what cannot be removed, since others may have put it there."""
        try:
            yield
        except StorageError as error:
            if not is_definite(error):
                raise
            failures.append(error)

    for step in gone:
        with later():
            remove(storage, step)
    left = {step.writer for step in steps if step not in gone} | {own}
    for writer in mortal:
        # Others may have put something there, or given a folder of theirs such a name.
        with later():
            if writer not in left and not storage.list(writer.path):
                storage.remove(writer.path)
    for run_id in leases.keys() - alive.keys() - {writer.run_id for writer in left}:
        with later():
            storage.remove(f"{key}/{lease_name(run_id)}")
    if failures:
        raise failures[0]


def remove(storage: Storage, step: StepFolder) -> None:
    """Remove a checkpoint; what is half removed does not look like one."""
    storage.remove(f"{step.path}/{MANIFEST}")
    storage.remove(step.path)
