"""After the end of a driver nothing stays, and a new one goes on.

Both workers of a driver are in one executor: each process that starts costs seconds. Two fits at
once that share all folders are in `tests/cluster/test_checkpoint_recovery`.
"""

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

import pytest

from tests.cluster.processes import state_of
from tests.faults.cluster import DEFAULT_PATIENCE, PATIENCE, Cluster, Sessions, marks
from tests.faults.faults import Fault, Faults, Victim
from tests.faults.oracle import Outcome

pytestmark = marks(600)
ENTRIES = DEFAULT_PATIENCE
"""Of this process: the session of the tests that come next."""

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
def driver(cluster: Cluster, directory: Path, tmp: Path) -> Iterator[Driver]:
    """Start a driver program in the network of the first host, of which this process is part."""
    tmp.mkdir()
    places = [cluster.url, cluster.driver.address, str(cluster.folder)]
    words = [*places, str(directory / "checkpoints"), str(directory / "reports")]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.faults.drive", *words, "spark.executor.cores=2"],
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
    while (still := left()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert still == []


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


ENDS = [(signal.SIGINT, "checkpoint"), (signal.SIGKILL, "finish")]
"""The signals that one driver after the other gets, and the phases in which it gets them.

What SIGTERM removes before it kills is shown by `tests/spark/session/test_termination`.
"""


@pytest.fixture(scope="module")
def gone_on(
    cluster: Cluster, sessions: Sessions, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """What the last driver has said, after those that were ended, and their folder.

    They run before a session of this process holds slots that they need.
    """
    sessions.stop()
    cluster.repair()
    folder = tmp_path_factory.mktemp("drivers")
    manifests, processes = 0, pids(cluster)
    for count, (number, phase) in enumerate(ENDS):
        faults = Faults(cluster.fault_folder, cluster.hosts)
        with driver(cluster, folder, folder / f"tmp-{count}") as one:
            with faults.at(phase, 0, signalled(one.process, number)):
                said = one.end()
            assert [struck.moment for struck in faults.struck] == [f"{phase}-0-0"], said[-3000:]
            assert one.process.returncode == -number, said[-3000:]
            if number == signal.SIGINT:
                assert "KeyboardInterrupt: interrupted: its Spark jobs were cancelled" in said
            if number != signal.SIGKILL:  # after which nobody is there to remove them
                assert one.left() == []
        await_nothing_left(cluster, processes)
        before, manifests = manifests, len([*folder.glob("checkpoints/*/*/step-*/manifest.json")])
        assert manifests >= before
    assert manifests > 0
    Faults(cluster.fault_folder, cluster.hosts)  # no moment is left
    with driver(cluster, folder, folder / "tmp") as last:
        said = last.end()
    assert "restarts 0 digest " in said, said[-3000:]
    await_nothing_left(cluster, processes)
    return said, folder


def test_driver_after_driver_goes_on(gone_on: tuple[str, Path]) -> None:
    _, folder = gone_on
    # Leases of drivers that have ended count no more after ten minutes; on their host at once.
    assert len(list(folder.glob("checkpoints/*/lease-*"))) <= len(ENDS)
    assert list(folder.glob("checkpoints/*/*/step-*-final/manifest.json"))


def test_the_last_one_has_the_bits_of_a_fit_that_nobody_has_ended(
    gone_on: tuple[str, Path], request: pytest.FixtureRequest
) -> None:
    undisturbed: Outcome = request.getfixturevalue("undisturbed")
    said, _ = gone_on
    assert said.split("digest ")[1].split()[0] == undisturbed.digest
