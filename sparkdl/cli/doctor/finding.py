"""The doctor's order, and its findings: a line for each thing that was looked at."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

from sparkdl.errors import ClusterError, SparkDLError

T = TypeVar("T")
State = Literal["ok", "wrong", "note", "left out"]
_WIDTH = 14


@dataclass(frozen=True, kw_only=True)
class Order:
    """The things that the doctor is asked to look at."""

    master: str | None = None
    """As in ``[spark]`` of a job file; None: what Spark's configuration says."""
    conf: Mapping[str, str] = field(default_factory=dict)
    checkpoint_dir: str | None = None
    num_workers: int | None = None
    """Workers of the trial; None: as many as `fit` would start, but two if there is room."""
    timeout_seconds: float = 120.0
    """Longest wait for each answer."""


@dataclass(frozen=True)
class Finding:
    """The result for one thing that the doctor checks."""

    state: State
    """``note``: training works, but perhaps not as somebody thinks. ``left out``: it could not be
    looked at, because of something else or because nobody asked for it."""
    subject: str
    text: str
    """Description of what was found; of what is wrong also the remedy."""

    def line(self) -> str:
        """For a terminal."""
        return f"  {self.state:<8} {self.subject:<{_WIDTH}} {self.text}"


ok = partial(Finding, "ok")
wrong = partial(Finding, "wrong")
note = partial(Finding, "note")
left_out = partial(Finding, "left out")


def checked(subject: str, check: Callable[[], object], text: str) -> Finding:
    """``text`` as what was found, unless the check raises an error of ours."""
    try:
        check()
    except SparkDLError as error:
        return wrong(subject, str(error))
    return ok(subject, text)


def bounded(action: Callable[[], T], seconds: float, what: str) -> T:
    """Return the result of ``action``; raises ClusterError if it takes more than ``seconds``.

    It runs in a thread of its own, which is left alone when time is up: what waits in the JVM or
    for a name server cannot be interrupted. ``what`` says what was waited for.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(action())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name=f"sparkdl-doctor: {what}").start()
    if not wait([answer], seconds).done:
        raise ClusterError(f"no answer within {seconds:g} s: {what}")
    return answer.result()
