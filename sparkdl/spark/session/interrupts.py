"""Ctrl-C, or a notebook's stop button, ends a fit so that nothing is left behind.

Python raises KeyboardInterrupt wherever the main thread happens to be. In the middle of a call to
the JVM that is harmful: the job goes on, and py4j would take the late answer for that of the next
call. So while a fit runs, four rules hold:

1. The signal cancels the fit's Spark jobs at once, from a thread of its own.
2. KeyboardInterrupt is raised only while the main thread neither calls Spark nor imports a module,
   which would stay half imported. Until then the cancelling thread sends the signal again.
3. A press of Ctrl-C during the cleaning up takes effect when the cleaning up is over.
4. Three presses during the cleaning up cancel the jobs that clean up.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from pyspark.sql import SparkSession

from sparkdl.errors import SparkDLError, TrainingFailed
from sparkdl.spark.session.compat import cancel_jobs, tag_jobs, untag_jobs
from sparkdl.spark.session.failures import is_spark_error, raise_if_ended, raise_unless_loss

logger = logging.getLogger(__name__)

_CALLS = ("py4j", "grpc", "pyspark.sql.connect", "pyspark.util")
"""Modules that call Spark; such a call must not be interrupted. The last one opens the sockets that
answers come through, and leaves them open where it is cut off."""
_IMPORTS = ("importlib._bootstrap", "_frozen_importlib")
"""Names of the module that imports modules."""
_AGAIN_SECONDS = 0.1
_HURRY_PRESSES = 3
"""Number of presses of Ctrl-C during the cleaning up that cut it short."""
_WAIT_SECONDS = 60.0
"""Longest wait of a new fit for those that are being interrupted."""

_running: list[Interruptible] = []
"""Work that can be interrupted now, in all threads; the innermost of a thread comes last."""
_changed = threading.Condition()
_presses = 0
_before: Any = signal.default_int_handler
"""The handler that Python would have for the signal without us."""


class Interruptible:
    """Work of one thread that Ctrl-C ends. Made by `interruptible`."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._tag = f"sparkdl-{uuid.uuid4().hex[:12]}"
        self.thread = threading.current_thread()
        self.is_asked = False
        """True once it shall end."""
        self.is_late = False
        """True if the user pressed Ctrl-C only while it was cleaning up anyway."""
        self.is_ending = False
        """True while it cleans up: then nothing is cancelled or raised any more."""
        self._cancelling = threading.Lock()
        self._late_presses = 0
        self._is_reminded = False

    def __enter__(self) -> Interruptible:
        with _changed:
            _running.append(self)  # first, so that this call to Spark is not interrupted either
        try:
            tag_jobs(self._spark, self._tag)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._call(untag_jobs, self._cleaning)
        self._leave()

    def _leave(self) -> None:
        with _changed:
            _running.remove(self)
            _changed.notify_all()

    def ask(self) -> None:
        """Have it end; called from the signal's handler."""
        if self.is_ending:
            self._late_presses += 1
            if self._late_presses == _HURRY_PRESSES:
                logger.warning("cleaning up is cut short; files may be left on the executors")
                threading.Thread(target=self._hurry, name="sparkdl-cancel", daemon=True).start()
        if not self.is_asked:
            self.is_asked, self.is_late = True, self.is_ending
            threading.Thread(target=self._cancel, name="sparkdl-cancel", daemon=True).start()

    def took_reminder(self) -> bool:
        """True if the signal came from `_cancel`; the mark is removed."""
        was_reminded, self._is_reminded = self._is_reminded, False
        return was_reminded

    @property
    def is_hurried(self) -> bool:
        """True if the user pressed so often that the cleaning up is cut short."""
        return self._late_presses >= _HURRY_PRESSES

    def end(self) -> None:
        """From now on nothing is raised, and no job is cancelled unless the user is in a hurry."""
        if not self.is_ending:
            self.is_ending = True
            with self._cancelling:
                self._call(untag_jobs, self._tag)
                self._call(tag_jobs, self._cleaning)

    @property
    def _cleaning(self) -> str:
        return f"{self._tag}-cleaning"

    def _call(self, what: Callable[[SparkSession, str], None], tag: str) -> None:
        try:
            what(self._spark, tag)
        except Exception as error:  # as in _cancel; then there are no jobs to be tagged
            logger.info("Spark does not answer any more: %s", error)

    def _hurry(self) -> None:
        """Cancel what cleans up, job by job, until the block has ended."""
        while self in _running:
            self._call(cancel_jobs, self._cleaning)
            time.sleep(_AGAIN_SECONDS)

    def _cancel(self) -> None:
        """Cancel until the thread has noticed: it may be just about to start another job."""
        while True:
            with self._cancelling:
                if self.is_ending:
                    return
                try:
                    cancel_jobs(self._spark, self._tag)
                except Exception as error:  # whatever py4j or gRPC raise where Spark is gone
                    logger.warning("could not cancel Spark's jobs: %s", error)
                if self.thread is threading.main_thread():
                    self._is_reminded = True
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(_AGAIN_SECONDS)


class Cleanup(contextlib.ExitStack):
    """An ExitStack whose closing is not interrupted; for use within `interruptible`."""

    def __exit__(self, *details: Any) -> bool | None:
        mine = _mine()
        if mine is not None:
            mine.end()
        return super().__exit__(*details)


@contextlib.contextmanager
def interruptible(spark: SparkSession, checkpoint_dir: str | None = None) -> Iterator[None]:
    """Let Ctrl-C cancel the Spark jobs of the block and, once they have ended, end the block.

    In the main thread the block then ends in KeyboardInterrupt; in others, which run fits for it,
    in TrainingFailed. Cleaning up belongs into a `Cleanup` within. Raises ClusterError if the
    session has ended, and what `raise_unless_loss` makes of an error of Spark's.
    """
    raise_if_ended(spark)
    _await_interrupted()
    with _handling(), Interruptible(spark) as work:
        try:
            yield
        except BaseException as error:
            work.end()
            if not _must_raise(work):
                if isinstance(error, Exception) and not isinstance(error, SparkDLError):
                    raise_if_ended(spark, error)
                    if is_spark_error(error):
                        raise_unless_loss(error)
                raise
            if work.is_late:
                raise _interrupt(checkpoint_dir) from error
        else:
            work.end()
        if _must_raise(work):
            # Without the traceback of whatever call was cut off.
            raise _interrupt(checkpoint_dir) from None


def _interrupt(checkpoint_dir: str | None) -> KeyboardInterrupt:
    """Return the exception that ends the block, and the process by the signal if nobody catches it.

    torch's compiler, which an optimizer's first step imports, tells at exit what it has compiled,
    and imports a package to do so. The code of that makes Python forget the interrupt, and end with
    status 1. So nothing is told.
    """
    compiler = sys.modules.get("torch._dynamo.utils")
    if compiler is not None:
        atexit.unregister(compiler.dump_compile_times)
    return KeyboardInterrupt(_message(checkpoint_dir))


def listen() -> None:
    """In the main thread: have Ctrl-C end what other threads run in `interruptible`."""
    global _before
    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler) and handler is not _on_signal:
        _before = handler
        signal.signal(signal.SIGINT, _on_signal)


def presses() -> int:
    """Return how often the user has interrupted something so far, since `listen` was called."""
    return _presses


def raise_if_asked() -> None:
    """For threads that wait: raise TrainingFailed if the user has interrupted their work."""
    mine = _mine()
    if mine is not None and mine.is_asked and not mine.is_ending:
        mine.end()
        raise TrainingFailed("interrupted")


def is_interrupted() -> bool:
    """True if the user pressed Ctrl-C before the work of this thread came to its end."""
    mine = _mine()
    return mine is not None and mine.is_asked and not mine.is_late


def is_hurried() -> bool:
    """True if this thread's cleaning up is to be cut short."""
    mine = _mine()
    return mine is not None and mine.is_hurried


def _message(checkpoint_dir: str | None) -> str:
    text = "interrupted: its Spark jobs were cancelled, and its temporary files are being removed"
    if checkpoint_dir is None:
        return text
    return (
        f"{text}; asked for the same again, it goes on from the newest whole checkpoint in "
        f"{checkpoint_dir}, or begins anew if there is none yet (checkpointInterval)"
    )


def _must_raise(work: Interruptible) -> bool:
    return work.is_asked and work.thread is threading.main_thread()


def _mine() -> Interruptible | None:
    thread = threading.current_thread()
    return next((work for work in reversed(_running) if work.thread is thread), None)


def _await_interrupted() -> None:
    """Let fits of other threads that are being interrupted give back their slots first."""
    thread = threading.current_thread()

    def are_gone() -> bool:
        return not any(work.is_asked and work.thread is not thread for work in _running)

    with _changed:
        _changed.wait_for(are_gone, _WAIT_SECONDS)


@contextlib.contextmanager
def _handling() -> Iterator[None]:
    """Handle the signal in the block if this is the main thread; restore the handler after it."""
    before: Callable[..., Any] | Any = None
    if threading.current_thread() is threading.main_thread():
        before = signal.getsignal(signal.SIGINT)
    listen()
    try:
        yield
    finally:
        if callable(before):
            signal.signal(signal.SIGINT, before)


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Handle the signal; Python calls this in the main thread, between two of its instructions."""
    global _presses
    mine = _mine()
    were_reminded = [work.took_reminder() for work in list(_running)]
    if not any(were_reminded):
        _presses += 1
        for work in list(_running):
            work.ask()
    if mine is None:
        _before(number, frame)
    elif not mine.is_ending and not is_in_call(frame) and not _is_ours(frame):
        mine.end()
        raise KeyboardInterrupt


def _is_ours(frame: FrameType | None) -> bool:
    """True if a block is being entered or left, by us and contextlib: that is done as a whole."""
    if frame is not None and frame.f_globals.get("__name__") == contextlib.__name__:
        return True
    while frame is not None:
        if frame.f_globals is globals():
            return True
        frame = frame.f_back
    return False


def is_in_call(frame: FrameType | None) -> bool:
    """True if a call to Spark is under way, or an import that the work has begun."""
    has_work = False
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if any(name == module or name.startswith(f"{module}.") for module in _CALLS):
            return True
        if name in _IMPORTS and not has_work:  # otherwise the work is part of a module's import
            return True
        has_work |= name.startswith("sparkdl.") and frame.f_code.co_name != "<module>"
        frame = frame.f_back
    return False
