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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import faults
from tests.cluster.processes import descendants, parent_of
from tests.control_groups import limited
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
        self._turn = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []
        for path in folder.iterdir():
            path.unlink()

    def at(
        self, phase: str, rank: int, fault: Fault, *, attempt: int = 0, seconds: float | None = None
    ) -> Faults:
        """Strike at this moment; what can be undone is after ``seconds``, or at the block's end.

        Of those with ``seconds``, one begins when the one before it is over.
        """
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
            with self._turn if seconds else contextlib.nullcontext():
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
    with _handle_of(pid) as handle:
        signal.pidfd_send_signal(handle, number)
        if number == signal.SIGKILL:
            _await_end(pid, handle)


def end_all(pids: Iterable[int]) -> None:
    """End processes at one moment, as a power cut does: none acts on another one's end.

    An executor that hears its worker's end would remove what lies on its disk. Nor are they stopped
    first: ``nsenter`` stops itself with what it has started, and nobody wakes it.
    """
    with contextlib.ExitStack() as stack:
        handles = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                handles[pid] = stack.enter_context(_handle_of(pid))
        for handle in handles.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        for pid, handle in handles.items():
            _await_end(pid, handle)


@contextmanager
def _handle_of(pid: int) -> Iterator[int]:
    handle = os.pidfd_open(pid)
    try:
        yield handle
    finally:
        os.close(handle)


def _await_end(pid: int, handle: int) -> None:
    if not select.select([handle], [], [], _SECONDS)[0]:
        raise AssertionError(f"process {pid} survives SIGKILL")


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
def stop_worker(victim: Victim) -> Iterator[None]:
    """It stands still (SIGSTOP) until the block ends."""
    send(victim.worker, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            send(victim.worker, signal.SIGCONT)


class EatMemory(faults.Fault):
    """A callback that needs 300 MiB."""

    def strike(self) -> None:
        bytearray(300 << 20)[:: 1 << 12] = bytes(300 << 8)  # each page is written


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


def mute(hosts: Sequence[Host]) -> Fault:
    """What the victim's host sends to ``hosts`` goes nowhere; what they send arrives."""
    return _one_way(lambda host: [(host, other) for other in hosts if other != host])


def deafen(hosts: Sequence[Host]) -> Fault:
    """What ``hosts`` send to the victim's goes nowhere; what that sends arrives."""
    return _one_way(lambda host: [(other, host) for other in hosts if other != host])


def _one_way(ways: Callable[[Host], list[tuple[Host, Host]]]) -> Fault:
    """From one host to another, packets go to a network address that nobody has."""

    @contextmanager
    def cut(victim: Victim) -> Iterator[None]:
        with contextlib.ExitStack() as healed:
            for sender, receiver in ways(victim.host):
                place = [receiver.address, "dev", "eth0"]
                sender.run(*f"ip neigh replace lladdr {_NOBODY} nud permanent".split(), *place)
                healed.callback(sender.run, "ip", "neigh", "del", *place)
            yield

    return cut


@contextmanager
def slow_link(victim: Victim) -> Iterator[None]:
    """The host sends 256 kbit/s, and what waits longer than 200 ms is dropped."""
    disc = ["dev", "eth0", "root"]
    limits = ["tbf", "rate", "256kbit", "burst", "4kb", "latency", "200ms"]
    victim.host.run("tc", "qdisc", "add", *disc, *limits)
    try:
        yield
    finally:
        victim.host.run("tc", "qdisc", "del", *disc)


@contextmanager
def lossy_link(victim: Victim) -> Iterator[None]:
    """Of what the host sends and gets, a twentieth is lost."""
    chains = "".join(
        f"chain {hook} {{ type filter hook {hook} priority 0; numgen random mod 100 < 5 drop; }};"
        for hook in ("input", "output")
    )
    victim.host.run("nft", f"table ip loss {{ {chains} }}")
    try:
        yield
    finally:
        victim.host.run("nft", "delete table ip loss")


# --- what a host has -----------------------------------------------------------------------------


@contextmanager
def fill_disk(victim: Victim) -> Iterator[None]:
    """Not a byte is left on the host's disk."""
    filler = victim.host.seen_from_here / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20))
    try:
        yield
    finally:
        filler.unlink()


def fill_disk_of(host: Host) -> Fault:
    """As `fill_disk`, on a host that is not the victim's."""
    return lambda victim: fill_disk(Victim(host, victim.worker))


@contextmanager
def freeze(victim: Victim) -> Iterator[None]:
    """No process of the host runs, as on a machine that is suspended."""
    with limited("freezer", victim.host.pids()):
        yield


@contextmanager
def throttle(victim: Victim) -> Iterator[None]:
    """All processes of the host share a twentieth of a processor."""
    with limited("cpu", victim.host.pids(), percent=5):
        yield


@contextmanager
def little_memory(victim: Victim) -> Iterator[None]:
    """The executor and its Python processes get 64 MiB besides what they have."""
    with limited("memory", [victim.executor, *descendants(victim.executor)]):
        yield
