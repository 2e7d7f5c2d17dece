"""Errors travel between processes as they are."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from sparkdl import errors
from sparkdl.errors import (
    CheckpointError,
    CheckpointLost,
    CollectiveError,
    CommunicationError,
    ConfigError,
    ConfigErrors,
    DataError,
    GangError,
    ShardLost,
    SparkDLError,
    StorageError,
    WorkerError,
    import_or,
)

ALL = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, Exception)
]


@pytest.mark.parametrize(
    "message", ["no", "", "two\n\nparagraphs", "a: b: c", "x\n\nTraceback of rank 1:\nfake"]
)
def test_a_worker_error_survives_pickle(message: str) -> None:
    error = WorkerError(3, "ValueError", message, "Traceback ...\nValueError\n", "node-7")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is WorkerError
    assert str(again) == str(error)
    assert (again.rank, again.host) == (3, "node-7")
    assert "\n\nTraceback of rank 3 on host node-7:\n" in str(again)
    assert again.error_type == "ValueError"
    assert again.worker_traceback == error.worker_traceback


def test_a_worker_error_shows_message_and_traceback_once() -> None:
    text = str(WorkerError(1, "KeyError", "'x'", "Traceback (most recent call last):\n  file\n"))
    assert text.startswith("KeyError on rank 1: 'x'\n\nTraceback of rank 1:\nTraceback (most")
    assert text.count("Traceback (most recent call last)") == 1
    assert not text.endswith("\n")
    assert str(WorkerError(1, "KeyboardInterrupt", "", "its own")).startswith(
        "KeyboardInterrupt on rank 1\n\nTraceback of rank 1:"
    )


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind is not WorkerError])
def test_every_error_survives_pickle(kind: type[Exception]) -> None:
    what: Any = "what, and what to do"
    made = kind([ConfigError(what)]) if kind is ConfigErrors else kind(what)
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is kind
    assert str(again) == "what, and what to do"


def test_one_base_and_the_builtin_types_that_users_expect() -> None:
    assert len(ALL) >= 11
    assert all(issubclass(kind, SparkDLError) for kind in ALL)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(DataError, ValueError)
    assert issubclass(CheckpointError, StorageError)
    assert {k for k in ALL if issubclass(k, GangError)} == {
        GangError,
        CommunicationError,
        CollectiveError,
        CheckpointLost,
        ShardLost,
    }


def test_a_broken_package_is_not_taken_for_a_missing_one() -> None:
    error = ConfigError("this needs a package")
    with pytest.raises(ConfigError, match=r"^this needs a package$"), import_or(error):
        raise ModuleNotFoundError("no module")
    message = "a package; what is installed is broken: no libx"
    with pytest.raises(ConfigError, match=message), import_or(error):
        raise ImportError("no libx")


def test_what_a_terminal_would_obey_is_shown_and_not_sent() -> None:
    """Texts of files stand in errors."""
    given = 'the key "\x1b[31mé\ud800\x07" of\ta file\nis odd'
    for error in (StorageError(given), WorkerError(0, "ValueError", given, "", "h")):
        text = str(error)
        assert 'the key "\\x1b[31mé\\ud800\\x07" of\ta file\nis odd' in text
        assert text.encode().decode() == text
    again = pickle.loads(pickle.dumps(StorageError(given)))
    assert str(again) == str(StorageError(given))
