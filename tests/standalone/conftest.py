"""The cluster of docker/compose.yaml, started once; tests take turns at its two slots."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.context import lay_out
from tests.hdfs.daemons import Hdfs
from tests.hdfs.jars import cached_jars, skip_if_told
from tests.standalone.topology import COMPOSE, ROOT, Topology


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hdfs]:
    """As many data nodes as the compose file has."""
    skip_if_told()
    nodes = COMPOSE["services"]["datanode"]["deploy"]["replicas"]
    with Hdfs(tmp_path_factory.mktemp("hdfs"), cached_jars(), num_data_nodes=nodes) as running:
        yield running


@pytest.fixture(scope="session")
def topology(tmp_path_factory: pytest.TempPathFactory, hdfs: Hdfs) -> Iterator[Topology]:
    """Folders on HDFS, a master, two workers; data as the documents say it is put there."""
    folder = tmp_path_factory.mktemp("topology")
    with Topology(folder, hdfs.url, hdfs.num_data_nodes) as running:
        running.run(*running.command("folders"))
        running.start_master()
        for number in range(COMPOSE["services"]["worker"]["deploy"]["replicas"]):
            running.start_worker(f"worker-{number}")
        running.run(sys.executable, "jobs/digits.py", "--output", str(folder / "digits"))
        shell = ("spark-class", "org.apache.hadoop.fs.FsShell")
        running.run(*shell, "-put", str(folder / "digits"), "hdfs:///data/digits")
        yield running


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sparkdl alone, for nodes that have its dependencies, packed as the documents say.

    It is built from what the image is built from.
    """
    folder = tmp_path_factory.mktemp("archive")
    lay_out(folder / "context")
    target = folder / "sparkdl-packages.tar.gz"
    command = [str(ROOT / "conf/clusters/pack.sh"), str(target)]
    command += ["--no-deps", "--no-build-isolation", "."]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, cwd=folder / "context", env=environment, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return target
