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
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from sparkdl.comm.channel import ChannelClient, ChannelServer, Hub
from sparkdl.worker import watch_program
from sparkdl.worker.reporter import Reporter
from sparkdl.worker.watch_program import Judge, read_order, seen
from sparkdl.worker.watcher import Watcher, _resting, ended_when_hung
from tests.control_groups import limited, skip_without

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
        soon(lambda: (seen(sleeper.pid) or "?")[0] == "S")
        time.sleep(0.1)  # now it has come to its own sleep
        judge = Judge(sleeper.pid)
        time.sleep(0.1)
        assert not judge.is_at_work()  # it sleeps
        sleeper.send_signal(signal.SIGSTOP)
        soon(lambda: (seen(sleeper.pid) or "?")[0] == "T")
        assert not judge.is_at_work()
    finally:
        sleeper.kill()
        sleeper.wait()
    assert not judge.is_at_work()  # gone
    own = Judge(os.getpid())
    sum(range(3_000_000))
    assert own.is_at_work()


LOOK = 0.25
"""Seconds between two looks."""


@dataclass
class Thread:
    """What the kernel says of a thread after one look and the next."""

    state: str = "S"
    ran: float = 0.0
    waited: float = 0.0
    turns: int = 0


def judged(
    monkeypatch: pytest.MonkeyPatch,
    *looks: dict[str, Thread],
    state: str = "S",
    cpu: float = 0.0,
    asked: list[str] | None = None,
) -> list[bool]:
    """What becomes of looks at a process that has used so much CPU between two of them.

    Each says what its threads have done since the look before. ``asked`` gets which of them were
    looked at.
    """
    names = [] if asked is None else asked
    totals: dict[str, tuple[float, float, int]] = {"1": (9.0, 9.0, 9)}
    now = 100.0
    states: dict[str, str] = {}

    def seen(process: int | str) -> tuple[str, float]:
        name = str(process).rpartition("/")[2]
        return (states[name], 0.0) if "/" in str(process) else (state, (now - 100) / LOOK * cpu)

    monkeypatch.setattr(watch_program, "seen", seen)

    def slices(pid: int) -> dict[str, tuple[float, float, int]]:
        names.append("all")
        return dict(totals)

    def slice_of(pid: int, thread: str) -> tuple[float, float, int]:
        names.append(thread)
        return totals[thread]

    monkeypatch.setattr(watch_program, "slices", slices)
    monkeypatch.setattr(watch_program, "slice_of", slice_of)
    monkeypatch.setattr(watch_program.time, "monotonic", lambda: now)
    judge, found = Judge(7), list[bool]()
    for look in looks:
        now += LOOK
        for name, did in look.items():
            ran, waited, turns = totals.get(name, (0.0, 0.0, 0))
            totals[name] = ran + did.ran, waited + did.waited, turns + did.turns
            states[name] = did.state
        found.append(judge.is_at_work())
    return found


@pytest.mark.parametrize(
    ("did", "is_at_work"),
    [
        (Thread("S"), False),
        (Thread("D"), False),
        (Thread("R"), True),  # it has waited all the while, or run
        (Thread("R", ran=0.005, waited=0.245, turns=3), True),  # a fiftieth of a processor
        (Thread("S", ran=0.001, waited=0.2, turns=1), True),  # it wanted to say something
        (Thread("R", ran=0.001, waited=0.02, turns=2), False),
        # These look for the global lock each 5 ms: with processors enough, and with too few.
        (Thread("R", ran=0.001, waited=0.002, turns=49), False),
        (Thread("R", ran=0.00008, waited=0.23, turns=4), False),
    ],
)
def test_who_waits_for_a_cpu_is_at_work_and_who_waits_for_a_lock_is_not(
    monkeypatch: pytest.MonkeyPatch, did: Thread, is_at_work: bool
) -> None:
    assert judged(monkeypatch, {"1": did}, {"1": did}) == [is_at_work] * 2
    assert judged(monkeypatch, {"1": did}, state="T") == [False]


def test_threads_that_come_are_judged_from_their_second_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new = Thread("R", ran=0.005, waited=0.245, turns=3)
    assert judged(monkeypatch, {"1": Thread()}, {"2": new}, {"2": new}) == [False, False, True]


def test_the_thread_that_was_at_work_is_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at many threads takes more than a watcher may get beside a busy worker."""
    asked: list[str] = []
    busy = Thread("R", ran=0.005, waited=0.245, turns=3)

    def work(*looks: dict[str, Thread]) -> list[bool]:
        asked.clear()
        return judged(monkeypatch, {"1": Thread(), "2": Thread()}, *looks, asked=asked)

    assert work({"2": busy}, {"2": busy}, {"2": busy}) == [False, True, True, True]
    assert asked == ["all", "all", "all", "2", "2"]
    assert work({"2": busy}, {"1": busy, "2": Thread()}, {"1": busy}) == [False, True, True, True]
    assert asked == ["all", "all", "all", "2", "all", "1"]
    assert work({"2": busy}, {"2": Thread()}) == [False, True, False]


def test_all_of_a_process_may_be_at_work_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, {"1": Thread()}, cpu=0.04) == [True]
    assert judged(monkeypatch, {"1": Thread()}, cpu=0.02) == [False]


def test_what_it_imports_to_speak_is_little() -> None:
    """It may have no more than a fiftieth of a processor to share with its worker."""
    program = (
        "import sys; sys.path[:] = sys.argv[1:]; import sparkdl.comm.channel; "
        "sys.exit(bool({'pyarrow', 'numpy', 'torch', 'pyspark'} & set(sys.modules)))"
    )
    command = [sys.executable, "-I", "-S", "-c", program, *Watcher(1.0)._order["path"]]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.slow
def test_a_worker_and_its_watcher_may_share_a_fiftieth_of_a_processor(
    hub: Hub, server: ChannelServer, started: Callable[..., BaseProcess]
) -> None:
    skip_without("cpu")
    ranks = {1: True, 2: False}
    workers = {
        rank: started(reports, pickle.dumps(server.address.of_rank(rank)), holds, 600.0, rank, 4.0)
        for rank, holds in ranks.items()
    }
    soon(lambda: all(hub.seconds_since_report(2, rank) is not None for rank in ranks), 60)
    time.sleep(3.0)  # the watchers are ready
    with limited("cpu", [pid for one in workers.values() for pid in family(one.pid or 0)]):
        time.sleep(1.0 + TIMEOUT)  # one holds the lock and computes, and one waits with it
        while not hub.events.empty():
            hub.events.get()
        last, longest = time.monotonic(), 0.0
        until = last + 2 * TIMEOUT
        while time.monotonic() < until:
            while not hub.events.empty():
                event = hub.events.get()
                assert (event.rank, event.body["kind"]) in {(1, "alive"), (1, "log")}
                longest, last = max(longest, event.received - last), event.received
            time.sleep(0.05)
        assert max(longest, time.monotonic() - last) < TIMEOUT


def family(pid: int) -> list[int]:
    """A process and its children."""
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


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


def reports(address: bytes, holds: bool, seconds: float, rank: int = 1, lives: float = 0.0) -> None:
    """A worker that ``lives`` and then falls silent: it holds the GIL, and computes or not."""
    place = pickle.loads(address)
    client = ChannelClient(place)
    with Reporter(client, attempt=2, rank=rank, heartbeat_timeout_seconds=TIMEOUT):
        time.sleep(lives)
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
