"""What the image's entrypoint runs; Spark and Java are scripts that print their arguments.

The parts master, worker, history and folders are run for real in tests/standalone.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docker.context import ROOT

TELL = '#!/bin/sh\necho "$0"; for word; do echo "$word"; done\n'
POD = {
    "SPARK_JAVA_OPT_1": "-Dfirst=b c",
    "SPARK_JAVA_OPT_0": "-Dzeroth=a=b",
    "SPARK_JAVA_OPT_10": "-Dlast=",
    "SPARK_EXECUTOR_MEMORY": "2g",
    "SPARK_DRIVER_URL": "spark://driver:7078",
    "SPARK_EXECUTOR_ID": "3",
    "SPARK_EXECUTOR_CORES": "4",
    "SPARK_APPLICATION_ID": "spark-app",
    "SPARK_EXECUTOR_POD_IP": "10.0.0.3",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    "SPARK_EXECUTOR_POD_NAME": "pod",
    "SPARK_CLASSPATH": "/extra.jar",
}
"""What Spark sets in an executor's pod; tests/conf compares it with Spark's own code."""
OPTIONAL = {"SPARK_JAVA_OPT_0", "SPARK_JAVA_OPT_1", "SPARK_JAVA_OPT_10", "SPARK_CLASSPATH"}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name in ("bin/spark-class", "bin/spark-submit", "java/bin/java", "path/tool"):
        program = tmp_path / name
        program.parent.mkdir(exist_ok=True, parents=True)
        program.write_text(TELL)
        program.chmod(0o755)
    for tool in ("bash", "env", "grep", "sort", "cut", "sh"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "path" / tool).symlink_to(found)
    return tmp_path


def run(home: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"SPARK_HOME": str(home), "PATH": str(home / "path"), **variables}
    return subprocess.run(
        [str(ROOT / "docker/entrypoint.sh"), *words],
        env=environment, capture_output=True, text=True, timeout=20,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("master", "org.apache.spark.deploy.master.Master"),
        ("worker", "org.apache.spark.deploy.worker.Worker"),
        ("history", "org.apache.spark.deploy.history.HistoryServer"),
    ],
)
def test_servers_are_sparks_own(home: Path, part: str, name: str) -> None:
    done = run(home, part, "--port", "1 2")
    assert done.stdout.splitlines() == [f"{home}/bin/spark-class", name, "--port", "1 2"]


def test_folders_are_made_before_they_are_opened(home: Path) -> None:
    words = run(home, "folders", "/a", "/b").stdout.splitlines()
    shell = [f"{home}/bin/spark-class", "org.apache.hadoop.fs.FsShell"]
    assert words == [*shell, "-mkdir", "-p", "/a", "/b", *shell, "-chmod", "1777", "/a", "/b"]


def test_an_executor_gets_its_options_in_order(home: Path) -> None:
    done = run(home, "executor", **POD, JAVA_HOME=str(home / "java"), SPARK_CONF_DIR="/conf",
               HADOOP_CONF_DIR="/hadoop")  # fmt: skip
    assert done.returncode == 0, done.stderr
    program, *words = done.stdout.splitlines()
    assert program == f"{home}/java/bin/java"
    assert words[:5] == ["-Dzeroth=a=b", "-Dfirst=b c", "-Dlast=", "-Xms2g", "-Xmx2g"]
    assert words[5:7] == ["-cp", f"/hadoop:/conf:/extra.jar:{home}/jars/*"]
    assert words[7] == "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
    assert dict(zip(words[8::2], words[9::2], strict=True)) == {
        "--driver-url": "spark://driver:7078", "--executor-id": "3", "--cores": "4",
        "--app-id": "spark-app", "--hostname": "10.0.0.3", "--resourceProfileId": "0",
        "--podName": "pod",
    }  # fmt: skip


@pytest.mark.parametrize("missing", sorted(POD.keys() - OPTIONAL))
def test_an_executor_says_which_variable_is_missing(home: Path, missing: str) -> None:
    pod = {name: value for name, value in POD.items() if name != missing}
    done = run(home, "executor", **pod, JAVA_HOME=str(home / "java"))
    assert done.returncode != 0 and missing in done.stderr and not done.stdout


def test_an_executor_needs_no_options(home: Path) -> None:
    pod = {name: value for name, value in POD.items() if "JAVA_OPT" not in name}
    done = run(home, "executor", **pod, JAVA_HOME=str(home / "java"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "-Xms2g"


def test_a_driver_is_submitted_in_its_own_pod(home: Path) -> None:
    done = run(home, "driver", "--class", "X", SPARK_DRIVER_BIND_ADDRESS="10.0.0.2")
    words = done.stdout.splitlines()
    assert words[0] == f"{home}/bin/spark-submit"
    assert "spark.driver.bindAddress=10.0.0.2" in words
    assert words[-4:] == ["--deploy-mode", "client", "--class", "X"]


def test_other_commands_run_as_they_stand(home: Path) -> None:
    assert run(home, "tool", "a b").stdout.splitlines() == [f"{home}/path/tool", "a b"]


def test_nothing_to_run_is_an_error_that_names_the_parts(home: Path) -> None:
    done = run(home)
    assert done.returncode != 0 and "master, worker, history" in done.stderr
