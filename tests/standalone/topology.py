"""The cluster of docker/compose.yaml as processes on the loopback, without containers.

Commands are those of the compose file and of docker/entrypoint.sh; only addresses, sizes and the
image's paths are replaced. HDFS is the one of tests/hdfs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests import jvm
from tests.cluster.processes import descendants

ROOT = Path(__file__).parent.parent.parent
ENTRYPOINT = ROOT / "docker" / "entrypoint.sh"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
GPU: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.gpu.yaml").read_text())
LIFETIME_SECONDS = 900
"""What is left of a test that was killed ends by itself."""
_START_SECONDS = 60
_STOP_SECONDS = 20
_REPLACED = {"--host": "127.0.0.1", "--port": "0", "--webui-port": "0", "--cores": "1",
             "--memory": "1g"}  # fmt: skip


class Topology:
    """Master, workers and history server, as a context manager that ends them.

    Args:
        folder: for logs, working directories and configuration.
        hdfs_url: what ``hdfs:///`` shall mean.
        replication: copies of each block.
    """

    def __init__(self, folder: Path, hdfs_url: str, replication: int) -> None:
        self.folder = folder
        self.master_url = ""
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = self._make_environment(hdfs_url, replication)

    def __enter__(self) -> Topology:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                for pid in descendants(process.pid):
                    os.kill(pid, signal.SIGKILL)
                process.kill()
                process.wait(_STOP_SECONDS)

    def run(self, *command: str, seconds: float = 60) -> str:
        """What a command prints that is run as a container of the image would."""
        done = subprocess.run(
            [str(ENTRYPOINT), *command],
            env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=seconds,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def start_master(self) -> str:
        """The address of the master's page; `master_url` is set."""
        self._start("master", self.command("master"))
        self.master_url = self._await("master", r"Starting Spark master at (spark://\S+)")
        return self._await("master", r"MasterWebUI to \S+, and started at (http://\S+)")

    def start_worker(self, name: str, compose: dict[str, Any] = COMPOSE, **changes: str) -> None:
        """Start a worker, and wait until the master knows it.

        Args:
            compose: the compose file that has its command.
            changes: of its environment.
        """
        folder = self.folder / name
        changes |= {"SPARK_WORKER_DIR": str(folder), "SPARK_LOCAL_DIRS": str(folder / "local")}
        self._start(name, self.command("worker", compose), **changes)
        self._await(name, r"(Successfully registered with master)")

    def start_history(self) -> str:
        """The address of the history server."""
        port = "-Dspark.history.ui.port=0"  # stronger than the properties file
        self._start("history", self.command("history"), SPARK_HISTORY_OPTS=port)
        return self._await("history", r"HistoryServer to \S+, and started at (http://\S+)")

    def kill(self, name: str) -> None:
        """End a server as a power failure would."""
        process = self._running.pop(name)
        for pid in descendants(process.pid):  # the one below timeout(1)
            os.kill(pid, signal.SIGKILL)
        process.wait(_STOP_SECONDS)

    def command(self, service: str, compose: dict[str, Any] = COMPOSE) -> list[str]:
        """The compose file's command for this machine."""
        words = [str(word) for word in compose["services"][service]["command"]]
        for at, word in enumerate(words[:-1]):
            if word in _REPLACED:
                words[at + 1] = _REPLACED[word]
        paths = [word.replace("/opt/sparkdl", str(ROOT)) for word in words]
        return [self.master_url if word == "spark://master:7077" else word for word in paths]

    def _start(self, name: str, command: list[str], **changes: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                ["timeout", str(LIFETIME_SECONDS), str(ENTRYPOINT), *command],
                env={**self.environment, **changes}, cwd=self.folder,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def _await(self, name: str, pattern: str) -> str:
        log = self.folder / f"{name}.log"
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._running[name].poll() is None:
            if found := re.search(pattern, log.read_text(errors="replace")):
                return found[1]
            time.sleep(0.1)
        raise AssertionError(f"{pattern} is not in {log}: {log.read_text()[-3000:]}")

    def _make_environment(self, hdfs_url: str, replication: int) -> dict[str, str]:
        """What a container has: no PYTHONPATH of this test, no configuration of this user."""
        hadoop = self.folder / "hadoop"
        hadoop.mkdir()
        for name, key, value in (
            ("core-site.xml", "fs.defaultFS", hdfs_url),
            ("hdfs-site.xml", "dfs.replication", str(replication)),
        ):
            entry = f"<property><name>{key}</name><value>{value}</value></property>"
            (hadoop / name).write_text(f"<configuration>{entry}</configuration>")
        kept = {key: os.environ[key] for key in ("HOME", "JAVA_HOME", "LANG") if key in os.environ}
        return {
            **kept,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "HADOOP_CONF_DIR": str(hadoop),
            "SPARK_CONF_DIR": str(self.folder / "none"),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": jvm.OPTIONS,
            "OMP_NUM_THREADS": "1",
        }


def ask(url: str) -> Any:
    """What a server's REST interface answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=20) as answer:
        return json.load(answer)
