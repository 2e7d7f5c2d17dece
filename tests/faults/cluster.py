"""A standalone Spark on hosts: master and driver on the first of them, a worker on each other.

Spark's own time-outs are short, so that it gives up a host within a test's patience.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

from tests import jvm
from tests.faults.daemon import FOLDER
from tests.faults.hosts import Host, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"
PATIENCE = float(os.environ.get("FAULTS_PATIENCE", "1"))
"""Multiplies all time-outs, for a machine that has other work."""
_START_SECONDS = 60 * PATIENCE
SPARK_GIVES_UP_SECONDS = round(30 * PATIENCE)
"""Silence after which Spark takes an executor for lost."""
_MASTER_GIVES_UP_SECONDS = round(110 * PATIENCE)
"""Silence after which Spark's master takes a host for lost; it hears from each every 28 s.

After a cut of 40 s TCP may be silent for 51 s, and longer if its next try falls into another cut.
"""
HEARTBEAT_SECONDS = round(12 * PATIENCE)
"""Silence after which sparkdl takes a worker for hung, unless a test says otherwise."""


def marks(seconds: float) -> list[pytest.MarkDecorator]:
    """Of tests on the cluster, which may take so long on a quiet machine."""
    timeout = pytest.mark.timeout(seconds * PATIENCE)
    return [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow, timeout]


DEFAULT_PATIENCE = {
    "spark.network.timeout": f"{round(120 * PATIENCE)}s",
    "spark.sparkdl.heartbeatTimeout": str(round(60 * PATIENCE)),
    "spark.sparkdl.collectiveTimeout": str(600 * PATIENCE),
    "spark.sparkdl.queueTimeout": str(300 * PATIENCE),
}
"""Entries of a session in which Spark and sparkdl wait as long as they do by default."""

TWO_SLOTS = {
    "spark.executor.cores": "2",
    "spark.cores.max": "4",
    "spark.sparkdl.elasticWait": f"{2 * PATIENCE:g}",
}
"""Entries of a session with an executor of two slots on each host."""


class Cluster:
    """A master that runs, and Spark's process on each other host."""

    def __init__(self, folder: Path, hosts: Sequence[Host]) -> None:
        self.folder, self.hosts = folder, hosts
        self.driver, *self.workers = hosts
        self.url = f"spark://{self.driver.address}:7077"
        self.fault_folder = folder / "faults"
        self.fault_folder.mkdir()
        self._servers: dict[str, subprocess.Popen[bytes]] = {}

    def start_master(self) -> None:
        """Start it, and wait until it listens."""
        words = ["--host", self.driver.address, "--port", "7077", "--webui-port", "0"]
        self._start(self.driver, _MASTER, words)("Starting Spark master at")

    def repair(self) -> None:
        """Start Spark's process where there is none, and wait until the master knows all."""
        words = ["--cores", "2", "--memory", "2g", "--webui-port", "0"]
        lost = [host for host in self.workers if self._has_ended(host)]
        waits = []
        for host in lost:
            place = ["--host", host.address, "--work-dir", str(self.folder / f"work-{host.name}")]
            waits.append(self._start(host, _WORKER, [*place, *words, self.url]))
        for wait in waits:
            wait("Successfully registered")

    def stop(self) -> None:
        """End all that runs on the hosts; so does the end of the hosts."""
        for host in self.hosts:
            for pid in host.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._servers.values():
            process.wait(30)

    def _has_ended(self, host: Host) -> bool:
        return host.name not in self._servers or self._servers[host.name].poll() is not None

    def _start(self, host: Host, main: str, words: list[str]) -> Callable[[str], None]:
        home, tmp = str(Path(pyspark.__file__).parent), host.disk / "tmp"
        options = f"-Dspark.worker.timeout={_MASTER_GIVES_UP_SECONDS} -Djava.io.tmpdir={tmp} "
        options += f"-Dspark.deploy.maxExecutorRetries=-1 {jvm.OPTIONS}"
        environment = {
            **os.environ,
            "SPARK_HOME": home,
            "SPARK_LOCAL_IP": host.address,
            "SPARK_LOCAL_DIRS": str(host.disk / "spark"),
            "TMPDIR": str(tmp),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": options,
        }
        path = self.folder / f"{host.name}.log"
        with path.open("wb") as log:
            process = self._servers[host.name] = subprocess.Popen(
                host.command([f"{home}/bin/spark-class", main, *words]),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
            )  # fmt: skip

        def wait(said: str) -> None:
            def is_said() -> bool:
                assert process.poll() is None, path.read_text()[-3000:]
                return said in path.read_text()

            wait_until(is_said, f"{said!r} in {path}", _START_SECONDS)

        return wait


@contextmanager
def started_cluster(folder: Path, hosts: Sequence[Host]) -> Iterator[Cluster]:
    """Start a master on the first host, and a worker of two cores on each other."""
    cluster = Cluster(folder, hosts)
    try:
        cluster.start_master()
        cluster.repair()
        yield cluster
    finally:
        cluster.stop()


def session(url: str, address: str, folder: Path, **entries: str) -> SparkSession:
    """A session on two of the slots.

    Args:
        url: of the master.
        address: of the driver's host.
        folder: of the cluster.
        entries: of its configuration, besides those of all tests.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    # A JVM that starts with the entries of one session hands them to all later ones.
    SparkContext._ensure_initialized()
    builder = SparkSession.builder.master(url).appName("sparkdl fault suite")
    known = {
        "spark.ui.enabled": "false",
        "spark.driver.host": address,
        "spark.driver.bindAddress": address,
        "spark.local.dir": str(folder / "driver"),
        "spark.cores.max": "2",
        "spark.executor.cores": "1",
        "spark.executor.memory": "512m",
        "spark.executor.heartbeatInterval": "2s",
        "spark.network.timeout": f"{SPARK_GIVES_UP_SECONDS}s",
        "spark.network.timeoutInterval": "4s",
        "spark.executor.extraJavaOptions": jvm.OPTIONS,
        **jvm.ENTRIES,
        "spark.python.daemon.module": "tests.faults.daemon",
        f"spark.executorEnv.{FOLDER}": str(folder / "faults"),
        "spark.sql.shuffle.partitions": "2",
        "spark.sparkdl.heartbeatTimeout": str(HEARTBEAT_SECONDS),
        "spark.sparkdl.startTimeout": str(120 * PATIENCE),
        "spark.sparkdl.queueTimeout": str(90 * PATIENCE),
        "spark.sparkdl.collectiveTimeout": str(60 * PATIENCE),
    }
    for key, value in {**known, **entries}.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


class Sessions:
    """The session of this process; it stays until other entries are asked for."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._kept: tuple[dict[str, str], SparkSession] | None = None

    def get(self, entries: dict[str, str]) -> SparkSession:
        """A session with these entries, besides those of all tests."""
        if self._kept is None or self._kept[0] != entries:
            self.stop()
            place = self._cluster.driver.address, self._cluster.folder
            self._kept = dict(entries), session(self._cluster.url, *place, **entries)
        return self._kept[1]

    def stop(self) -> None:
        """End it, if there is one; its slots are free then."""
        if self._kept is not None:
            self._kept[1].stop()
        self._kept = None
