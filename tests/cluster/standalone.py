"""A standalone cluster as plain processes: one master, and workers that seem to be other hosts.

Where mount namespaces are permitted, workers do not see each other's local directories either.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark

from tests import jvm

HOME = Path(pyspark.__file__).parent
MASTER, WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"


@contextmanager
def standalone(folder: Path, hosts: list[str], *, seconds: float = 60) -> Iterator[str]:
    """Start a master on the first of ``hosts`` and a worker of one core on each; yield its URL."""
    with ExitStack() as stack:
        log = folder / "master.log"
        arguments = ["--host", hosts[0], "--port", "0", "--webui-port", "0"]
        stack.enter_context(_process(MASTER, arguments, log))
        url = _wait_for(log, r"Starting Spark master at (spark://\S+)", seconds)
        disks = [folder / f"disk-{number}" for number in range(len(hosts))]
        for disk in disks:
            disk.mkdir()
        for number, (host, disk) in enumerate(zip(hosts, disks, strict=True)):
            log = folder / f"worker-{number}.log"
            arguments = ["--host", host, "--cores", "1", "--memory", "1g", "--webui-port", "0"]
            arguments += ["--work-dir", str(folder / f"work-{number}"), url]
            others = [other for other in disks if other != disk]
            stack.enter_context(_process(WORKER, arguments, log, disk=disk, hidden=others))
            _wait_for(log, r"(Successfully registered)", seconds)
        yield url


@contextmanager
def _process(
    name: str,
    arguments: list[str],
    log: Path,
    *,
    disk: Path | None = None,
    hidden: Sequence[Path] = (),
) -> Iterator[None]:
    environment = {**os.environ, "SPARK_HOME": str(HOME), "PYSPARK_PYTHON": sys.executable}
    environment |= {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": jvm.OPTIONS}
    environment.pop("SPARK_LOCAL_IP", None)  # each has a host of its own
    if disk is not None:
        environment["SPARK_LOCAL_DIRS"] = str(disk)
    command = [str(HOME / "bin/spark-class"), name, *arguments]  # which becomes java
    if hidden and can_hide():
        over = " && ".join(f"mount -t tmpfs none '{folder}'" for folder in hidden)
        command = ["unshare", "--mount", "sh", "-c", f'{over} && exec "$@"', "sh", *command]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        try:
            yield
        finally:
            process.terminate()
            process.wait(timeout=30)


def can_hide() -> bool:
    """Whether this user may mount something that other processes do not see."""
    mount = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0


def _wait_for(log: Path, pattern: str, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = re.search(pattern, log.read_text())
        if found:
            return found[1]
        time.sleep(0.1)
    raise AssertionError(f"{pattern} is not in {log}: {log.read_text()[-2000:]}")
