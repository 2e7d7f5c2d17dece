"""The process beside a worker tells one that computes from one that hangs."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from sparkdl.comm.channel import ChannelClient, ChannelServer, Hub
from sparkdl.worker.reporter import Reporter
from sparkdl.worker.watch_program import Judge, read_order, seen
from sparkdl.worker.watcher import Watcher, _resting, ended_when_hung

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="needs a kernel that has /proc"
)

TIMEOUT = 8.0


def soon(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def is_there(pid: int) -> bool:
    found = seen(pid)
    return found is not None and found[0] != "Z"


@pytest.fixture
def started() -> Iterator[Callable[..., BaseProcess]]:
    """Starts processes, which are ended with the test."""
    processes: list[BaseProcess] = []

    def start(target: Callable[..., Any], *args: Any) -> BaseProcess:
        process = multiprocessing.get_context("spawn").Process(target=target, args=args)
        process.start()
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.join()


def test_what_the_kernel_says() -> None:
    found = seen(os.getpid())
    assert found is not None
    assert found[0] == "R"
    assert abs(found[1] - sum(os.times()[:2])) < 0.5
    assert seen(2**22 + 1) is None
    sleeper = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"])
    try:
        judge = Judge(sleeper.pid)
        soon(lambda: (seen(sleeper.pid) or "?")[0] == "S")
        judge.is_at_work(1.0)
        assert not judge.is_at_work(1.0)  # it sleeps
        sleeper.send_signal(signal.SIGSTOP)
        soon(lambda: (seen(sleeper.pid) or "?")[0] == "T")
        assert not judge.is_at_work(1.0)
    finally:
        sleeper.kill()
        sleeper.wait()
    assert not judge.is_at_work(1.0)  # gone
    assert Judge(os.getpid()).is_at_work(1.0)


def test_an_order_may_come_in_pieces() -> None:
    read, write = os.pipe()
    import marshal

    body = marshal.dumps({"pid": 1})
    for piece in (b"1", b"%d\n" % (len(body) % 10), body[:3], body[3:], b".~"):
        os.write(write, piece)
    assert len(body) // 10 == 1, "the first digit"
    assert read_order(read) == {"pid": 1}
    assert os.read(read, 10) == b".~", "what comes next is left"
    os.close(write)
    assert read_order(read) is None
    os.close(read)


@pytest.mark.slow
def test_it_ends_with_its_block_and_with_its_worker(
    started: Callable[..., BaseProcess], tmp_path: Path
) -> None:
    with Watcher(60.0) as watcher:
        pid = watcher.pid
        assert pid is not None
        soon(lambda: is_there(pid))
        watcher.feed()
    assert not is_there(pid)

    note = tmp_path / "pid"
    worker = started(watched_for_ever, str(note))
    soon(lambda: note.exists() and note.read_text())
    pid = int(note.read_text())
    assert is_there(pid)
    worker.kill()
    soon(lambda: not is_there(pid))


def watched_for_ever(note: str) -> None:
    with Watcher(60.0) as watcher:
        Path(note).write_text(str(watcher.pid))
        time.sleep(600)


def test_a_watcher_that_was_killed_is_no_error() -> None:
    with Watcher(60.0) as watcher:
        assert watcher.pid is not None
        os.kill(watcher.pid, signal.SIGKILL)
        for _ in range(3):
            watcher._next = 0.0
            watcher.feed()
            time.sleep(0.05)


@pytest.fixture
def hub() -> Hub:
    hub = Hub()
    hub.begin(2)
    return hub


@pytest.fixture
def server(hub: Hub) -> Iterator[ChannelServer]:
    server = ChannelServer(hub, bind="127.0.0.1", announce="127.0.0.1")
    yield server
    server.shutdown()


def reports(address: bytes, holds: bool, seconds: float, rank: int = 1) -> None:
    """A worker that falls silent: it holds the GIL, and computes or not."""
    place = pickle.loads(address)
    client = ChannelClient(place)
    with Reporter(client, attempt=2, rank=rank, heartbeat_timeout_seconds=TIMEOUT):
        library = ctypes.PyDLL(None)  # whose functions are called with the GIL held
        if holds:
            library.time.argtypes = [ctypes.c_void_p]
            until = time.monotonic() + seconds
            sys.setswitchinterval(1000.0)  # no other thread gets it between the calls
            while time.monotonic() < until:
                library.time(None)
        else:
            library.usleep.argtypes = [ctypes.c_uint]
            library.usleep(int(seconds * 1e6))
    client.close()


@pytest.mark.slow
def test_a_worker_that_holds_the_gil_and_computes_is_alive(
    hub: Hub, server: ChannelServer, started: Callable[..., BaseProcess]
) -> None:
    worker = started(reports, pickle.dumps(server.address.of_rank(1)), True, 2 * TIMEOUT)
    kinds: list[str] = []
    longest, heard = 0.0, time.monotonic()
    while worker.is_alive():
        if hub.events.empty():
            time.sleep(0.01)
            continue
        event = hub.events.get()
        assert (event.attempt, event.rank) == (2, 1)
        if kinds:
            longest = max(longest, event.received - heard)
        heard = event.received
        kinds.append(event.body["kind"])
        if event.body["kind"] == "log":
            assert "holds the global lock (GIL)" in event.body["lines"][0][1]
    assert worker.exitcode == 0
    assert kinds.count("alive") > 2
    assert kinds.count("log") == 1
    assert longest < TIMEOUT


@pytest.mark.slow
def test_nobody_speaks_for_workers_that_do_nothing(
    hub: Hub, server: ChannelServer, started: Callable[..., BaseProcess]
) -> None:
    """One is stopped, and one waits in C."""
    stopped, _ = (
        started(reports, pickle.dumps(server.address.of_rank(rank)), False, 8 * TIMEOUT, rank)
        for rank in (0, 1)
    )
    heard: set[int] = set()

    def all_have_begun() -> bool:
        while not hub.events.empty():
            heard.add(hub.events.get().rank)
        return heard == {0, 1}

    soon(all_have_begun, 60)
    os.kill(stopped.pid or 0, signal.SIGSTOP)
    time.sleep(1.3 * TIMEOUT)
    while not hub.events.empty():
        assert hub.events.get().body["kind"] != "alive"
    for rank in (0, 1):
        silence = hub.seconds_since_report(2, rank)
        assert silence is not None and silence > TIMEOUT, rank


def task(seconds: float, way: str) -> None:
    if way.startswith("rests"):
        with ended_when_hung(2.0):
            pass
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # between two tasks it may do nothing
    with ended_when_hung(2.0):
        if way == "computes":
            until = time.monotonic() + seconds
            library = ctypes.PyDLL(None)
            library.time.argtypes = [ctypes.c_void_p]
            sys.setswitchinterval(1000.0)
            while time.monotonic() < until:
                library.time(None)
        elif way.endswith("waits in C"):
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        elif way != "rests":
            time.sleep(seconds)  # without the GIL, as a task that waits for its rows


@pytest.mark.slow
def test_tasks_that_hang_are_ended(started: Callable[..., BaseProcess]) -> None:
    """Others that take as long are not."""
    codes = {
        "computes": 0, "sleeps": 0, "waits in C": -signal.SIGKILL, "stopped": -signal.SIGKILL,
        "rests": 0, "rests and waits in C": -signal.SIGKILL,
    }  # fmt: skip
    workers = {way: started(task, 8.0, way) for way in codes}
    stopped = workers["stopped"].pid or 0
    soon(lambda: has_child(stopped), 60)
    time.sleep(0.3)
    os.kill(stopped, signal.SIGSTOP)
    for worker in workers.values():
        worker.join(90)
    assert {way: worker.exitcode for way, worker in workers.items()} == codes


def test_a_process_has_one_watcher_for_its_tasks() -> None:
    def watcher_of_a_task(timeout_seconds: float) -> int | None:
        with ended_when_hung(timeout_seconds):
            assert os.getpid() not in _resting
        return _resting[os.getpid()].pid

    first = watcher_of_a_task(60.0)
    assert first is not None and watcher_of_a_task(60.0) == first
    second = watcher_of_a_task(50.0)
    assert second not in (None, first) and not is_there(first)
    assert second is not None
    os.kill(second, signal.SIGKILL)
    soon(lambda: not is_there(second))
    assert watcher_of_a_task(50.0) not in (None, second)
    with ended_when_hung(50.0), ended_when_hung(50.0):
        pass
    assert watcher_of_a_task(50.0) is not None


def has_child(pid: int) -> bool:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return children.exists() and bool(children.read_text().strip())


def crashes(address: bytes) -> None:
    """The package is found by other means than the path, as in an editable install."""
    sys.path[:] = [one for one in sys.path if not Path(one or ".", "sparkdl").is_dir()]
    place = pickle.loads(address)
    client = ChannelClient(place)
    with Reporter(client, attempt=2, rank=1, heartbeat_timeout_seconds=60.0):
        os.abort()


@pytest.mark.slow
def test_where_a_worker_has_crashed_is_told(
    hub: Hub, server: ChannelServer, started: Callable[..., BaseProcess]
) -> None:
    worker = started(crashes, pickle.dumps(server.address.of_rank(1)))
    worker.join(60)
    assert worker.exitcode == -signal.SIGABRT
    told: list[str] = []

    def crash() -> bool:
        while not hub.events.empty():
            event = hub.events.get()
            if event.body["kind"] == "crash":
                told.append(event.body["text"])
        return bool(told)

    soon(crash, 60)
    assert told[0].startswith("Fatal Python error: Aborted")
    assert "in crashes" in told[0]


@pytest.mark.slow
def test_a_worker_that_was_killed_is_told_by_its_rank(
    hub: Hub, server: ChannelServer, started: Callable[..., BaseProcess]
) -> None:
    worker = started(reports, pickle.dumps(server.address.of_rank(1)), False, 60.0)
    soon(lambda: not hub.events.empty())
    os.kill(worker.pid or 0, signal.SIGKILL)
    told: list[tuple[int, str]] = []

    def lost() -> bool:
        while not hub.events.empty():
            event = hub.events.get()
            if event.body["kind"] == "crash":
                told.append((event.rank, event.body["text"]))
        return bool(told)

    soon(lost, 60)
    assert told == [(1, "")]
