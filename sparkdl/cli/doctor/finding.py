"""What has the doctor found? One line for each thing that was looked at."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from sparkdl.errors import ClusterError, SparkDLError

T = TypeVar("T")
State = Literal["ok", "wrong", "note", "left out"]
_WIDTH = 14


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is known of one thing."""

    subject: str
    state: State
    """``note``: training works, but perhaps not as somebody thinks. ``left out``: it could not be
    looked at, because of something else or because nobody asked for it."""
    text: str
    """What was found; of what is wrong also the remedy."""

    def line(self) -> str:
        """For a terminal."""
        return f"  {self.state:<8} {self.subject:<{_WIDTH}} {self.text}"


def ok(subject: str, text: str) -> Finding:
    """Something is as it should be."""
    return Finding(subject=subject, state="ok", text=text)


def wrong(subject: str, text: str) -> Finding:
    """Something keeps training from working; the text ends with the remedy."""
    return Finding(subject=subject, state="wrong", text=text)


def note(subject: str, text: str) -> Finding:
    """Something that a user may want to know."""
    return Finding(subject=subject, state="note", text=text)


def left_out(subject: str, text: str) -> Finding:
    """Something was not looked at."""
    return Finding(subject=subject, state="left out", text=text)


def checked(subject: str, check: Callable[[], str]) -> Finding:
    """What a check finds: the text that it returns, or the error of ours that it raises."""
    try:
        return ok(subject, check())
    except SparkDLError as error:
        return wrong(subject, str(error))


def bounded(action: Callable[[], T], seconds: float, what: str) -> T:
    """What ``action`` returns, if it does in time.

    It runs in a thread of its own, which is left alone when time is up: what waits in the JVM or
    for a name server cannot be interrupted.

    Raises:
        ClusterError: it has not ended after ``seconds``; ``what`` says what was waited for.
    """
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((action(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=run, daemon=True, name=f"sparkdl-doctor: {what}").start()
    try:
        value, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise ClusterError(f"no answer within {seconds:g} s: {what}") from None
    if error is not None:
        raise error
    result: T = value
    return result
