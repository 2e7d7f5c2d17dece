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
from sparkdl.cli.images.parts import Part
from sparkdl.cli.images.prepare import prepare
from sparkdl.cli.images.write_parquet import PartWriter
from sparkdl.data.images import read_images
from sparkdl.errors import ConfigError, DataError
from sparkdl.inputs import Image
from tests.cli.images.trees import digit_files, job, png

pytestmark = pytest.mark.spark

SPLIT = {"validation": 0.2, "test": 0.1}


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


@pytest.mark.slow
def test_every_file_becomes_a_row_with_the_number_of_its_folder(
    spark: SparkSession, digits: tuple[Path, dict[str, int]], tmp_path: Path
) -> None:
    root, labels = digits
    key = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(key)
    report = run(spark, root, tmp_path / "o", split=SPLIT, output_rows_per_file=16)
    assert spark.conf.get(key) == before
    assert sum(report.rows.values()) == 60
    assert set(report.rows) == {"train", "validation", "test"}
    assert report.bad == ()
    seen: dict[str, int] = {}
    for split, count in report.rows.items():
        rows = spark.read.parquet(str(tmp_path / "o" / split))
        assert rows.dtypes == [("image", "binary"), ("label", "bigint"), ("path", "string")]
        for row in rows.collect():
            assert bytes(row.image) == (root / row.path).read_bytes()
            seen[row.path] = row.label
        named = IndexToString(inputCol="label", outputCol="name").transform(rows)
        assert all(row.path.split("/")[0] == row.name for row in named.collect())
        parts = sorted((tmp_path / "o" / split).glob("*.parquet"))
        assert [path.name for path in parts] == [
            f"part-{number:05d}.parquet" for number in range(-(-count // 16))
        ]
    assert seen == labels
    left = {path.name for path in (tmp_path / "o").iterdir()}
    assert left == {"train", "validation", "test", "labels.json", "prepare.json"}
    assert json.loads((tmp_path / "o" / "labels.json").read_text()) == list("0123456789")


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["jpeg", "struct"])
def test_images_are_encoded_anew(
    spark: SparkSession, digits: tuple[Path, dict[str, int]], tmp_path: Path, encoding: str
) -> None:
    image = {"encoding": encoding, "size": [4, 6], "mode": "L"}
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
    told = job(root, tmp_path / "o", labels=section)
    report = prepare(spark, told, table)
    rows = spark.read.parquet(str(tmp_path / "o" / "train")).collect()
    assert {row.path: row.label for row in rows} == {path: labels[path] / 2 for path in paths}
    assert report.rows_by_label == {"train": {}}
    more = table.union(spark.createDataFrame([("none.png", 1.0)], table.schema))
    with pytest.raises(DataError, match=r"1 file cannot be used:\n  none.png: named in the table"):
        prepare(spark, job(root, tmp_path / "p", labels=section), more)
    skipping = job(root, tmp_path / "p", labels=section, output_on_error="skip")
    report = prepare(spark, skipping, more)
    assert report.bad == (("none.png", "named in the table of labels, but not in the folder"),)
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
    options: dict[str, Any] = {"output_rows_per_file": 5}
    with pytest.raises(DataError, match=r"1 file cannot be used:\n  .*: the file is empty\n"):
        run(spark, root, output, **options)
    empty = next(path for path in root.rglob("*.png") if not path.stat().st_size)
    skipping = run(spark, root, tmp_path / "p", output_on_error="skip")
    assert {path for path, _ in skipping.bad} == bad
    assert dict(skipping.bad)[str(empty.relative_to(root))] == "the file is empty"
    empty.unlink()
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
    report = run(spark, tmp_path / "f", tmp_path / "o", output_on_error="skip")
    assert (report.rows, report.files, len(report.bad)) == ({}, {}, 1)


IN_PARTS: dict[str, Any] = {"split": SPLIT, "output_rows_per_file": 8}


@pytest.fixture(scope="module")
def whole(
    spark: SparkSession,
    digits: tuple[Path, dict[str, int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """What an undisturbed run leaves."""
    output = tmp_path_factory.mktemp("prepared") / "whole"
    run(spark, digits[0], output, **IN_PARTS)
    return output


class Killed(BaseException):
    """As `kill -9` ends a driver: nothing is cleaned up."""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["write", "put_in_place"])
def test_a_run_that_was_cut_off_ends_as_an_undisturbed_one(
    spark: SparkSession,
    digits: tuple[Path, dict[str, int]],
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    calls = []
    original = getattr(PartWriter, when)

    def dies(writer: PartWriter, first: Any, *others: Any) -> Any:
        calls.append(first)
        result = original(writer, first, *others)
        if len(calls) == 3:
            raise Killed
        return result

    with monkeypatch.context() as patch:
        patch.setattr(PartWriter, when, dies)
        with pytest.raises(Killed):
            run(spark, digits[0], tmp_path / "cut", **IN_PARTS)
    assert not (tmp_path / "cut" / "prepare.json").exists()
    written: list[str] = []
    original_write = PartWriter.write

    def notes(writer: PartWriter, parts: Sequence[Part]) -> Any:
        written.extend(part.name for part in parts)
        return original_write(writer, parts)

    done = {path.stem for path in (tmp_path / "cut" / "_prepare" / "done").iterdir()}
    assert done
    with monkeypatch.context() as patch:
        patch.setattr(PartWriter, "write", notes)
        run(spark, digits[0], tmp_path / "cut", **IN_PARTS)
    assert not done & set(written)
    assert files_in(tmp_path / "cut") == files_in(whole)
    before = files_in(tmp_path / "cut")
    again = run(spark, digits[0], tmp_path / "cut", **IN_PARTS)
    assert again.rows == {"train": 47, "validation": 9, "test": 4}
    assert files_in(tmp_path / "cut") == before


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


def test_the_sessions_limit_of_rows_in_a_file_is_not_ours(
    spark: SparkSession, digits: tuple[Path, dict[str, int]], tmp_path: Path
) -> None:
    spark.conf.set("spark.sql.files.maxRecordsPerFile", "3")
    try:
        report = run(spark, digits[0], tmp_path / "o")
    finally:
        spark.conf.unset("spark.sql.files.maxRecordsPerFile")
    assert (report.rows, report.files) == ({"train": 60}, {"train": 1})


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
