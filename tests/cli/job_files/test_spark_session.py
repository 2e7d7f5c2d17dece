"""Entries of a session that come too late, and a JVM that does not start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from sparkdl.cli.job_files.job_file import SparkSection
from sparkdl.cli.job_files.spark_session import (
    _LOG4J,
    _check_entries,
    _log_errors_only,
    make_session,
)
from sparkdl.errors import ClusterError, ConfigError
from sparkdl.spark.daemon import DAEMON

SUBMITTED = {"PYSPARK_GATEWAY_PORT": "1"}


def test_what_the_jvm_reads_can_be_set_where_no_jvm_runs_yet() -> None:
    _check_entries({"spark.driver.memory": "4g"}, {}, is_remote=False)
    _check_entries({"spark.sql.shuffle.partitions": 4}, SUBMITTED, is_remote=True)


def test_under_spark_submit_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"spark-submit: --conf spark\.driver\.memory=4g"):
        _check_entries({"spark.driver.memory": "4g"}, SUBMITTED, is_remote=False)
    with pytest.raises(ConfigError, match="give it to spark-submit"):
        _check_entries({"spark.driver.extraClassPath": "x"}, SUBMITTED, is_remote=False)


def test_a_spark_connect_server_has_started_long_ago() -> None:
    with pytest.raises(ConfigError, match="the Spark Connect server's start"):
        _check_entries({"spark.driver.memory": "4g"}, {}, is_remote=True)


def test_the_deploy_mode_is_always_spark_submits() -> None:
    with pytest.raises(ConfigError, match=r"spark-submit: --conf spark\.submit\.deployMode"):
        _check_entries({"spark.submit.deployMode": "cluster"}, {}, is_remote=False)


def failing(monkeypatch: pytest.MonkeyPatch, condition: str) -> None:
    def fail(builder: object) -> None:
        raise PySparkRuntimeError(errorClass=condition, messageParameters={})

    monkeypatch.setattr(type(SparkSession.builder), "getOrCreate", fail)


def test_a_master_that_is_none_is_refused_before_spark_starts() -> None:
    with pytest.raises(ConfigError, match="'host:7077' is none of Spark's"):
        make_session(SparkSection(master="host:7077"), "test")


def test_a_master_that_does_not_answer_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stopped(Py4JJavaError):
        def __init__(self) -> None:
            Exception.__init__(self)

        def __str__(self) -> str:
            return "java.lang.IllegalStateException: stopped\nThis was created at:\nat x"

    def fail(builder: object) -> None:
        raise Stopped

    monkeypatch.setattr(type(SparkSession.builder), "getOrCreate", fail)
    with pytest.raises(ClusterError, match=r"not start on k8s://h:7: .*stopped; 'sparkdl doc"):
        make_session(SparkSection(master="k8s://h:7"), "test")


def test_a_standalone_master_that_is_not_there_is_told_before_spark_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spark would try for a minute."""
    monkeypatch.setattr(type(SparkSession.builder), "getOrCreate", lambda builder: "a session")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        one = f"spark://127.0.0.1:{port}"
        assert make_session(SparkSection(master=one), "test") == "a session"
        two = f"spark://127.0.0.1:1,127.0.0.1:{port}"
        assert make_session(SparkSection(master=two), "test") == "a session"
    with pytest.raises(ClusterError) as caught:
        make_session(SparkSection(master=one), "test")
    assert str(caught.value) == (
        f"nothing answers at 127.0.0.1:{port} ([Errno 111] Connection refused); check the URL "
        f"{one}, that the master runs, and that this host may connect to it"
    )


def test_an_event_log_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoFolder(Py4JJavaError):
        def __init__(self) -> None:
            Exception.__init__(self)

        def __str__(self) -> str:
            return (
                "java.io.IOException: Incomplete HDFS URI, no host: hdfs:///spark-events\n"
                "\tat org.apache.spark.deploy.history.EventLogFileWriter.<init>(E.scala:60)"
            )

    def fail(builder: object) -> None:
        raise NoFolder

    monkeypatch.setattr(type(SparkSession.builder), "getOrCreate", fail)
    with pytest.raises(ClusterError, match=r"no host: hdfs:///spark-events; .*eventLog\.enabled=f"):
        make_session(SparkSection(), "test")


def test_a_jvm_that_ends_is_an_error_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "JAVA_GATEWAY_EXITED")
    with pytest.raises(ClusterError, match="'sparkdl doctor' looks for the cause"):
        make_session(SparkSection(), "test")


def test_other_errors_of_spark_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "NO_ACTIVE_SESSION")
    with pytest.raises(PySparkRuntimeError):
        make_session(SparkSection(), "test")


def test_spark_s_log_is_ours_where_the_user_has_none(tmp_path: Path) -> None:
    environ: dict[str, str] = {"SPARK_SUBMIT_OPTS": "-Xss4m"}
    for _ in range(2):
        _log_errors_only(environ)
    ours = f"-Dlog4j2.configurationFile={_LOG4J.as_uri()}"
    assert environ == {"SPARK_SUBMIT_OPTS": f"-Xss4m {ours}"}
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "log4j2.properties").touch()
    for own in (
        {"SPARK_CONF_DIR": "conf"},
        {"SPARK_HOME": str(tmp_path)},
        {"SPARK_SUBMIT_OPTS": "-Dlog4j2.configurationFile=own.xml"},
    ):
        environ = dict(own)
        _log_errors_only(environ)
        assert environ == own


def test_jobs_under_spark_submit_have_the_same_log() -> None:
    conf = Path(__file__).parents[3] / "conf" / "log4j2.properties"
    assert conf.read_text(encoding="utf-8") == _LOG4J.read_text(encoding="utf-8")


def test_local_workers_begin_with_torch_in_memory_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = "spark.python.daemon.module"
    kind = type(SparkSession.builder)
    told: dict[object, object] = {}

    def config(builder: object, key: object, value: object) -> object:
        told[key] = value
        return builder

    monkeypatch.setattr(kind, "config", config)
    monkeypatch.setattr(kind, "getOrCreate", lambda builder: told.get(key))
    own: dict[str, object] = {key: "pyspark.daemon"}
    given = [
        SparkSection(master="local[2]"), SparkSection(master="local", conf=own),
        SparkSection(master="yarn"),
    ]  # fmt: skip
    found: list[object] = []
    for section in given:
        told.clear()
        found.append(make_session(section, "test"))
    assert found == [DAEMON, "pyspark.daemon", None]
