from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyspark.ml.feature import IndexToString
from pyspark.sql import SparkSession

from sparkdl.cli.images.list_files import below, escaped, qualified
from sparkdl.cli.images.parts import ImagePart
from sparkdl.cli.images.prepare import prepare
from sparkdl.cli.images.write_parquet import PartWriter
from sparkdl.data.images import read_images
from sparkdl.errors import ConfigError, DataError
from sparkdl.inputs import Image
from tests.cli.images.trees import digit_files, job, png

pytestmark = pytest.mark.spark

IN_PARTS: dict[str, Any] = {
    "split": {"validation": 0.2, "test": 0.1}, "output_rows_per_file": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    root = tmp_path_factory.mktemp("files") / "digits"
    return root, digit_files(root, 60)


def run(spark: SparkSession, *arguments: Any, **options: Any) -> Any:
    return prepare(spark, job(*arguments, **options))


def files_in(output: Path) -> dict[str, bytes]:
    """What a reader sees: the tables of all Parquet files, and the notes beside them."""
    found = {}
    for path in sorted(output.rglob("*")):
        if path.suffix == ".parquet":
            found[str(path.relative_to(output))] = repr(pq.read_table(path).to_pydict()).encode()
        elif path.is_file():
            found[str(path.relative_to(output))] = path.read_bytes()
    return found


@pytest.fixture(scope="module")
def whole(
    spark: SparkSession,
    digits: tuple[Path, dict[str, int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Any]:
    """What an undisturbed run leaves, and its report; the session's limits are not the run's."""
    output = tmp_path_factory.mktemp("prepared") / "whole"
    session = {
        "spark.sql.files.maxRecordsPerFile": "3",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "7",
    }
    for key, value in session.items():
        spark.conf.set(key, value)
    try:
        report = run(spark, digits[0], output, **IN_PARTS)
        assert {key: spark.conf.get(key) for key in session} == session
    finally:
        for key in session:
            spark.conf.unset(key)
    return output, report


@pytest.mark.slow
def test_every_file_becomes_a_row_with_the_number_of_its_folder(
    spark: SparkSession, digits: tuple[Path, dict[str, int]], whole: tuple[Path, Any]
) -> None:
    (root, labels), (output, report) = digits, whole
    assert report.rows == {"train": 47, "validation": 9, "test": 4}
    assert report.bad == ()
    seen: dict[str, int] = {}
    for split, count in report.rows.items():
        rows = spark.read.parquet(str(output / split))
        assert rows.dtypes == [("image", "binary"), ("label", "bigint"), ("path", "string")]
        named = IndexToString(inputCol="label", outputCol="name").transform(rows)
        for row in named.collect():
            assert bytes(row.image) == (root / row.path).read_bytes()
            assert row.path.split("/")[0] == row.name
            seen[row.path] = row.label
        parts = sorted((output / split).glob("*.parquet"))
        assert [path.name for path in parts] == [
            f"part-{number:05d}.parquet" for number in range(-(-count // 16))
        ]
    assert seen == labels
    left = {path.name for path in output.iterdir()}
    assert left == {"train", "validation", "test", "labels.json", "prepare.json"}
    assert json.loads((output / "labels.json").read_text()) == list("0123456789")


@pytest.mark.slow
def test_images_are_encoded_anew(
    spark: SparkSession, digits: tuple[Path, dict[str, int]], tmp_path: Path
) -> None:
    image = {"encoding": "struct", "size": [4, 6], "mode": "L"}
    run(spark, digits[0] / "3", tmp_path / "o", image=image, labels={"source": "none"})
    rows = spark.read.parquet(str(tmp_path / "o" / "train"))
    assert rows.columns == ["image", "path"]
    batch = rows.toArrow().combine_chunks()
    images, _, _ = read_images(batch["image"].combine_chunks(), Image("image", channels=1))
    assert images.shape == (rows.count(), 1, 4, 6)


@pytest.mark.slow
def test_labels_of_a_table(
    spark: SparkSession, digits: tuple[Path, dict[str, int]], tmp_path: Path
) -> None:
    root, labels = digits
    paths = sorted(labels)[:20]
    table = spark.createDataFrame(
        [(f"{root}/{path}", labels[path] / 2) for path in paths], "file string, half double"
    )
    section = {"source": "table", "table": {"path": "-"}, "path_col": "file", "label_col": "half"}
    more = table.union(spark.createDataFrame([("none.png", 1.0)], table.schema))
    with pytest.raises(DataError, match=r"1 file cannot be used:\n  none.png: named in the table"):
        prepare(spark, job(root, tmp_path / "o", labels=section), more)
    skipping = job(root, tmp_path / "o", labels=section, output_on_error="skip")
    report = prepare(spark, skipping, more)
    assert report.bad == (("none.png", "named in the table of labels, but not in the folder"),)
    assert report.rows_by_label == {"train": {}}
    rows = spark.read.parquet(str(tmp_path / "o" / "train")).collect()
    assert {row.path: row.label for row in rows} == {path: labels[path] / 2 for path in paths}
    wrong = job(root, tmp_path / "q", labels={**section, "path_col": "nowhere"})
    with pytest.raises(DataError, match=r'no column "nowhere"; its columns: file, half'):
        prepare(spark, wrong, table)


@pytest.fixture
def spoilt(tmp_path: Path) -> tuple[Path, set[str]]:
    """A folder with good files, three bad ones, and one that is no image by its name."""
    root = tmp_path / "spoilt"
    digit_files(root, 30)
    whole = sorted(path for path in root.rglob("*.png"))
    whole[3].write_bytes(b"")
    whole[9].write_bytes(whole[9].read_bytes()[:40])
    (root / "0" / "text.jpg").write_text("hello")
    (root / "0" / "notes.txt").write_text("hello")
    bad = {*(str(path.relative_to(root)) for path in (whole[3], whole[9])), "0/text.jpg"}
    return root, bad


@pytest.mark.slow
def test_bad_files_are_skipped_and_listed_on_request(
    spark: SparkSession, spoilt: tuple[Path, set[str]], tmp_path: Path
) -> None:
    root, bad = spoilt
    output = tmp_path / "o"
    options: dict[str, Any] = {"output_rows_per_file": 10}
    with pytest.raises(DataError, match=r"1 file cannot be used:\n  .*: the file is empty\n"):
        run(spark, root, output, **options)
    next(path for path in root.rglob("*.png") if not path.stat().st_size).unlink()
    with pytest.raises(DataError, match=r"(?s)cannot be used:.*--set output.on_error=skip") as told:
        run(spark, root, output, **options)
    assert any(f"  {path}: " in str(told.value) for path in bad)
    assert (output / "_prepare" / "plan.json").exists()
    bad = {path for path in bad if (root / path).exists()}
    report = run(spark, root, output, **options, output_on_error="skip")
    assert {path for path, _ in report.bad} == bad
    reasons = dict(report.bad)
    assert reasons["0/text.jpg"].startswith("cannot be decoded (UnidentifiedImageError")
    rows = spark.read.parquet(str(output / "train")).collect()
    assert len(rows) == report.rows["train"] == 28
    assert not bad & {row.path for row in rows}
    lines = (output / "bad_files.jsonl").read_text().splitlines()
    assert {json.loads(line)["path"] for line in lines} == bad
    assert not (output / "_prepare").exists()


@pytest.mark.slow
def test_a_folder_of_bad_files_only(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "f" / "a").mkdir(parents=True)
    (tmp_path / "f" / "a" / "1.png").write_bytes(b"no")
    (tmp_path / "f" / "a" / "2.png").touch()
    report = run(spark, tmp_path / "f", tmp_path / "o", output_on_error="skip")
    assert (report.rows, report.files) == ({}, {})
    assert {path for path, _ in report.bad} == {"a/1.png", "a/2.png"}
    assert dict(report.bad)["a/2.png"] == "the file is empty"


class Killed(BaseException):
    """As `kill -9` ends a driver: nothing is cleaned up."""


@pytest.mark.slow
def test_a_run_that_was_cut_off_twice_ends_as_an_undisturbed_one(
    spark: SparkSession,
    digits: tuple[Path, dict[str, int]],
    whole: tuple[Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut = tmp_path / "cut"
    written: list[list[str]] = []

    def run_once(dies_at: str = "", call: int = 0) -> Any:
        """Run it until the ``call``th call of a method of the writer; note the parts it writes."""
        written.append([])
        calls = []
        write = PartWriter.write

        def notes(writer: PartWriter, parts: Sequence[ImagePart]) -> Any:
            written[-1].extend(part.name for part in parts)
            return write(writer, parts)

        with monkeypatch.context() as patch:
            patch.setattr(PartWriter, "write", notes)
            if dies_at:
                original = getattr(PartWriter, dies_at)

                def dies(writer: PartWriter, first: Any, *others: Any) -> Any:
                    calls.append(first)
                    result = original(writer, first, *others)
                    if len(calls) == call:
                        raise Killed
                    return result

                patch.setattr(PartWriter, dies_at, dies)
            return run(spark, digits[0], cut, **IN_PARTS)

    done: set[str] = set()
    for place, call in (("write", 2), ("put_in_place", 2)):
        with pytest.raises(Killed):
            run_once(place, call)
        assert not (cut / "prepare.json").exists()
        assert not done & set(written[-1])
        done = {path.stem for path in (cut / "_prepare" / "done").iterdir()}
        assert done
    run_once()
    assert not done & set(written[-1])
    assert files_in(cut) == files_in(whole[0])
    before = files_in(cut)
    again = run_once()
    assert written[-1] == []
    assert again.rows == whole[1].rows
    assert files_in(cut) == before


@pytest.mark.slow
def test_other_options_and_other_files_are_another_run(spark: SparkSession, tmp_path: Path) -> None:
    root, output = tmp_path / "f", tmp_path / "o"
    digit_files(root, 12)
    run(spark, root, output)
    with pytest.raises(ConfigError, match=r"split.test was 0.0 and is 0.1 now"):
        run(spark, root, output, split={"test": 0.1})
    (root / "0" / "new.png").write_bytes(png(np.zeros((8, 8), np.uint8)))
    with pytest.raises(ConfigError, match=r"12 files before, 13 now.*output.overwrite=true"):
        run(spark, root, output)
    report = run(spark, root, output, output_overwrite=True)
    assert report.rows == {"train": 13}
    assert spark.read.parquet(str(output / "train")).count() == 13


def test_what_cannot_be_done_is_told_before_anything_is_written(
    spark: SparkSession, tmp_path: Path
) -> None:
    root = tmp_path / "f"
    with pytest.raises(DataError, match=r"cannot read .*/f: \[PATH_NOT_FOUND\]"):
        run(spark, root, tmp_path / "o")
    (root / "a").mkdir(parents=True)
    with pytest.raises(DataError, match="there are no image files below"):
        run(spark, root, tmp_path / "o")
    digit_files(root, 2)
    for output in (root / "o", tmp_path, root):
        with pytest.raises(ConfigError, match="lie one in the other"):
            run(spark, root, output)
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_names_with_odd_letters(spark: SparkSession, tmp_path: Path) -> None:
    root = tmp_path / "a [b] {c}" / "k=v"
    names = ["a b.png", "c[1].png", "d{x}.PNG", "e*?.png", "f%20g.png", "h#i.png", "ü,\\n.png"]
    for number, name in enumerate(names):
        (root / f"x=[{number % 2}]").mkdir(parents=True, exist_ok=True)
        pixels = np.full((2, 2), number, np.uint8)
        (root / f"x=[{number % 2}]" / name).write_bytes(png(pixels))
    report = run(spark, root, tmp_path / "o")
    assert report.rows_by_label == {"train": {"x=[0]": 4, "x=[1]": 3}}
    rows = spark.read.parquet(str(tmp_path / "o" / "train")).collect()
    assert {row.path.split("/")[1] for row in rows} == set(names)


def test_paths_below_the_folder_however_it_was_written() -> None:
    urls = ["hdfs://host:8020/user/me/pics/a/1.png", "hdfs://host:8020/user/me/pics/b/2.png"]
    for root in ("pics", "/user/me/pics", "hdfs:/user/me/pics/", "pics/"):
        assert below(root, urls) == ("hdfs://host:8020/user/me/pics", ["a/1.png", "b/2.png"])
    assert below("/data", ["hdfs://data/data/a"]) == ("hdfs://data/data", ["a"])
    assert below("file:/p", ["file:/p/1.png"]) == ("file:/p", ["1.png"])
    assert below("x", []) == ("x", [])
    assert escaped("a[1]*.png") == "a\\[1\\]\\*.png"


def test_paths_get_their_file_system(spark: SparkSession, tmp_path: Path) -> None:
    assert qualified(spark, str(tmp_path)) == f"file:{tmp_path}"
