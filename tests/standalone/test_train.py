"""A job trains on a standalone cluster as docs/clusters.md says, and survives its losses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from sparkdl.storage.storage import open_storage
from tests import jvm
from tests.hdfs.daemons import Hdfs
from tests.standalone.topology import GPU, ROOT, Topology, ask

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow, pytest.mark.timeout(420)]

NETWORKS = ROOT / "tests" / "standalone" / "networks.py"
EPOCHS = 2
JOB_SECONDS = 240


class Job:
    """A run of jobs/train.py, submitted from outside the cluster.

    Args:
        folder: on this machine, for the log and what workers tell.
        name: of the model and the checkpoints on HDFS.
        seconds_per_step: makes steps last.
        properties: which file of conf/clusters/.
        changes: of the job file's keys.
    """

    def __init__(
        self,
        topology: Topology,
        archive: Path,
        folder: Path,
        name: str,
        *,
        seconds_per_step: float = 0.0,
        properties: str = "standalone",
        changes: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self.log = folder / "driver.log"
        callbacks = (
            f'[{{factory = "networks:TellWhereabouts", args = {{folder = "{folder}"}}}}, '
            f'{{factory = "networks:Slow", args = {{seconds = {seconds_per_step}}}}}]'
        )
        settings = {
            "data.path": "hdfs:///data/digits/train", "test.path": "hdfs:///data/digits/test",
            "output.path": f"hdfs:///models/{name}", "model.factory": "networks:Net",
            "estimator.epochs": EPOCHS, "estimator.callbacks": callbacks,
            "estimator.checkpoint_dir": f"hdfs:///models/{name}-checkpoints",
            "estimator.checkpoint_interval": 5, **changes,
        }  # fmt: skip
        command = [
            "spark-submit", "--master", topology.master_url, "--deploy-mode", "client",
            "--properties-file", f"conf/clusters/{properties}.conf",
            "--archives", f"{archive}#packages", "--py-files", str(NETWORKS),
            "--conf", "spark.eventLog.enabled=true",
            "--conf", f"spark.executor.extraJavaOptions={jvm.OPTIONS}",
            "jobs/train.py", "--config", "conf/digits.toml", "--log-level", "INFO",
        ]  # fmt: skip
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        # The driver has sparkdl installed, which is this repository's; executors have not.
        environment = {
            **topology.environment, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable,
            "SPARK_SUBMIT_OPTS": os.environ["SPARK_SUBMIT_OPTS"],
        }  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def result(self) -> str:
        """What the job printed, when it has ended well."""
        try:
            self.process.wait(JOB_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait(30)
        text = self.log.read_text(errors="replace")
        assert self.process.returncode == 0, text[-5000:]
        return text


def weights(hdfs: Hdfs, name: str) -> bytes:
    return open_storage(f"{hdfs.webhdfs_url}/models/{name}/model").read("weights.safetensors")


def until(what: str, ready: Callable[[], Any], seconds: float) -> Any:
    """The first answer that is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := ready():
            return found
        time.sleep(0.2)
    raise AssertionError(f"{what} did not come about within {seconds:g} s")


@pytest.fixture(scope="module")
def undisturbed(
    topology: Topology, archive: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """What a job prints that nothing disturbs, and the folder of what its workers told."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return Job(topology, archive, folder, "undisturbed").result(), folder


def test_a_job_trains_on_the_cluster(undisturbed: tuple[str, Path]) -> None:
    text, _ = undisturbed
    assert "on 2 workers" in text and "restarts: 0" in text
    assert "model: hdfs:///models/undisturbed" in text
    assert "accuracy" in text.split("held-out rows:")[1]


def test_workers_run_what_was_sent(undisturbed: tuple[str, Path], topology: Topology) -> None:
    """Not what happens to be installed on this machine."""
    told = [json.loads((undisturbed[1] / f"{rank}.json").read_text()) for rank in (0, 1)]
    for worker in told:
        assert worker["sparkdl"] == f"{worker['cwd']}/packages/sparkdl/__init__.py"
        assert worker["networks"].startswith(worker["cwd"])
        assert "sparkdl.spark.daemon" in worker["daemon"]
        assert worker["peak_mib"] < 1024, "docs/clusters.md says what a worker needs at least"
    homes = {Path(worker["cwd"]).relative_to(topology.folder).parts[0] for worker in told}
    assert homes == {"worker-0", "worker-1"}


def test_the_history_server_shows_the_application(
    undisturbed: tuple[str, Path], topology: Topology
) -> None:
    url = topology.start_history()
    (application,) = until(
        "the application's page",
        lambda: [
            one for one in ask(f"{url}/api/v1/applications") if one["name"] == "sparkdl train"
        ],
        60,
    )
    (attempt,) = application["attempts"]
    assert attempt["completed"]
    page = f"{url}/api/v1/applications/{application['id']}"
    properties = dict(ask(f"{page}/environment")["sparkProperties"])
    assert properties["spark.python.daemon.module"] == "sparkdl.spark.daemon"
    hosts = {one["id"]: one["totalTasks"] for one in ask(f"{page}/allexecutors")}
    assert set(hosts) == {"driver", "0", "1"} and hosts["0"] and hosts["1"]
    assert {one["status"] for one in ask(f"{page}/jobs")} == {"SUCCEEDED"}


def test_a_lost_machine_is_replaced_and_no_bit_changes(
    undisturbed: tuple[str, Path], topology: Topology, archive: Path, hdfs: Hdfs, tmp_path: Path
) -> None:
    job = Job(topology, archive, tmp_path, "disturbed", seconds_per_step=0.15)
    written = open_storage(f"{hdfs.webhdfs_url}/models/disturbed-checkpoints")

    def checkpoints() -> list[str]:
        assert job.process.poll() is None, job.log.read_text()[-5000:]
        attempts = [f"{run}/{attempt}" for run in written.list("") for attempt in written.list(run)]
        steps = [f"{attempt}/{step}" for attempt in attempts for step in written.list(attempt)]
        return [step for step in steps if written.exists(f"{step}/manifest.json")]

    until("a checkpoint", checkpoints, 120)
    topology.kill("worker-1")
    topology.start_worker("worker-2")  # as the compose file's `restart` does
    text = job.result()
    assert re.search(r"restarts: [1-9]", text)
    assert weights(hdfs, "disturbed") == weights(hdfs, "undisturbed")
    assert list((topology.folder / "worker-2").glob("app-*/*/stderr"))


def test_a_worker_hands_out_gpus(topology: Topology, archive: Path, tmp_path: Path) -> None:
    """They do not exist: a false nvidia-smi lists two, of which the settings offer one."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "nvidia-smi").write_text("#!/bin/sh\necho 0\necho 1\n")
    (programs / "nvidia-smi").chmod(0o755)
    script = ROOT / "conf" / "clusters" / "discover_gpus.sh"  # elsewhere in the image
    topology.start_worker(
        "worker-gpu",
        GPU,
        PATH=os.pathsep.join([str(programs), topology.environment["PATH"]]),
        SPARK_WORKER_OPTS=f"-Dspark.worker.resource.gpu.discoveryScript={script}",
    )
    changes = {"estimator.num_workers": 1, "estimator.gpus_per_worker": 1, "estimator.epochs": 1,
               "estimator.device": "cpu"}  # fmt: skip
    job = Job(topology, archive, tmp_path, "gpu", properties="standalone-gpu", changes=changes)
    assert "on 1 worker" in job.result()
    told = json.loads((tmp_path / "0.json").read_text())
    assert told["gpus"] == ["0"]
    assert Path(told["cwd"]).is_relative_to(topology.folder / "worker-gpu")
