"""``sparkdl clean`` removes what fits have kept, and says how much that was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sparkdl.cli.main import main
from sparkdl.spark.frames.kept_frames import clean_executors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a key of 1,234 bytes, and a file that is not ours."""
    place = tmp_path / "sparkdl-kept-a" / "00000"
    place.mkdir(parents=True)
    (place / "shard.json").write_bytes(bytes(1234))
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
    ],
)
def test_wrong_arguments_remove_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(["clean", str(folder), *arguments]) == 1
    assert capsys.readouterr().err == f"error: {message}\n"
    assert (folder / "sparkdl-kept-a").is_dir()


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        ("s3://bucket/a", "DIR must be a folder of local disks; received 's3://bucket/a'"),
        ("", "DIR must be a folder of local disks; received ''"),
        ("/no/such", "this machine has no folder /no/such; for executors give --master"),
    ],
)
def test_what_is_no_folder_is_refused(
    capsys: pytest.CaptureFixture[str], directory: str, message: str
) -> None:
    assert main(["clean", directory]) == 1
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.slow
@pytest.mark.spark
def test_executors(spark: SparkSession, folder: Path) -> None:
    ((_, found),) = clean_executors(spark, str(folder), 0.0).items()
    assert found == (1234, 0)
    assert [path.name for path in folder.iterdir()] == ["mine"]
