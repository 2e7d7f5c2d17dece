"""What does a gang lose when a host goes for a while: with ``minWorkers``, or if it waits?

A standalone cluster of two workers of one core each, which have addresses and disks of their own.
In the middle of a fit all processes of one end and its disk is emptied; later it comes back. The
same fit runs undisturbed, with ``minWorkers=1`` and without, in turn.

Besides: how much slower is an epoch if workers hold different numbers of shards?
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import common
import pyspark
from common import Measurements, SmallCNN, images

from sparkdl import TorchClassifier
from sparkdl.report.listeners.listener import Listener, RunListener, RunStart
from sparkdl.report.record.run_record import RunRecord

HOME = Path(pyspark.__file__).parent
MASTER, WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"
HOSTS = ("127.0.0.1", "127.0.0.2")
SHARDS = (2, 3, 4, 5, 8)
GLOBAL_BATCH = 240
"""Rows of a step of all shards, whatever their number."""
STEPS = threading.Event()
"""Set when a fit has taken steps."""


def main() -> None:
    """Measure."""
    options = common.arguments(
        2,
        rows=(60_000, "images"),
        seconds=(120, "length of an undisturbed fit"),
        after=(30, "seconds from the first step to the loss of a host"),
        away=(60, "seconds until it is back"),
    )
    folder, found = images(options.rows), Measurements()
    with tempfile.TemporaryDirectory() as place, standalone(Path(place)) as cluster:
        spark = session(cluster)
        rows = spark.read.parquet(str(folder))
        first = fit(rows, epochs=2)  # starts Spark's workers, and says how fast they are
        epochs = max(4, round(options.seconds / first.history[-1]["seconds"]))
        for _ in range(options.runs):
            common.wait_until_idle(options.patience)
            calm = fit(rows, epochs=epochs)
            found.add("undisturbed, s", seconds(calm))
            for name, least in (("minWorkers=1", 1), ("waiting", None)):
                common.wait_until_idle(options.patience)
                with lost_host(cluster, options):
                    lost = fit(rows, epochs=epochs, least=least)
                note(found, name, calm, lost)
        common.wait_until_idle(options.patience)
        for _ in range(options.runs):
            for shards in SHARDS:
                record = fit(rows, epochs=3, shards=shards)
                best = min(epoch["seconds"] for epoch in record.history[1:])
                found.add(f"epoch of {shards} shards on two workers, s", best)
        spark.stop()
    found.ratio("goodput, minWorkers=1 / waiting", "minWorkers=1, goodput", "waiting, goodput")
    for shards in SHARDS[1:]:
        above, below = (f"epoch of {n} shards on two workers, s" for n in (shards, SHARDS[0]))
        found.ratio(f"epoch of {shards} shards / of {SHARDS[0]}", above, below)
    found.report("elastic_gang", options)


def note(found: Measurements, name: str, calm: RunRecord, lost: RunRecord) -> None:
    """What the loss has cost: pauses between steps, steps done again, the whole time."""
    for attempt in lost.attempts[1:]:
        last = [entry for entry in lost.steps if entry[0] <= attempt["at"]][-1]
        following = next((at for at, *_ in lost.steps if at > attempt["at"]), None)
        if following is None or attempt["start_step"] is None:
            continue
        found.add(f"{name}, from the last step to the next, s", following - last[0])
        found.add(f"{name}, from starting again to the first step, s", following - attempt["at"])
        found.add(f"{name}, steps done again", max(0, last[1] - attempt["start_step"]))
    found.add(f"{name}, whole training, s", seconds(lost))
    found.add(f"{name}, goodput", seconds(calm) / seconds(lost))


def seconds(record: RunRecord) -> float:
    """From the first step to the last."""
    return record.steps[-1][0] - record.steps[0][0]


class Watch(Listener):
    """Sets `STEPS`."""

    def start(self, run: RunStart) -> RunListener:
        """See `Listener`."""
        return WatchOfOneRun()


class WatchOfOneRun(RunListener):
    """Of a fit's steps."""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """See `RunListener`."""
        STEPS.set()


def fit(rows, *, epochs: int, shards: int = 2, least: int | None = None) -> RunRecord:
    """One fit of two workers."""
    classifier = TorchClassifier(
        module=SmallCNN(),
        featuresCol="image",
        labelCol="label",
        optimizer="sgd",
        optimizerParams={"momentum": 0.9},
        learningRate=0.01,
        batchSize=GLOBAL_BATCH // shards,
        epochs=epochs,
        numWorkers=2,
        numShards=shards,
        minWorkers=least,
        checkpointInterval=100,
        maxRestarts=10,
        listeners=[Watch()],
        verbose=0,
    )
    record = classifier.fit(rows).summary.record
    assert record is not None
    return record


class Cluster:
    """A master, and a worker on each host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._process("master", MASTER, "--host", HOSTS[0], "--port", "0")
        self.url = self._wait("master", r"Starting Spark master at (spark://\S+)")
        for host in HOSTS:
            self.start(host)

    def start(self, host: str) -> None:
        """A worker on ``host``."""
        place = self._folder / host
        place.mkdir()
        self._process(
            host, WORKER, "--host", host, "--cores", "1", "--memory", "1500m",
            "--work-dir", str(place / "work"), self.url,
        )  # fmt: skip
        self._wait(host, "(Successfully registered)")

    def lose(self, host: str) -> None:
        """All that runs on ``host`` ends, and its disk is empty."""
        for pid in self._own(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._processes.pop(host).wait()
        shutil.rmtree(self._folder / host, ignore_errors=True)

    def close(self) -> None:
        """End all."""
        for process in self._processes.values():
            process.terminate()
            process.wait()

    def _own(self, host: str) -> list[int]:
        """The worker's process, and all below it."""
        found = [self._processes[host].pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                with suppress(OSError):
                    found += map(int, task.read_text().split())
        return found

    def _process(self, name: str, main: str, *arguments: str) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "SPARK_LOCAL_IP"}
        environment |= {
            "SPARK_HOME": str(HOME),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_LOCAL_DIRS": str(self._folder / name / "disk"),
        }
        command = [str(HOME / "bin/spark-class"), main, "--webui-port", "0", *arguments]
        with self._log(name).open("w") as log:
            self._processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment
            )

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _wait(self, name: str, pattern: str) -> str:
        deadline = time.monotonic() + 60
        while (match := re.search(pattern, self._log(name).read_text())) is None:
            assert time.monotonic() < deadline, self._log(name).read_text()[-2000:]
            time.sleep(0.1)
        return match[1]


@contextmanager
def standalone(folder: Path) -> Iterator[Cluster]:
    """The cluster, which ends with the block."""
    cluster = Cluster(folder)
    try:
        yield cluster
    finally:
        cluster.close()


@contextmanager
def lost_host(cluster: Cluster, options: argparse.Namespace) -> Iterator[None]:
    """In the block the second host is lost a while after a fit's first step, and comes back."""
    STEPS.clear()

    def lose() -> None:
        STEPS.wait()
        time.sleep(options.after)
        cluster.lose(HOSTS[1])
        time.sleep(options.away)
        cluster.start(HOSTS[1])

    thread = threading.Thread(target=lose)
    thread.start()
    yield
    thread.join()


def session(cluster: Cluster):
    """A session on the cluster."""
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master(cluster.url)
        .appName("sparkdl benchmarks")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.executor.memory", "1g")
        .config("spark.executor.cores", "1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.python.daemon.module", "sparkdl.spark.daemon")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


if __name__ == "__main__":
    main()
