"""Callbacks that harm their own worker once, at a given step, on a given rank."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkdl.spark.cluster.probe import ProbeTask
from sparkdl.spark.frames.spool_task import SpoolTask
from sparkdl.train.callbacks import Callback, CallbackState
from tests.cluster.processes import parent_of


def executor_pid() -> int:
    """The executor JVM of this Python worker: the parent of the daemon that forked it."""
    return parent_of(os.getppid())


@dataclass
class Fault(Callback):
    """Strikes once: a marker file, with the worker's number, tells later attempts that it has."""

    marker: str
    rank: int
    step: int

    def on_step_end(self, state: CallbackState) -> None:
        if state.rank != self.rank or state.step != self.step:
            return
        try:
            with Path(self.marker).open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return
        self.strike()

    def strike(self) -> None:
        raise NotImplementedError


class KillWorker(Fault):
    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class StopWorker(Fault):
    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class KillExecutor(Fault):
    def strike(self) -> None:
        os.kill(executor_pid(), signal.SIGKILL)
        time.sleep(30)


@dataclass
class KillWorkerSoon(Fault):
    """Kills the worker some milliseconds later, while it does something else."""

    delay_seconds: float = 0.0

    def strike(self) -> None:
        threading.Timer(self.delay_seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


class Fail(Fault):
    def strike(self) -> None:
        raise ArithmeticError("the user's own mistake")


@dataclass
class ComputeInC(Fault):
    """Computes in C with Python's global lock held, in another thread than the main one.

    So the worker can say nothing, and its main thread sleeps.
    """

    seconds: float = 18.0

    def strike(self) -> None:
        thread = threading.Thread(target=compute_in_c, args=(self.seconds,))
        thread.start()
        thread.join()


def compute_in_c(seconds: float) -> None:
    library = ctypes.PyDLL(None)  # whose functions are called with the lock held
    library.time.argtypes = [ctypes.c_void_p]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # no other thread gets it between the calls
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        library.time(None)
    sys.setswitchinterval(interval)


class LeaveQuietly(Fault):
    def strike(self) -> None:
        os._exit(0)


@dataclass(frozen=True, kw_only=True)
class StoppingSpoolTask(SpoolTask):
    """Spools, but the first worker to write is stopped, once."""

    marker: str

    def _write(self, *arguments: Any) -> Any:
        summary = super()._write(*arguments)
        stop_once(self.marker)
        return summary


@dataclass(frozen=True, kw_only=True)
class StoppingProbeTask(ProbeTask):
    """Answers, but the first worker that is asked is stopped, once."""

    struck: str

    def _storage(self) -> dict[str, object]:
        stop_once(self.struck)
        return super()._storage()


def stop_once(marker: str) -> None:
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGSTOP)


@dataclass
class Slow(Callback):
    """Makes every step last, so that there is time to look; or those up to one."""

    seconds: float = 0.02
    last_step: float = math.inf

    def on_step_end(self, state: CallbackState) -> None:
        if state.step <= self.last_step:
            time.sleep(self.seconds)


@dataclass
class Meets(Callback):
    """Waits in its first step until another fit has taken one, too."""

    own: str
    other: str
    """Files that say so."""

    def on_step_end(self, state: CallbackState) -> None:
        own, other = Path(self.own), Path(self.other)
        if not own.exists():
            own.touch()
            until = time.monotonic() + 60
            while not other.exists() and time.monotonic() < until:
                time.sleep(0.01)


@dataclass
class WaitsForOthers(Callback):
    """A gang of fewer than three takes its time, so that it can grow, until the file is there."""

    marker: str
    pause_seconds: float

    def on_step_end(self, state: CallbackState) -> None:
        deadline = time.monotonic() + self.pause_seconds
        while state.world_size < 3 and time.monotonic() < deadline:
            if Path(self.marker).exists():
                return
            time.sleep(0.1)


class Straggle(Fault):
    """Takes long, as on a slow host, without being hung: Spark may run the task a second time."""

    def strike(self) -> None:
        time.sleep(12)
