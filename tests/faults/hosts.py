"""Hosts that are namespaces of this machine: own address, own processes, own disk of bounded size.

A host's first process waits for the end of a pipe that only this process holds. So the kernel ends
all that runs on the host, and removes its network and its disk, however this process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "10.213.77"
_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of sched.h."""
_UNSHARE = ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--mount-proc"]
_FIRST_PROCESS = """
set -e
hostname "$1"
mount -t tmpfs -o "size=$3" tmpfs "$2"
mkdir "$2/spark" "$2/tmp"
mount -t tmpfs -o size=256m tmpfs /dev/shm
mount --bind "$4" /etc/hosts
ip link set lo up
echo ready
exec env --ignore-signal=CHLD cat  # then the kernel takes away what has ended
"""
_PROBE = """
ip link add v0 type veth peer name v1
ip link add br0 type bridge
mount -t tmpfs tmpfs /mnt
"""
_SECONDS = 20.0


def what_is_missing() -> str | None:
    """Why this user cannot have hosts here; None: all is there."""
    absent = [name for name in ("unshare", "nsenter", "ip", "bridge") if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)}: install util-linux and iproute2"
    command = [*_UNSHARE, "sh", "-ec", _PROBE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode == 0:
        return None
    return f"CAP_SYS_ADMIN and CAP_NET_ADMIN, or veth in the kernel ({done.stderr.strip()})"


@dataclass(frozen=True)
class Host:
    """A host that runs."""

    name: str
    address: str
    disk: Path
    """The mount point of its disk, under this path for its own processes only."""
    pid: int
    """Its first process, as the machine numbers it."""
    port: str
    """The switch's end of its cable."""
    switch_pid: int

    @property
    def seen_from_here(self) -> Path:
        """Its disk, under a path of this process."""
        return Path(f"/proc/{self.pid}/root{self.disk}")

    def command(self, words: Sequence[str]) -> list[str]:
        """What runs ``words`` on this host."""
        target = ["--target", str(self.pid), "--net", "--mount", "--pid", "--uts"]
        return ["nsenter", *target, "--", *words]

    def run(self, *words: str) -> str:
        """Run a short command there; returns what it prints."""
        return _run(self.command(words))

    def on_switch(self, *words: str) -> str:
        """Run a short command in the network of the switch."""
        return _run(_in_network(self.switch_pid, words))

    def pids(self) -> list[int]:
        """All its processes, as the machine numbers them, but the first one."""
        space = _process_space(self.pid)
        every = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        return [pid for pid in every if pid != self.pid and _process_space(pid) == space]

    def executors(self) -> list[int]:
        """Process ids of Spark's executors."""
        found = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                if b"CoarseGrainedExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def pid_of(self, own: int) -> int:
        """The machine's number of the process that this host numbers ``own``."""
        for pid in self.pids():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                if status.partition("NSpid:")[2].split("\n")[0].split()[-1] == str(own):
                    return pid
        raise ProcessLookupError(f"{self.name} has no process {own}")

    def files(self, pattern: str) -> list[str]:
        """Paths on its disk and in its shared memory, relative to these."""
        root = Path(f"/proc/{self.pid}/root")
        found = [*(root / str(self.disk)[1:]).rglob(pattern), *(root / "dev/shm").rglob(pattern)]
        return sorted(str(path).removeprefix(str(root)) for path in found)


@contextlib.contextmanager
def started_hosts(
    folder: Path, names: Sequence[str], *, disk: str = "256m"
) -> Iterator[list[Host]]:
    """Start hosts that reach each other through one switch.

    Args:
        folder: seen by all of them; their disks are mounted in it.
        names: of the hosts.
        disk: size of each disk, as mount(8) takes it.
    """
    mount_point, known = folder / "disk", folder / "hosts"
    mount_point.mkdir()
    addresses = {name: f"{_PREFIX}.{number + 1}" for number, name in enumerate(names)}
    lines = [
        f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **addresses}.items()
    ]
    known.write_text("".join(lines))
    with contextlib.ExitStack() as stack:

        def first_process(name: str) -> int:
            words = [name, str(mount_point), disk, str(known)]
            return stack.enter_context(
                _first_process([*_UNSHARE, "sh", "-c", _FIRST_PROCESS, "sh", *words])
            )

        switch = first_process("switch")
        _run(_in_network(switch, ["ip", "link", "add", "br0", "type", "bridge"]))
        _run(_in_network(switch, ["ip", "link", "set", "br0", "up"]))
        hosts = []
        for name, address in addresses.items():
            pid = first_process(name)
            host = Host(name, address, mount_point, pid, f"to-{name}", switch)
            cable = f"ip link add {host.port} type veth peer name eth0 netns /proc/{pid}/ns/net"
            _run(["nsenter", "--target", str(switch), "--net", "--", *cable.split()])
            host.on_switch(*f"ip link set {host.port} master br0 up".split())
            for line in (f"ip address add {address}/24 dev eth0", "ip link set eth0 up"):
                _run(_in_network(pid, line.split()))
            hosts.append(host)
        yield hosts


@contextlib.contextmanager
def network_of(host: Host) -> Iterator[None]:
    """In the block, sockets of this thread, and of threads and processes it starts, are there."""
    setns = ctypes.CDLL(None, use_errno=True).setns
    with Path("/proc/self/ns/net").open() as before:
        for_block = os.open(f"/proc/{host.pid}/ns/net", os.O_RDONLY)
        try:
            _checked(setns(for_block, _NEW_NETWORK))
        finally:
            os.close(for_block)
        try:
            yield
        finally:
            _checked(setns(before.fileno(), _NEW_NETWORK))


def _checked(status: int) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), "setns")


@contextlib.contextmanager
def _first_process(command: list[str]) -> Iterator[int]:
    """A host without a cable; yields the number of its first process."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"a host did not start: {' '.join(command)}")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        yield int(children.read_text().split()[0])
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(_SECONDS)


def _in_network(pid: int, words: Sequence[str]) -> list[str]:
    return ["nsenter", "--target", str(pid), "--net", "--", *words]


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _process_space(pid: int) -> str:
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    return ""


def wait_until(is_so: Callable[[], object], what: str, seconds: float) -> None:
    """Poll a function until it returns true.

    Raises:
        AssertionError: it did not in time.
    """
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come within {seconds:g} s")
        time.sleep(0.05)
