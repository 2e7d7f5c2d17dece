"""The program of the small process that looks after one worker: does it still live?

A worker cannot say that it is there while a call into C holds Python's global lock (GIL), nor while
it gets no CPU. So a process of its own looks at it from outside, by what the kernel says of it.
`watcher.Watcher` starts it as ``python -I -S``, without site-packages, which is quick and small;
what it needs to reach the driver is imported when the worker has lived for a while, since the two
may share too little of a CPU. It ends with the worker. If that has crashed, it tells the driver
where, as Python's faulthandler has written it down.
"""

from __future__ import annotations

import marshal
import os
import select
import sys
import time

TYPE_CHECKING = False  # typing takes long to import
if TYPE_CHECKING:
    from typing import Any

BYE = b"!"
"""Byte that a worker writes that ends as it should."""
REST = b"~"
"""Byte that it writes between two tasks, when it is Spark's turn to say something."""
LOOKS = 20
"""Number of looks within the time-out."""
_PATIENCE, _LEAST_PATIENCE_SECONDS = 1 / 6, 1.0
"""Part of the time-out for which the worker may say nothing, before one speaks in its place."""
_SHARE, _LEAST_SECONDS = 0.1, 0.035
"""Part of a processor that a process must use to count as being at work; to wait takes a little,
too: each thread that waits for the global lock wakes every 5 ms, which takes about a hundredth."""
_WANTED = 0.5
"""Part of the time for which a thread must run, or wait for a processor, for the same."""
_LEAST_SLICE_SECONDS = 1e-4
"""A thread that runs for less at a time, on average, only looks for the global lock again and
again, which takes 10 to 50 microseconds; where there are too few processors, it waits for one each
time."""
_USER, _SYSTEM = 10, 11
"""Positions of the process's own time among what follows its name and state."""


def seen(pid: int | str) -> tuple[str, float] | None:
    """State and seconds of CPU of a process; None: there is none, or the system does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 # pathlib is slow to import
            # The name, in parentheses, may hold anything.
            state, *rest = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    ticks = int(rest[_USER]) + int(rest[_SYSTEM])
    return state.decode(), ticks / os.sysconf("SC_CLK_TCK")


def slice_of(pid: int, thread: str) -> tuple[float, float, int] | None:
    """Return what a thread got of the CPUs; None: it has ended, or the kernel does not say it.

    Seconds for which it ran, and for which it waited for that, and how often it was its turn. What
    it waits for now counts when its turn has come.
    """
    try:
        with open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as file:  # noqa: PTH123
            ran, waited, turns = map(int, file.read().split())
    except OSError:
        return None
    return ran / 1e9, waited / 1e9, turns


def slices(pid: int) -> dict[str, tuple[float, float, int]]:
    """Return what each thread of a process got of the CPUs."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
    except OSError:
        return {}
    found = {thread: slice_of(pid, thread) for thread in threads}
    return {thread: one for thread, one in found.items() if one is not None}


class Judge:
    """Judges from look to look whether a process is at work, from when it has fallen silent.

    A look at all threads of a worker that has many takes more than the process that looks may get
    of a busy CPU, so the thread that was at work before is looked at first.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.begin()

    def begin(self) -> None:
        """Take note of the first look."""
        found = seen(self._pid)
        self._at, self._cpu_seconds = time.monotonic(), 0.0 if found is None else found[1]
        self._first = slices(self._pid)
        self._before = {thread: (self._at, one) for thread, one in self._first.items()}
        self._busy: str | None = None

    def is_at_work(self) -> bool:
        """True if it has used the CPU since the last look, or waited for nothing but a CPU."""
        found, now = seen(self._pid), time.monotonic()
        if found is None:
            return False
        state, cpu_seconds = found
        seconds, self._at = now - self._at, now
        used, self._cpu_seconds = cpu_seconds - self._cpu_seconds, cpu_seconds
        if state in "TtZX":
            return False
        if used >= max(_SHARE * seconds, _LEAST_SECONDS):
            return True
        if self._busy is not None:
            one = slice_of(self._pid, self._busy)
            if one is not None and self._wants_to_run(self._busy, one):
                return True
        present = slices(self._pid)
        if not present:  # the kernel does not count turns
            return state == "R"
        wanting = [thread for thread, one in present.items() if self._wants_to_run(thread, one)]
        self._busy = wanting[0] if wanting else None
        return bool(wanting)

    def _wants_to_run(self, thread: str, present: tuple[float, float, int]) -> bool:
        """True if the thread has run, or waited for a CPU, since it was looked at last."""
        ran, waited, turns = present
        # Threads that have come since are judged from their second look.
        first_ran, _, first_turns = self._first.setdefault(thread, present)
        at, before = self._before.get(thread, (self._at, present))
        self._before[thread] = self._at, present
        if at == self._at:
            return False
        if turns == before[2]:  # it has slept, or waited, or run, all the while
            found = seen(f"{self._pid}/task/{thread}")
            is_wanting = found is not None and found[0] == "R"
        else:
            is_wanting = ran + waited - sum(before[:2]) >= _WANTED * (self._at - at)
        return is_wanting and ran - first_ran >= _LEAST_SLICE_SECONDS * (turns - first_turns)


class Speaker:
    """Reports in place of a worker that cannot."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._client: Any = None
        self._has_explained = False

    def prepare(self) -> None:
        """Import what it needs to reach the driver, once; that takes a tenth of a second of CPU."""
        if self._client is not None:
            return
        import pickle

        sys.path[:] = self._order["path"]  # the worker's own
        from sparkdl.comm.channel import ChannelClient

        self._client = ChannelClient(pickle.loads(self._order["address"]), timeout_seconds=10.0)

    def speak(self, silent_seconds: float) -> None:
        """Tell the driver that the worker is alive; why it is silent, once."""
        events: list[dict[str, Any]] = [{"kind": "alive"}]
        if not self._has_explained:
            self._has_explained = True
            line = (
                f"Python does not get to run here for {silent_seconds:.0f} s now, although the "
                "process computes or waits for a CPU: a call into C holds the global lock (GIL), "
                "or other processes take the CPU; it counts as alive"
            )
            events.append({"kind": "log", "lines": [(20, line)]})
        self.report(events)

    def report(self, events: list[dict[str, Any]]) -> None:
        """Send events as the worker would; an absent driver is no error."""
        self.prepare()
        from sparkdl.errors import CommunicationError

        order = self._order
        try:
            self._client.report(attempt=order["attempt"], rank=order["rank"], events=events)
        except CommunicationError:  # as for the worker itself; a next report is tried
            return


def watch(pipe: int, order: dict[str, Any]) -> None:
    """Look after the worker until it closes the pipe; ``order`` is what `Watcher` has made."""
    pid, timeout = order["pid"], order["timeout_seconds"]
    pause = timeout / LOOKS
    patience = max(_PATIENCE * timeout, _LEAST_PATIENCE_SECONDS)
    judge, speaker = Judge(pid), Speaker(order)
    is_silent, still = False, 0
    began = heard = time.monotonic()
    next_look = began + pause
    while True:
        if select.select([pipe], [], [], max(0.0, next_look - time.monotonic()))[0]:
            said = os.read(pipe, 65536)
            if said.endswith(BYE):
                return
            if not said:
                tell_of_crash(order, speaker)
                return
            if said.endswith(REST):
                while not select.select([pipe], [], [], pause)[0]:
                    if os.getppid() != pid:  # a process that it has forked keeps the pipe open
                        return
                next_look = time.monotonic() + pause
            is_silent, heard = False, time.monotonic()
            continue
        now = time.monotonic()
        next_look = now + pause  # its own pauses count for one look
        if order["address"] is not None and now - began >= patience:
            speaker.prepare()
        if not is_silent:
            is_silent, still = True, 1
            judge.begin()
            continue
        is_at_work = judge.is_at_work()
        still = 0 if is_at_work else still + 1
        if order["address"] is not None:
            if is_at_work and now - heard >= patience:
                speaker.speak(now - heard)
        elif still >= LOOKS:
            end(pid, timeout)
            return


def tell_of_crash(order: dict[str, Any], speaker: Speaker) -> None:
    """Report that a worker is gone without a word, and where it has crashed, if it says that."""
    file = order["crash_file"]
    text = b"" if file is None else os.pread(file, 20_000, 0)
    if order["address"] is not None:
        speaker.report([{"kind": "crash", "text": text.decode(errors="replace")}])


def end(pid: int, timeout_seconds: float) -> None:
    """End a worker that hangs, so that Spark runs its task again."""
    import signal

    sys.stderr.write(
        f"sparkdl: process {pid} has not run for {timeout_seconds:g} s "
        "(spark.sparkdl.heartbeatTimeout), so it is ended; Spark runs its task again "
        "unless spark.task.maxFailures forbids it\n"
    )
    sys.stderr.flush()
    if os.getppid() == pid:  # else it has ended meanwhile, and the number may be another's
        os.kill(pid, signal.SIGKILL)


def read_order(pipe: int) -> dict[str, Any] | None:
    """Read what the worker writes first: a length in decimal digits, a line's end, and the order.

    It takes nothing of what comes next: a short task is over before this process has started.
    """
    head = body = b""
    while not head.endswith(b"\n"):
        piece = os.read(pipe, 1)
        if not piece:
            return None
        head += piece
    while len(body) < int(head):
        piece = os.read(pipe, int(head) - len(body))
        if not piece:
            return None
        body += piece
    order: dict[str, Any] = marshal.loads(body)
    return order


if __name__ == "__main__":
    given = read_order(0)
    if given is not None:
        watch(0, given)
