"""The doctor sees what is wrong with a machine."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from sparkdl.cli.doctor import machine_checks
from sparkdl.cli.doctor.machine_checks import (
    examine_machine,
    host_name,
    is_within,
    java,
    package_finding,
    required_ranges,
    spark_home,
    workers_python,
)
from sparkdl.runtime.versions import TESTED


def install(folder: Path, name: str, body: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_this_machine_can_run_the_tests() -> None:
    findings = list(examine_machine(os.environ))
    assert [finding.line() for finding in findings if finding.state == "wrong"] == []
    subjects = [finding.subject for finding in findings]
    assert {"Python", "sparkdl", "pyspark", "torch", "Java", "host"} <= set(subjects)


def test_a_client_of_spark_connect_needs_no_java(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path), "SPARK_HOME": str(tmp_path), "PYSPARK_PYTHON": "/none"}
    findings = list(examine_machine(environ, is_remote=True))
    assert [finding.line() for finding in findings if finding.state == "wrong"] == []
    found = {finding.subject: finding.state for finding in findings}
    assert (found["Java"], found["PYSPARK_PYTHON"]) == ("left out", "left out")
    assert not {"SPARK_HOME", "host"} & set(found)
    here = {finding.subject: finding.state for finding in examine_machine(environ)}
    assert (here["Java"], here["SPARK_HOME"]) == ("wrong", "wrong")


def test_workers_that_would_compile_torch_each_time_are_noted() -> None:
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    (found,) = (one for one in examine_machine(environ) if one.subject.endswith("BYTECODE"))
    assert found.state == "note" and "unset it" in found.text


@pytest.mark.parametrize(
    ("version", "allowed", "expected"),
    [
        ("4.1", ">=4.1,<4.4", True),
        ("4.1.0", ">=4.1,<4.4", True),
        ("4.3.7", ">=4.1,<4.4", True),
        ("4.4.0", ">=4.1,<4.4", False),
        ("4.0.9", ">=4.1,<4.4", False),
        ("2.10.0+cu128", ">=2.9", True),
        ("2.9.0.dev3", ">=2.9", True),
        ("10.0", "<9", False),
        ("1", "", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, allowed: str, expected: bool) -> None:
    assert is_within(version, allowed) is expected


def test_the_ranges_are_those_of_the_installation() -> None:
    ranges = required_ranges()
    assert set(ranges["torch"].split(",")) == {">=2.9", "<2.15"}
    assert set(ranges["pyspark"].split(",")) == {">=4.1", "<4.4"}


def test_packages_are_there_missing_or_of_another_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert package_finding("torch", "2.13.0", ">=2.9").state == "ok"
    missing = package_finding("torch", None, ">=2.9")
    assert (missing.state, missing.text) == (
        "wrong",
        'is not installed; pip install "torch>=2.9"',
    )
    old = package_finding("pyspark", "3.5.1", "<4.4,>=4.1")
    assert old.state == "wrong"
    assert "3.5.1 is outside the range <4.4,>=4.1; pip install" in old.text
    monkeypatch.setitem(TESTED, "torch", ("2.9", "2.14"))
    new = package_finding("torch", "2.16.0+cpu", ">=2.9")
    assert (new.state, new.text) == (
        "note",
        "2.16.0+cpu is newer than the newest tested, 2.14",
    )


def test_a_python_that_nobody_tested_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TESTED, "python", ("3.9", "3.10"))
    first = next(examine_machine(os.environ))
    assert (first.subject, first.state) == ("Python", "note")
    assert f"newer than the newest tested, 3.10; {sys.executable}" in first.text


JAVA_17 = "echo 'openjdk version \"17.0.2\" 2022-01-18' >&2"
JAVA_8 = "echo 'java version \"1.8.0_202\"' >&2"


def test_java_of_the_path(tmp_path: Path) -> None:
    assert "there is none on the PATH; install Java 17" in java({"PATH": str(tmp_path)}).text
    install(tmp_path, "java", JAVA_17)
    found = java({"PATH": str(tmp_path)})
    assert (found.state, found.text) == ("ok", f"17.0.2, {tmp_path}/java")


def test_java_home_comes_first(tmp_path: Path) -> None:
    install(tmp_path, "java", JAVA_17)
    install(tmp_path / "old" / "bin", "java", JAVA_8)
    environ = {"PATH": str(tmp_path), "JAVA_HOME": str(tmp_path / "old")}
    found = java(environ)
    assert found.state == "wrong"
    assert "old/bin/java is version 1.8.0_202; install Java 17" in found.text
    assert "there is none in JAVA_HOME=/none" in java({**environ, "JAVA_HOME": "/none"}).text


def test_a_java_that_cannot_run(tmp_path: Path) -> None:
    install(tmp_path, "java", "echo no such library >&2; exit 3")
    found = java({"PATH": str(tmp_path)})
    assert found.state == "wrong"
    assert "does not tell its version (exit 3)" in found.text


def test_spark_home_must_be_of_pysparks_version(tmp_path: Path) -> None:
    assert "holds no Spark; unset SPARK_HOME" in spark_home(tmp_path, "4.3.0").text
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "spark-core_2.13-4.3.1.jar").touch()
    assert spark_home(tmp_path, "4.3.0").state == "ok"
    other = spark_home(tmp_path, "4.1.0")
    assert other.state == "wrong"
    assert "is Spark 4.3.1, pyspark is 4.1.0; unset SPARK_HOME" in other.text


def test_the_workers_python(tmp_path: Path) -> None:
    assert workers_python({}).state == "ok"
    assert workers_python({"PYSPARK_PYTHON": sys.executable}).state == "ok"
    submitted = workers_python({"PYSPARK_GATEWAY_PORT": "4711"})
    assert submitted.state == "note"
    assert "the first python3 of their PATH" in submitted.text
    away = workers_python({"PYSPARK_PYTHON": "./env/bin/python"})
    assert away.state == "note"
    old = install(tmp_path, "python", "echo 3.8")
    found = workers_python({"PYSPARK_PYTHON": str(old)})
    assert found.state == "wrong"
    assert f"is Python 3.8, the driver runs 3.{sys.version_info[1]}; export PYSPARK_P" in found.text


def test_a_host_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere")
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    found = host_name({})
    assert found.state == "wrong"
    assert "write nowhere into /etc/hosts, or set SPARK_LOCAL_IP" in found.text
    assert host_name({"SPARK_LOCAL_IP": "127.0.0.1"}).state == "ok"


def test_the_foreign_package_elsewhere_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sparkdl-0.2.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: sparkdl\nVersion: 0.2.2\n", encoding="utf-8")
    assert list(machine_checks.foreign_package()) == []
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = machine_checks.foreign_package()
    assert found.state == "wrong"
    assert f"another package of that name, 0.2.2, is at {tmp_path}" in found.text
