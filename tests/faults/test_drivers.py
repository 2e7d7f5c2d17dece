"""After the end of a driver nothing stays, and a new one goes on and ends with the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.processes import state_of
from tests.faults.cluster import PATIENCE, Cluster, marks
from tests.faults.faults import Fault, Faults, Victim
from tests.faults.oracle import Outcome

pytestmark = marks(900)

ROOT = Path(__file__).parent.parent.parent
_SECONDS = 240 * PATIENCE
_END_SECONDS = 30 * PATIENCE
"""After the end of a driver: for its executors and their files."""


@dataclass
class Driver:
    """A driver program, with a temporary folder of its own."""

    process: subprocess.Popen[str]
    tmp: Path

    def end(self) -> str:
        """Wait for its end; returns what it has printed, and then what it has said."""
        out, err = self.process.communicate(timeout=_SECONDS)
        return out + err

    def left(self) -> list[str]:
        """Files of sparkdl in its temporary folder."""
        return [path.name for path in self.tmp.iterdir() if "sparkdl" in path.name]


@contextmanager
def driver(cluster: Cluster, directory: Path, tmp: Path, *entries: str) -> Iterator[Driver]:
    """Start a driver program in the network of the first host, of which this process is part."""
    tmp.mkdir()
    places = [cluster.url, cluster.driver.address, str(cluster.folder)]
    words = [*places, str(directory / "checkpoints"), str(directory / "reports"), *entries]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.faults.drive", *words],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp)},
    ) as process:  # fmt: skip
        try:
            yield Driver(process, tmp)
        finally:
            process.kill()


def signalled(process: subprocess.Popen[str], number: signal.Signals) -> Fault:
    """The driver gets a signal when a worker comes to a moment, which lasts until it has ended.

    Else the gang, which needs no driver to train, might come to its end before Spark ends it.
    """

    @contextmanager
    def strike(_: Victim) -> Iterator[None]:
        process.send_signal(number)
        process.wait(_END_SECONDS)
        yield

    return strike


def pids(cluster: Cluster) -> set[int]:
    """Processes on the hosts of executors."""
    return {pid for host in cluster.workers for pid in host.pids()}


def await_nothing_left(cluster: Cluster, before: set[int]) -> None:
    """No new process, and no file of sparkdl, on any host of executors."""

    def left() -> list[str]:
        files = [f"{host.name}: {path}" for host in cluster.workers for path in host.files("*")]
        found = [file for file in files if "sparkdl" in file]
        return found + [f"{state_of(pid)} {_words(pid)}" for pid in pids(cluster) - before]

    deadline = time.monotonic() + _END_SECONDS
    while left() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left() == []


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


ENDS = [
    (signal.SIGKILL, "spool"),
    (signal.SIGTERM, "checkpoint"),
    (signal.SIGINT, "train"),
    (signal.SIGKILL, "finish"),
]
"""The signals that one driver after the other gets, and the phases in which it gets them."""


def test_driver_after_driver_goes_on(
    undisturbed: Outcome, cluster: Cluster, tmp_path: Path
) -> None:
    manifests, processes = 0, pids(cluster)
    for count, (number, phase) in enumerate(ENDS):
        faults = Faults(cluster.fault_folder, cluster.hosts)
        with driver(cluster, tmp_path, tmp_path / f"tmp-{count}") as one:
            with faults.at(phase, 0, signalled(one.process, number)):
                said = one.end()
            assert [struck.moment for struck in faults.struck] == [f"{phase}-0-0"], said[-3000:]
            assert one.process.returncode == -number, said[-3000:]
            if number == signal.SIGINT:
                assert "KeyboardInterrupt: interrupted; its Spark jobs are cancelled" in said
            if number != signal.SIGKILL:  # after which nobody is there to remove them
                assert one.left() == []
        await_nothing_left(cluster, processes)
        before, manifests = manifests, len([*tmp_path.glob("checkpoints/*/*/step-*/manifest.json")])
        assert manifests >= before
    assert manifests > 0
    with driver(cluster, tmp_path, tmp_path / "tmp") as last:
        said = last.end()
    assert f"restarts 0 digest {undisturbed.digest}" in said, said[-3000:]
    # Those of drivers that have ended count no more after ten minutes; on their host at once.
    assert len(list(tmp_path.glob("checkpoints/*/lease-*"))) <= len(ENDS)
    assert list(tmp_path.glob("checkpoints/*/*/step-*-final/manifest.json"))
    await_nothing_left(cluster, processes)
