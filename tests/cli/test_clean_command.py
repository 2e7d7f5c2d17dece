"""``sparkdl clean`` removes what fits have kept, and says how much that was."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest

from sparkdl.cli.job_files import spark_session
from sparkdl.cli.job_files.job_file import SparkSection
from sparkdl.cli.main import main
from sparkdl.errors import ClusterError
from sparkdl.spark.frames import kept_frames
from sparkdl.spark.frames.kept_frames import clean_executors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


KEPT = f"sparkdl-kept-{'a' * 32}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a key of 1,234 bytes, which was used an hour ago, and a file that is not ours."""
    place = tmp_path / KEPT / "00000"
    place.mkdir(parents=True)
    (place / "shard.json").write_bytes(bytes(1234))
    for path in (place.parent, place / "shard.json"):
        os.utime(path, (time.time() - 3600, time.time() - 3600))
    (tmp_path / "mine").write_text("mine")
    return tmp_path


def test_this_machine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clean", str(folder), "--older-than", "1"]) == 0
    expected = "this machine: removed 0 bytes, 1,234 bytes are in use or newer\n"
    assert capsys.readouterr().out == expected
    assert main(["clean", str(folder)]) == 0
    assert capsys.readouterr().out == "this machine: removed 1,234 bytes\n"
    assert [path.name for path in folder.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--older-than", "-1"), "--older-than must be 0 or more days; received -1.0"),
        (("--conf", "spark.cores"), "--conf takes key=value; received 'spark.cores'"),
        (("--conf", "=2"), "--conf takes key=value; received '=2'"),
    ],
)
def test_wrong_arguments_remove_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(["clean", str(folder), *arguments]) == 1
    assert capsys.readouterr().err == f"error: {message}\n"
    assert (folder / KEPT).is_dir()


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        ("s3://bucket/a", "DIR must be a folder of local disks; received 's3://bucket/a'"),
        ("", "DIR must be a folder of local disks; received ''"),
        ("/" + "a" * 300, f"cannot look at /{'a' * 300}: File name too long"),
        ("/no/such", "this machine has no folder /no/such; for executors give --master"),
    ],
)
def test_what_is_no_folder_is_refused(
    capsys: pytest.CaptureFixture[str], directory: str, message: str
) -> None:
    assert main(["clean", directory]) == 1
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize("fails", [False, True])
def test_hosts_of_a_cluster(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    spark, sections, asked = MagicMock(), list[SparkSection](), list[Any]()

    def cleaned(*wanted: Any) -> dict[str, tuple[int, int]]:
        asked.append(wanted)
        if fails:
            raise ClusterError("no executor")
        return {"near": (1234, 0), "far": (0, 5000)}

    def session(section: SparkSection, _: str) -> MagicMock:
        sections.append(section)
        return spark

    monkeypatch.setattr(spark_session, "make_session", session)
    monkeypatch.setattr(kept_frames, "clean_executors", cleaned)
    monkeypatch.chdir(folder)
    arguments = ["--older-than", "0.5", "--master", "yarn", "--conf", "a=b=c", "--conf", "d="]
    assert main(["clean", "there", *arguments]) == int(fails)
    assert [(own.master, own.conf) for own in sections] == [("yarn", {"a": "b=c", "d": ""})]
    assert asked == [(spark, str(folder / "there"), 43200.0)]
    assert spark.stop.call_count == 1
    told = "near: removed 1,234 bytes\nfar: removed 0 bytes, 5,000 bytes are in use or newer\n"
    first = f"this machine: no folder {folder / 'there'}\n"
    assert capsys.readouterr().out == first + told * (not fails)


@pytest.mark.slow
@pytest.mark.spark
def test_executors(spark: SparkSession, folder: Path) -> None:
    ((_, found),) = clean_executors(spark, str(folder), 0.0).items()
    assert found == (1234, 0)
    assert [path.name for path in folder.iterdir()] == ["mine"]
