"""The doctor sees what a cluster has, and what it lacks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from sparkdl.cli import doctor_command
from sparkdl.cli.doctor import cluster_checks
from sparkdl.cli.doctor.cluster_checks import examine_cluster, refused_time_outs
from sparkdl.cli.doctor.finding import Finding, Order
from sparkdl.cli.job_files.spark_session import addresses
from sparkdl.spark.cluster import cluster_info, slots
from sparkdl.spark.cluster.cluster_info import ClusterInfo
from sparkdl.spark.session import compat

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("master", "expected"),
    [
        ("local[2]", []),
        ("yarn", []),
        ("spark://a:7077", [("a", 7077)]),
        ("spark://a:1,b:2", [("a", 1), ("b", 2)]),
        ("spark://a", [("a", 7077)]),
        ("sc://a/;token=t", [("a", 15002)]),
        ("sc://user@a:15003/;use_ssl=true", [("a", 15003)]),
        ("k8s://https://api.example.org", [("api.example.org", 443)]),
        ("k8s://https://[::1]:6443", [("::1", 6443)]),
    ],
)
def test_a_master_names_hosts_and_ports(master: str, expected: list[tuple[str, int]]) -> None:
    assert addresses(master) == expected


def test_without_pyspark_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "installed", lambda package: None)
    (found,) = doctor_command.examine_cluster(Order())
    assert found.state == "left out"
    assert "without pyspark" in found.text


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of this machine at which nobody listens, kept from others meanwhile."""
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        yield owner.getsockname()[1]


def test_a_master_that_is_not_there(closed_port: int) -> None:
    (found,) = cluster_checks._reachable(f"spark://127.0.0.1:{closed_port}")
    assert found.state == "wrong"
    assert f"nothing answers at 127.0.0.1:{closed_port}" in found.text
    assert "that the master runs" in found.text


def info(**values: object) -> ClusterInfo:
    known = {"master": "spark://a:1", "num_executors": 3, "cores_per_executor": 4}
    return ClusterInfo(**{**known, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("conf", "named"),
    [
        ({}, []),
        ({"spark.network.timeout": "60s"}, []),
        ({"spark.network.timeout": "30s", "spark.network.timeoutInterval": "10s"}, []),
        ({"spark.network.timeout": "30"}, ["spark.network.timeoutInterval (60 s)"]),
        ({"spark.network.timeout": "1min", "spark.executor.heartbeatInterval": "2min"},
         ["spark.executor.heartbeatInterval (120 s)"]),
        ({"spark.storage.blockManagerHeartbeatTimeoutMs": "5000"},
         ["spark.network.timeoutInterval (60 s)", "spark.executor.heartbeatInterval (10 s)"]),
    ],
)  # fmt: skip
def test_time_outs_that_spark_refuses(conf: dict[str, str], named: list[str]) -> None:
    found = list(refused_time_outs(conf))
    assert [finding.state for finding in found] == ["wrong"] * len(named)
    for finding, name in zip(found, named, strict=True):
        assert f"is shorter than {name}, which Spark refuses; raise spark." in finding.text


def test_slots_and_workers_are_those_of_fit() -> None:
    workers, found = cluster_checks._slots(info(), None)
    assert (workers, found.state) == (3, "ok")
    assert found.text == "12, of 3 executors with 4 cores; 1 per task; fit would start 3 workers"


def test_too_many_workers_are_refused_in_the_words_of_fit() -> None:
    workers, found = cluster_checks._slots(info(), 13)
    assert (workers, found.state) == (1, "wrong")
    assert "numWorkers=13 needs 13 free slots" in found.text


def test_a_cluster_that_does_not_tell_its_executors() -> None:
    unknown = info(num_executors=None, cores_per_executor=None)
    assert cluster_checks._slots(unknown, None)[0] == 1
    assert "--num-workers" in cluster_checks._slots(unknown, None)[1].text
    assert cluster_checks._slots(unknown, 4)[0] == 4


def test_the_trial_has_two_workers_where_there_is_room() -> None:
    assert cluster_checks._in_trial(1, info(num_executors=1), Order()) == 2
    assert cluster_checks._in_trial(1, info(num_executors=1, cores_per_executor=1), Order()) == 1
    assert cluster_checks._in_trial(3, info(), Order()) == 3
    assert cluster_checks._in_trial(1, info(), Order(num_workers=1)) == 1


def states(findings: list[Finding]) -> dict[str, str]:
    return {finding.subject: finding.state for finding in findings}


@pytest.mark.spark
@pytest.mark.slow
def test_a_session_that_can_train(spark: SparkSession, tmp_path: Path) -> None:
    findings = list(
        cluster_checks._examine(spark, Order(checkpoint_dir=str(tmp_path / "checkpoints")))
    )
    assert [finding.line() for finding in findings if finding.state != "ok"] == []
    assert set(states(findings)) == {
        "slots", "barrier", "files", "memory", "versions", "channel", "storage", "workers", "GPUs",
        "disk",
    }  # fmt: skip
    text = {finding.subject: finding.text for finding in findings}
    assert text["workers"].startswith("2 on 1 host")
    assert "python 3." in text["versions"]


@pytest.mark.spark
def test_a_checkpoint_dir_that_cannot_be_used(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    order = Order(checkpoint_dir=str(tmp_path / "file" / "below"))
    found = next(f for f in cluster_checks._examine(spark, order) if f.subject == "storage")
    assert found.state == "wrong"
    assert "choose a path that is no file, and below none" in found.text


@pytest.mark.spark
def test_without_torch_the_rest_is_still_asked(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_checks, "installed", lambda package: None)
    found = states(list(cluster_checks._examine(spark, Order())))
    assert found["slots"] == "ok"
    assert found["workers"] == "left out"
    assert "channel" not in found


@pytest.mark.spark
@pytest.mark.classic
def test_under_dynamic_allocation_no_executor_is_waited_for_and_a_gang_is_tried(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = compat.conf
    entries = {"spark.dynamicAllocation.enabled": "true", "spark.sparkdl.startTimeout": "30"}
    for module in (cluster_checks, cluster_info, slots):
        monkeypatch.setattr(module, "conf", lambda s, key: entries.get(key) or real(s, key))
    monkeypatch.setattr(cluster_info, "wait_for_slots", lambda *_: pytest.fail("waits"))
    findings = list(cluster_checks._examine(spark, Order()))
    found = states(findings)
    assert list(found)[:2] == ["barrier", "slots"]
    assert (found["barrier"], found["slots"], found["workers"]) == ("ok", "note", "ok")
    assert "come and go" in findings[1].text
    assert found["channel"] == "ok"


@pytest.mark.spark
@pytest.mark.classic
def test_executors_without_python_are_a_finding(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/nowhere/python")
    findings = list(cluster_checks._examine(spark, Order()))
    text = {finding.subject: finding.text for finding in findings}
    assert (states(findings)["channel"], states(findings)["workers"]) == ("wrong", "wrong")
    assert "/nowhere/python" in text["channel"]
    assert "--archives" in text["channel"]


@pytest.mark.spark
def test_what_spark_raises_is_a_finding_of_the_session(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise PySparkException("the application is gone")

    monkeypatch.setattr(cluster_checks, "start_session", lambda order: spark)
    monkeypatch.setattr(cluster_checks, "bounded", lambda *_: None)
    monkeypatch.setattr(cluster_checks, "wait_for_executors", lost)
    *_, last = examine_cluster(Order())
    assert (last.subject, last.state) == ("session", "wrong")
    assert "the application is gone" in last.text


def test_a_mistake_of_ours_is_no_finding() -> None:
    with pytest.raises(ZeroDivisionError):
        cluster_checks._in_session(ZeroDivisionError())


def doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1", **variables}
    return subprocess.run(
        [sys.executable, "-m", "sparkdl", "doctor", *arguments],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.slow
def test_a_master_that_never_answers_ends_the_doctor_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        master = f"spark://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        done = doctor("--master", master, "--timeout", "8")
        seconds = time.monotonic() - began
    assert done.returncode == 1
    assert f"no answer within 8 s: a Spark session of {master}" in done.stdout
    assert done.stdout.endswith("1 wrong: session\n")
    assert "Traceback" not in done.stderr
    assert seconds < 60


@pytest.mark.slow
def test_a_java_that_does_not_start_is_told_without_a_traceback(tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho broken >&2\nexit 3\n", encoding="utf-8")
    java.chmod(0o755)
    done = doctor("--master", "local[1]", JAVA_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "wrong    Java" in done.stdout
    assert "wrong    session        Spark's JVM ended while it started" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_what_spark_itself_refuses_is_explained() -> None:
    command = [sys.executable, "-m", "sparkdl", "doctor", "--master", "local[1]"]
    command += ["--conf", "spark.network.timeout=30s"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "spark.network.timeout (30 s) is shorter than spark.network.timeoutInterval" in (
        done.stdout
    )
