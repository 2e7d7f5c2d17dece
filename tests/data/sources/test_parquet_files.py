from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from sparkdl.data.batches import Batches
from sparkdl.data.plan import SpoolColumn
from sparkdl.data.source import Contents, open_shards
from sparkdl.data.sources.parquet import ParquetSource
from sparkdl.data.sources.parquet_files import digest_of, list_files
from sparkdl.errors import DataError
from sparkdl.inputs import Tensor
from tests.data.sources.test_parquet import FEATURES, LABEL, epoch_of, joined, plan_of, wanted


@pytest.mark.parametrize("is_replaced", [False, True])
def test_values_that_change_between_epochs_are_noticed(tmp_path: Path, is_replaced: bool) -> None:
    """Also where the footer stays as it was, which tells only sizes, least and largest values."""
    folder = tmp_path / "data"
    folder.mkdir()

    def write_values(path: Path, middle: float) -> None:
        values = pa.table({"x": [0.0, middle, 9.0]})
        pq.write_table(values, path, compression="none", use_dictionary=False)

    write_values(folder / "a.parquet", 1.0)
    contents = ParquetSource(folder).contents(wanted(FEATURES, num_shards=1))
    plan = plan_of(contents)
    rows = open_shards(contents.reader, plan, 0, "train")

    def epoch(number: int) -> list[float]:
        batches = Batches(rows, plan, 0, seed=0, epoch=number)
        return sorted(float(x) for batch in batches for x in batch.inputs[0])

    assert epoch(0) == epoch(1) == [0, 1, 9]
    before = pq.read_metadata(folder / "a.parquet")
    if is_replaced:
        write_values(tmp_path / "other", 2.0)
        (tmp_path / "other").rename(folder / "a.parquet")
    else:
        write_values(folder / "a.parquet", 2.0)
    assert digest_of(pq.read_metadata(folder / "a.parquet")) == digest_of(before)
    with pytest.raises(DataError, match="has changed since fit has listed it"):
        epoch(2)


def test_footers_are_read_once_and_little_is_kept_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[str] = []
    read = pq.read_metadata
    monkeypatch.setattr(pq, "read_metadata", lambda file: places.append(file) or read(file))
    table = pa.table({f"c{number}": range(1000) for number in range(30)})
    table = table.append_column("user", pa.array([{"age": 7.5, "name": "x"}] * 1000))
    for number in range(3):
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=10)
    listing = list_files(str(tmp_path), ["c4", "User.age"])
    assert len(places) == 3
    groups = listing.row_groups()
    assert [group.num_rows for group in groups] == [10] * 300
    assert all(footer.leaves == ("c4", "user.age") for footer in listing.footers.values())
    kept = [footer.groups.nbytes + footer.chunks.nbytes for footer in listing.footers.values()]
    assert sum(kept) == 300 * (24 + 2 * 40)
    assert listing.chunk(groups[101], 0) == (10, 0, 10, 19, 10)
    assert listing.chunk(groups[101], 1)[2:4] == (7.5, 7.5)
    start, stop = listing.byte_range(groups[101])
    assert stop == listing.byte_range(groups[102])[0] > start


def write_all(folder: Path, tables: Sequence[pa.Table]) -> Path:
    folder.mkdir(parents=True)
    for number, data in enumerate(tables):
        pq.write_table(data, folder / f"{number}.parquet")
    return folder


def values_of(contents: Contents) -> list[Any]:
    """Of the first input, in ascending order."""
    plan = plan_of(contents)
    ranks = [epoch_of(contents, plan, rank) for rank in range(plan.world_size)]
    return sorted(joined(batch.inputs[0].tolist() for batch in joined(ranks)))


@pytest.mark.parametrize(
    "other",
    [
        pa.table({"y": ["a"], "x": [2.0]}),
        pa.table({"x": [2.0]}),
        pa.table({"x": [2.0], "y": pa.array([None], pa.null())}),
        pa.table({"x": [2.0], "y": pa.array(["a"]).dictionary_encode()}),
        pa.table(
            [pa.array([2.0]), pa.array(["a"])],
            pa.schema([pa.field("x", pa.float64(), False), pa.field("y", pa.string())]),
        ),
    ],
)
def test_files_may_differ_in_what_does_not_matter(tmp_path: Path, other: pa.Table) -> None:
    first = pa.table({"x": [1.0], "y": ["b"]})
    empty = pa.table({"z": pa.array([], pa.int64())})
    folder = write_all(tmp_path / "data", [empty, first, other])
    (folder / "3.parquet").touch()
    source = ParquetSource(folder)
    assert source.schema().names == ["x", "y"]
    assert values_of(source.contents(wanted(FEATURES))) == [1, 2]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"z": [1.0]}, r'differ in column "x": it has type double, but .*1\.parquet has no such'),
        ({"x": ["a"]}, r"1\.parquet has type string"),
        ({"x": [[1.0]]}, r"1\.parquet has type list"),
    ],
)
def test_files_must_have_the_same_columns(
    tmp_path: Path, other: dict[str, Any], message: str
) -> None:
    tables = [pa.table({"x": [1.0]}), pa.table(other)]
    source = ParquetSource(write_all(tmp_path / "data", tables))
    with pytest.raises(DataError, match=message):
        source.contents(wanted(FEATURES))


def test_what_is_no_parquet_is_named(tmp_path: Path) -> None:
    folder = write_all(tmp_path / "data", [pa.table({"x": [1.0]})])
    (folder / "notes.txt").write_text("some words")
    with pytest.raises(DataError, match=r"notes.txt is no Parquet file"):
        ParquetSource(folder).contents(wanted(FEATURES))


def test_links_that_lead_back_give_no_row_twice(tmp_path: Path) -> None:
    """With two of them there would be more paths than could ever be listed."""
    folder = write_all(tmp_path / "data", [pa.table({"x": [1.0]})])
    write_all(tmp_path / "more", [pa.table({"x": [2.0, 3.0]})])
    write_all(folder / "below" / "_hidden", [pa.table({"x": [4.0]})])
    for name in ("again", "below/once more"):
        (folder / name).symlink_to(folder)
    (folder / "more").symlink_to(tmp_path / "more")
    (tmp_path / "more" / "back").symlink_to(folder)
    (folder / "nothing").symlink_to(tmp_path / "nothing")
    (folder / "zeros").symlink_to("/dev/zero")
    found = list_files(str(folder), ["x"])
    assert sorted(footer.num_rows for footer in found.footers.values()) == [1, 2]


def test_columns_that_folders_tell_are_of_one_type_and_are_checked(tmp_path: Path) -> None:
    data = pa.table({"x": [1.0, 2.0], "year": ["of the file", "of the file"]})
    for name in ("2024", "__HIVE_DEFAULT_PARTITION__"):
        write_all(tmp_path / "data" / f"year={name}", [data])
    source = ParquetSource(tmp_path / "data")
    assert source.schema().field("year").type == pa.int32()
    label = SpoolColumn(name="year", role="label", dtype="int64", as_classes=True)
    with pytest.raises(DataError, match='column "year" has 2 null rows'):
        source.contents(wanted(FEATURES, label))
    types = []

    def noted(batch: pa.RecordBatch) -> pa.Array:
        types.append(batch.schema.field("year").type)
        return pc.fill_null(batch.column("year"), -1)

    kind = Tensor("year", transform=noted)
    column = SpoolColumn(name="year", role="feature", dtype="float32", specification=kind)
    (contents,) = [source.contents(wanted(column))]
    plan = plan_of(contents)
    for shard in plan.shards:
        rows = contents.reader.open(plan, shard, "train")
        found = [x for columns in rows.in_order(100) for x in columns["feature year"].tolist()]
        assert set(found) <= {-1, 2024}
    assert set(types) == {pa.int32()}


def test_folders_that_no_column_tells_apart_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = pa.table({"x": [1.0, 2.0]})
    for name in ("data/train", "by/y=1", "by/y=2", "one/part"):
        write_all(tmp_path / name, [data])
    for name in ("by", "one", "data/train"):
        ParquetSource(tmp_path / name).schema()
    assert not caplog.records
    write_all(tmp_path / "data/test", [data])
    ParquetSource(tmp_path / "data").contents(wanted(FEATURES))
    assert "data is read with the folders below it, test, train, whose names give" in caplog.text
    caplog.clear()
    write_all(tmp_path / "beside", [data])
    (tmp_path / "one/part").rename(tmp_path / "beside/part")
    ParquetSource(tmp_path / "beside").contents(wanted(FEATURES))
    assert "the folders below it, part," in caplog.text


def test_labels_that_folders_tell_are_checked(tmp_path: Path) -> None:
    for label in (0, 3):
        write_all(tmp_path / "data" / f"y={label}", [pa.table({"x": [1.0, 2.0]})])
    contents = ParquetSource(tmp_path / "data").contents(wanted(FEATURES, LABEL))
    assert contents.labels_outside(1, 4) is None
    assert contents.labels_outside(1, 3) == (2, "row 0 of row group 0 of 0.parquet")
    (tmp_path / "data" / "y=3").rename(tmp_path / "data" / "y=-1")
    with pytest.raises(DataError, match=r"class indices.* 2 rows do not"):
        ParquetSource(tmp_path / "data").contents(wanted(FEATURES, LABEL))
