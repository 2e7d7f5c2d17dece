"""What may happen to workers, and when: each fault is a context manager that is given its victim.

`Faults` strikes at moments (phase, rank, attempt), from this process and as root, at workers that
wait for it (see `daemon`). What a fault has changed is as before when its block ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.processes import parent_of
from tests.faults.hosts import Host

_SECONDS = 20.0


@dataclass(frozen=True)
class Victim:
    """The worker that has reached a moment, and what it needs. Process ids are the machine's."""

    host: Host
    worker: int
    step: int = 0
    """Steps it has done."""

    @property
    def executor(self) -> int:
        """The parent of the daemon that has forked the worker."""
        return parent_of(parent_of(self.worker))


Fault = Callable[[Victim], AbstractContextManager[None]]


@dataclass(frozen=True)
class Struck:
    """When a fault began, by the clock of `time.time`, and who it met."""

    moment: str
    at: float
    step: int


class Faults:
    """Strikes at the moments that it is told; a context manager around a fit."""

    def __init__(self, folder: Path, hosts: Sequence[Host]) -> None:
        self.struck: list[Struck] = []
        self._folder = folder
        self._hosts = {host.name: host for host in hosts}
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []
        for path in folder.iterdir():
            path.unlink()

    def at(
        self, phase: str, rank: int, fault: Fault, *, attempt: int = 0, seconds: float | None = None
    ) -> Faults:
        """Strike at this moment; what can be undone is after ``seconds``, or at the block's end."""
        moment = self._folder / f"{phase}-{rank}-{attempt}"
        moment.touch()
        arguments = (moment, fault, seconds)
        self._threads.append(threading.Thread(target=self._watch, args=arguments, daemon=True))
        return self

    def __enter__(self) -> Faults:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(_SECONDS)
        if self._errors and kind is None:
            raise self._errors[0]

    def _watch(self, moment: Path, fault: Fault, seconds: float | None) -> None:
        reached = Path(f"{moment}.reached")
        while not reached.exists():
            if self._over.wait(0.005):
                return
        try:
            here = json.loads(reached.read_text())
            host = self._hosts[here["host"]]
            victim = Victim(host, host.pid_of(here["pid"]), here["step"])
            self.struck.append(Struck(moment.name, time.time(), victim.step))
            with fault(victim):
                Path(f"{moment}.struck").touch()
                self._over.wait(seconds)
        except BaseException as error:
            self._errors.append(error)
        finally:
            Path(f"{moment}.struck").touch()


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal; where it ends the process, return when it has."""
    handle = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(handle, number)
        if number == signal.SIGKILL and not select.select([handle], [], [], _SECONDS)[0]:
            raise AssertionError(f"process {pid} survives SIGKILL")
    finally:
        os.close(handle)


@contextmanager
def kill_worker(victim: Victim) -> Iterator[None]:
    send(victim.worker, signal.SIGKILL)
    yield


@contextmanager
def terminate_worker(victim: Victim) -> Iterator[None]:
    send(victim.worker, signal.SIGTERM)
    yield


@contextmanager
def kill_executor(victim: Victim) -> Iterator[None]:
    send(victim.executor, signal.SIGKILL)
    yield


@contextmanager
def terminate_executor(victim: Victim) -> Iterator[None]:
    send(victim.executor, signal.SIGTERM)
    yield
