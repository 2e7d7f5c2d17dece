"""The arguments of ``sparkdl doctor``, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sparkdl.cli import doctor_command
from sparkdl.cli.doctor.finding import Finding, Order, note, ok, wrong
from sparkdl.cli.main import main


def order(*arguments: str) -> Order:
    given = doctor_command.doctor.make_context("doctor", list(arguments))
    return doctor_command.make_order(given.params)


def test_the_command_line_becomes_an_order() -> None:
    found = order(
        "--master", "yarn", "--conf", "spark.executor.instances=4", "--conf", "a.b=c=d",
        "--checkpoint-dir", "hdfs:///c", "--num-workers", "4", "--timeout", "30",
    )  # fmt: skip
    assert found == Order(
        master="yarn",
        conf={"spark.executor.instances": "4", "a.b": "c=d"},
        checkpoint_dir="hdfs:///c",
        num_workers=4,
        timeout_seconds=30,
    )
    assert order("--remote", "sc://a:15002").master == "sc://a:15002"
    assert order() == Order()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--conf", "spark.cores"), "--conf takes key=value; received 'spark.cores'"),
        (("--num-workers", "0"), "--num-workers must be at least 1; received 0"),
        (("--timeout", "0"), "--timeout must be a positive number; received 0"),
        (
            ("--remote", "host:15002"),
            "--remote takes a URL such as sc://host:15002; received 'host",
        ),
    ],
)
def test_wrong_arguments_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(["doctor", *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_master_and_remote_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--master", "yarn", "--remote", "sc://a"]) == 2
    assert "not allowed with" in capsys.readouterr().err


def run(
    monkeypatch: pytest.MonkeyPatch, machine: list[Finding], cluster: list[Finding], *words: str
) -> int:
    def machine_findings(environ: object, *, is_remote: bool) -> Iterator[Finding]:
        assert is_remote is ("--remote" in words)
        return iter(machine)

    def cluster_findings(order: Order) -> Iterator[Finding]:
        return iter(cluster)

    monkeypatch.setattr(doctor_command, "examine_machine", machine_findings)
    monkeypatch.setattr(doctor_command, "examine_cluster", cluster_findings)
    return main(["doctor", *words])


def test_what_is_wrong_makes_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = [wrong("slots", "none; start some"), note("GPUs", "shared"), wrong("disk", "full")]
    assert run(monkeypatch, [ok("Java", "17")], cluster) == 1
    text = capsys.readouterr().out
    assert "  wrong    slots          none; start some\n" in text
    assert text.endswith("\n2 wrong: slots, disk\n")


def test_notes_do_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, [ok("Java", "17")], [note("GPUs", "shared")], "--master", "yarn") == 0
    text = capsys.readouterr().out
    assert "the cluster: yarn" in text
    assert text.endswith("\nnothing is wrong\n")


def test_a_remote_cluster_makes_this_machine_a_client(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, [ok("Python", "3")], [], "--remote", "sc://a") == 0
    assert "the cluster: sc://a" in capsys.readouterr().out
    assert doctor_command.is_client(None, {"SPARK_REMOTE": "sc://a"})
    assert not doctor_command.is_client(None, {"SPARK_REMOTE": "local[2]"})
    assert not doctor_command.is_client("yarn", {"SPARK_REMOTE": "sc://a"})


def test_the_machine_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, [ok("Java", "17")], [wrong("slots", "none")], "--no-cluster") == 0
    assert "cluster" not in capsys.readouterr().out
