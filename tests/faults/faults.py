"""What may happen to a cluster, and when: each fault is a context manager that is given its victim.

`Faults` strikes at moments (phase, rank, attempt), from this process and as root, at workers that
wait for it (see `daemon`). What a fault has changed is as before when its block ends.
"""

from __future__ import annotations

import contextlib
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
_NOBODY = "02:00:00:00:00:01"
"""A network address that no host has."""


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

    @property
    def spark_worker(self) -> int:
        """Spark's own process on this host, which starts executors."""
        return parent_of(self.executor)


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


# --- processes -----------------------------------------------------------------------------------


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


@contextmanager
def lose_host(victim: Victim) -> Iterator[None]:
    """Everything on it ends at the same moment, Spark's own process too."""
    first = [victim.spark_worker]
    for pid in [*first, *victim.host.pids()]:
        with contextlib.suppress(ProcessLookupError):
            send(pid, signal.SIGKILL)
    yield


@contextmanager
def stop_worker(victim: Victim) -> Iterator[None]:
    """It stands still (SIGSTOP) until the block ends."""
    send(victim.worker, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            send(victim.worker, signal.SIGCONT)


# --- networks ------------------------------------------------------------------------------------


@contextmanager
def cut_cable(victim: Victim) -> Iterator[None]:
    """Nothing goes to the host or comes from it; neither side is told."""
    host = victim.host
    host.on_switch("bridge", "link", "set", "dev", host.port, "state", "0")
    try:
        yield
    finally:
        host.on_switch("bridge", "link", "set", "dev", host.port, "state", "3")


def deafen(others: Sequence[Host]) -> Fault:
    """What the host sends to ``others`` goes nowhere; what they send arrives."""

    @contextmanager
    def deafened(victim: Victim) -> Iterator[None]:
        host, told = victim.host, [each for each in others if each != victim.host]
        for other in told:
            words = f"ip neigh replace {other.address} lladdr {_NOBODY} nud permanent dev eth0"
            host.run(*words.split())
        try:
            yield
        finally:
            for other in told:
                host.run("ip", "neigh", "del", other.address, "dev", "eth0")

    return deafened


@contextmanager
def slow_link(victim: Victim) -> Iterator[None]:
    """The host sends 2 Mbit/s, and what waits longer than 200 ms is dropped."""
    disc = ["dev", "eth0", "root"]
    limits = ["tbf", "rate", "2mbit", "burst", "4kb", "latency", "200ms"]
    victim.host.run("tc", "qdisc", "add", *disc, *limits)
    try:
        yield
    finally:
        victim.host.run("tc", "qdisc", "del", *disc)


# --- what a host has -----------------------------------------------------------------------------


@contextmanager
def fill_disk(victim: Victim) -> Iterator[None]:
    """Not a byte is left on the host's disk."""
    filler = Path(f"/proc/{victim.host.pid}/root{victim.host.disk}/filler")
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20))
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def freeze(victim: Victim) -> Iterator[None]:
    """No process of the host runs, as on a machine that is suspended (cgroup version 2)."""
    with control_group("cgroup2", victim.host.pids()) as group:
        (group / "cgroup.freeze").write_text("1")
        try:
            yield
        finally:
            (group / "cgroup.freeze").write_text("0")


@contextmanager
def throttle(victim: Victim) -> Iterator[None]:
    """All processes of the host share a tenth of a processor."""
    with control_group("cpu", victim.host.pids()) as group:
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text("10000 100000")
        else:
            (group / "cpu.cfs_period_us").write_text("100000")
            (group / "cpu.cfs_quota_us").write_text("10000")
        yield


@contextmanager
def control_group(controller: str, pids: Sequence[int]) -> Iterator[Path]:
    """A control group with these processes, below the one in which this process is."""
    own = _own_group(controller)
    group = own / f"sparkdl-faults-{os.getpid()}"
    group.mkdir()
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(pid))
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (own / "cgroup.procs").write_text(pid)
        group.rmdir()


def _own_group(controller: str) -> Path:
    """This process's group of a controller of version 1, or of version 2 if there is none."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    groups = [line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for version, found in (("cgroup", controller), ("cgroup2", "")):
        for _, at, kind, options, *_ in mounts:
            if kind != version or (found and found not in options.split(",")):
                continue
            for _, controllers, path in groups:
                if found in controllers.split(","):
                    return Path(at + path)
    raise FileNotFoundError(f"no control groups for {controller}")
