"""Ctrl-C ends a fit between two calls to Spark, cancels its jobs, and leaves cleaning up alone."""

from __future__ import annotations

import importlib
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pyarrow as pa
import pytest
from pyspark.util import local_connect_and_auth

from sparkdl.errors import ClusterError, DataError, TrainingFailed
from sparkdl.spark.session import interrupts
from sparkdl.spark.session.interrupts import Cleanup, interruptible, is_in_call, raise_if_asked

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class FakeContext:
    """What a Spark context notes of tags. ``cancelled`` is set as soon as a job is."""

    def __init__(self) -> None:
        self._jsc: Any = MagicMock()
        self.tags: list[str] = []
        self.cancelled = threading.Event()
        self.num_cancelled = 0

    def addJobTag(self, tag: str) -> None:
        self.tags.append(tag)

    def removeJobTag(self, tag: str) -> None:
        self.tags.remove(tag)

    def cancelJobsWithTag(self, tag: str) -> None:
        assert tag in self.tags
        self.num_cancelled += 1
        self.cancelled.set()


class FakeSession:
    def __init__(self) -> None:
        self.sparkContext = FakeContext()


@pytest.fixture
def session() -> Iterator[Any]:
    """Also checks that Python's own handler is back, and that no tag is left."""
    before = signal.getsignal(signal.SIGINT)
    session = FakeSession()
    yield session
    assert signal.getsignal(signal.SIGINT) is before
    assert session.sparkContext.tags == []
    assert interrupts._running == []


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def later(seconds: float = 0.1) -> threading.Thread:
    """Press from another thread, as a user does, once a block has been entered."""

    def wait_and_press() -> None:
        until(lambda: bool(interrupts._running))  # the main thread may be late
        time.sleep(seconds)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=wait_and_press)
    thread.start()
    return thread


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def in_py4j(work: Callable[[], None]) -> None:
    """Run ``work`` as if py4j had called it, in a call that Spark answers."""
    module = types.ModuleType("py4j.clientserver")
    exec("def send_command(work):\n    work()\n", module.__dict__)
    module.__dict__["send_command"](work)


def test_a_press_ends_the_block_and_cancels_its_jobs(session: Any) -> None:
    thread = later()
    told = "interrupted: its Spark jobs were cancelled"
    with pytest.raises(KeyboardInterrupt, match=told), interruptible(session):
        time.sleep(10)
    thread.join()
    until(lambda: not any(t.name == "sparkdl-cancel" for t in threading.enumerate()))


def test_the_message_says_where_it_can_go_on(session: Any) -> None:
    told = "from the newest whole checkpoint in here"
    with pytest.raises(KeyboardInterrupt, match=told), interruptible(session, "here"):
        press()


def test_a_call_to_spark_ends_before_anything_is_raised(session: Any) -> None:
    """And its answer comes, since its job is cancelled."""
    ended: list[str] = []

    def call() -> None:
        press()
        assert session.sparkContext.cancelled.wait(10)
        time.sleep(0.3)  # reminders come meanwhile
        ended.append("call")

    with pytest.raises(KeyboardInterrupt), interruptible(session):
        in_py4j(call)
        time.sleep(10)
        ended.append("too far")
    assert ended == ["call"]


def test_what_the_cancelled_job_raises_is_told_as_an_interrupt(session: Any) -> None:
    def call() -> None:
        press()
        assert session.sparkContext.cancelled.wait(10)
        raise RuntimeError("SPARK_JOB_CANCELLED")

    with pytest.raises(KeyboardInterrupt) as caught, interruptible(session):
        in_py4j(call)
    assert caught.value.__suppress_context__


def test_cleaning_up_is_not_interrupted(session: Any) -> None:
    cleaned: list[str] = []

    def clean() -> None:
        press()
        before = session.sparkContext.num_cancelled
        time.sleep(0.3)
        assert session.sparkContext.num_cancelled == before
        cleaned.append("all")

    with pytest.raises(KeyboardInterrupt), interruptible(session), Cleanup() as stack:
        stack.callback(clean)
        press()
    assert cleaned == ["all"]


def test_a_press_during_the_last_cleaning_up_is_heard_after_it(session: Any) -> None:
    cleaned: list[str] = []
    with pytest.raises(KeyboardInterrupt), interruptible(session), Cleanup() as stack:
        stack.callback(cleaned.append, "all")
        stack.callback(press)
    assert cleaned == ["all"]


def test_who_is_in_a_hurry_has_the_cleaning_up_cut_short(session: Any) -> None:
    """From the third press during it; the last step of it is done nevertheless."""
    context = session.sparkContext
    cleaned: list[str] = []

    def a_job_that_waits_for_a_slot() -> None:
        assert [tag.endswith("-cleaning") for tag in context.tags] == [True]
        context.cancelled.clear()
        press()
        press()
        time.sleep(0.3)
        assert not context.cancelled.is_set()
        assert not interrupts.is_hurried()
        press()
        assert interrupts.is_hurried()
        assert context.cancelled.wait(10)
        cleaned.append("job")

    with pytest.raises(KeyboardInterrupt), interruptible(session), Cleanup() as stack:
        stack.callback(cleaned.append, "rest")
        stack.callback(a_job_that_waits_for_a_slot)
        press()
    assert cleaned == ["job", "rest"]


def _sleep(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    time.sleep(60)
    yield from batches


@pytest.mark.slow
@pytest.mark.spark
def test_what_cleans_up_is_cancelled_by_spark(spark: SparkSession) -> None:
    """As it may wait for slots that something else holds."""
    failed: list[Exception] = []

    def clean() -> None:
        threads.extend(later(seconds) for seconds in (2.0, 2.5, 3.0))
        try:
            spark.range(1).mapInArrow(_sleep, "id long").collect()
        except Exception as error:
            failed.append(error)

    threads: list[threading.Thread] = []
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interruptible(spark), Cleanup() as stack:
        stack.callback(clean)
        press()
    assert time.monotonic() - began < 20
    assert len(failed) == 1
    for thread in threads:
        thread.join()
    assert spark.range(3).count() == 3


def test_reminders_are_no_presses(session: Any) -> None:
    def call() -> None:
        press()
        until(lambda: session.sparkContext.num_cancelled > 5)

    presses = interrupts.presses()
    with pytest.raises(KeyboardInterrupt), interruptible(session):
        in_py4j(call)
        time.sleep(10)
    assert interrupts.presses() == presses + 1


def test_a_press_where_cleaning_up_begins_does_not_keep_it_from_it(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaned: list[str] = []
    find = interrupts._mine

    def pressed() -> Any:
        monkeypatch.setattr(interrupts, "_mine", find)
        press()
        return find()

    with pytest.raises(KeyboardInterrupt), interruptible(session), Cleanup() as stack:
        stack.callback(cleaned.append, "all")
        monkeypatch.setattr(interrupts, "_mine", pressed)
    assert cleaned == ["all"]


def test_a_press_while_a_block_is_entered_ends_it_as_any_other(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixture sees whether anything stays behind."""

    class Pressed(threading.Condition):
        def __exit__(self, *details: Any) -> None:
            super().__exit__(*details)
            if interrupts._running and not session.sparkContext.tags:
                press()

    monkeypatch.setattr(interrupts, "_changed", Pressed())
    with pytest.raises(KeyboardInterrupt), interruptible(session):
        assert session.sparkContext.tags
        time.sleep(10)
        raise AssertionError("nobody has heard it")


def test_a_late_press_does_not_hide_an_error(session: Any) -> None:
    with pytest.raises(KeyboardInterrupt) as caught, interruptible(session), Cleanup() as stack:
        stack.callback(press)
        raise ValueError("bad")
    assert isinstance(caught.value.__cause__, ValueError)


def test_what_fails_because_the_session_has_ended_says_so(session: Any) -> None:
    """pyspark itself raises an AttributeError of None then."""
    ended = pytest.raises(ClusterError, match="the Spark session has ended")
    with ended as caught, interruptible(session):
        session.sparkContext._jsc = None
        raise AttributeError("'NoneType' object has no attribute 'sc'")
    assert isinstance(caught.value.__cause__, AttributeError)
    with ended, interruptible(session):
        pytest.fail("nothing begins in a session that has ended")


def test_an_error_of_ours_is_told_although_the_session_has_ended_since(session: Any) -> None:
    with pytest.raises(DataError, match="no rows"), interruptible(session):
        session.sparkContext._jsc = None
        raise DataError("no rows")


def test_other_errors_stay_what_they_are(session: Any) -> None:
    with pytest.raises(ValueError, match="bad"), interruptible(session), Cleanup():
        raise ValueError("bad")


def test_work_in_another_thread_ends_as_well(session: Any) -> None:
    raised: list[BaseException] = []
    begun = threading.Event()

    def fit() -> None:
        try:
            with interruptible(session), Cleanup():
                begun.set()
                assert session.sparkContext.cancelled.wait(10)  # by a thread that may start late
                raise_if_asked()
        except BaseException as error:
            raised.append(error)

    before = signal.getsignal(signal.SIGINT)
    presses = interrupts.presses()
    interrupts.listen()
    thread = threading.Thread(target=fit)
    try:
        thread.start()
        assert begun.wait(10)
        with pytest.raises(KeyboardInterrupt):
            press()
    finally:
        signal.signal(signal.SIGINT, before)
    with interruptible(session):  # waits until that one has given back what it held
        assert raised
    thread.join()
    assert [type(error) for error in raised] == [TrainingFailed]
    assert interrupts.presses() == presses + 1


def test_without_a_main_thread_the_signal_is_left_alone(session: Any) -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[Any] = []

    def fit() -> None:
        interrupts.listen()
        with interruptible(session):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()
    assert seen == [before]


def test_an_ignored_signal_stays_ignored(session: Any) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible(session):
            press()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_spark_that_is_gone_hides_nothing(
    session: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(tag: str) -> None:
        raise ConnectionRefusedError("gone")

    monkeypatch.setattr(session.sparkContext, "cancelJobsWithTag", gone)

    def call() -> None:
        press()
        until(lambda: "could not cancel Spark's jobs: gone" in caplog.text)

    with pytest.raises(KeyboardInterrupt), interruptible(session):
        in_py4j(call)


def test_the_socket_of_an_answer_is_not_left_open(session: Any) -> None:
    """pyspark opens one to fetch what a job has collected; cut off there, it never closes it."""
    opened: list[Any] = []

    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(100)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert session.sparkContext.cancelled.wait(10)
            time.sleep(0.3)  # reminders come meanwhile
            connection.sendall(b"\0\0\0\x02ok")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=[server])
        thread.start()
        with pytest.raises(KeyboardInterrupt), interruptible(session):
            opened += local_connect_and_auth(server.getsockname()[1], "secret")
            time.sleep(10)
        thread.join()
    assert len(opened) == 2  # it came to its end
    for file in opened:
        file.close()


def test_a_call_is_seen_from_within() -> None:
    found: list[bool] = []
    in_py4j(lambda: found.append(is_in_call(sys._getframe())))
    found.append(is_in_call(sys._getframe()))
    assert found == [True, False]


def test_an_import_is_not_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What KeyboardInterrupt leaves of a package is broken for the rest of the process."""
    (tmp_path / "imported_now.py").write_text(
        "import sys\n"
        "from sparkdl.spark.session.interrupts import is_in_call\n"
        "IN_IMPORT = is_in_call(sys._getframe())\n"
        "namespace = {'__name__': 'sparkdl.spark.fit.fit', 'is_in_call': is_in_call, 'sys': sys}\n"
        "exec('def fit(): return is_in_call(sys._getframe())', namespace)\n"
        "IN_FIT = namespace['fit']()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = importlib.import_module("imported_now")
    assert found.IN_IMPORT
    assert not found.IN_FIT  # a script that is imported, as %run does, may train
