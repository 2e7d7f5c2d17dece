from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparkdl.data.batches import Batch, Batches, sequential_batches
from sparkdl.data.plan import SpoolColumn, TrainPlan, make_plan
from sparkdl.data.source import Contents, Source, Wanted, open_shards
from sparkdl.data.sources.parquet import ParquetSource
from sparkdl.errors import ConfigError, DataError, StorageError
from sparkdl.inputs import Sequence as SequenceInput
from sparkdl.inputs import Tensor
from sparkdl.storage.storage import open_storage

FEATURES = SpoolColumn(name="x", role="feature", dtype="float32")
LABEL = SpoolColumn(name="y", role="label", dtype="int64", as_classes=True)


def table(first: int, count: int) -> pa.Table:
    y = np.arange(first, first + count)
    x = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(y, 3).astype("float64")), 3)
    return pa.table({"x": x.cast(pa.list_(pa.float64())), "y": y, "held": y % 5 == 0})


def write(folder: Path, rows: Sequence[int], group: int = 10) -> Path:
    folder.mkdir(exist_ok=True)
    first = 0
    for number, count in enumerate(rows):
        path = folder / f"part-{number}.parquet"
        pq.write_table(table(first, count), path, row_group_size=group)
        first += count
    return folder


def wanted(*columns: SpoolColumn, **changes: Any) -> Wanted:
    default = Wanted(columns=columns or (FEATURES, LABEL), validation=None, num_shards=2)
    return replace(default, **changes)


def plan_of(contents: Contents, batch_size: int = 4, world_size: int | None = None) -> TrainPlan:
    return make_plan(
        columns=contents.columns,
        shards=contents.shards,
        world_size=world_size or len(contents.shards),
        batch_size=batch_size,
        epochs=1,
    )


def epoch_of(contents: Contents, plan: TrainPlan, rank: int, **changes: Any) -> list[Batch]:
    reader = cloudpickle.loads(cloudpickle.dumps(contents.reader))
    rows = open_shards(reader, plan, rank, "train")
    options = {"seed": 3, "epoch": 0, **changes}
    return [b.map(torch.clone) for b in Batches(rows, plan, rank, **options)]


def validation_of(contents: Contents, plan: TrainPlan, rank: int) -> list[int]:
    rows = open_shards(contents.reader, plan, rank, "validation")
    return [int(y) for b in sequential_batches(rows, plan) for y in b.target]


def labels(batches: Sequence[Batch]) -> list[int]:
    return [int(label) for batch in batches for label in batch.target]


def joined(several: Iterable[list[Any]]) -> list[Any]:
    return [item for items in several for item in items]


@pytest.mark.parametrize("rows", [[25, 31, 4], [1, 1], [3], [0, 60]])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_the_ranks_use_every_row_once_and_get_equally_many(
    tmp_path: Path, rows: list[int], num_shards: int
) -> None:
    source = ParquetSource(write(tmp_path / "data", rows))
    contents = source.contents(wanted(num_shards=num_shards))
    sizes = [shard.num_rows for shard in contents.shards]
    assert max(sizes) - min(sizes) <= 1
    plan = plan_of(contents)
    seen = [epoch_of(contents, plan, rank) for rank in range(num_shards)]
    assert sorted(joined(map(labels, seen))) == list(range(sum(rows)))
    for batch in joined(seen):
        assert batch.inputs[0].dtype == torch.float32
        assert batch.inputs[0].tolist() == [[y, y, y] for y in batch.target.tolist()]


def test_equal_files_give_equal_shards_wherever_they_lie(tmp_path: Path) -> None:
    first = ParquetSource(write(tmp_path / "a", [30, 30])).contents(wanted())
    second = ParquetSource(write(tmp_path / "b", [30, 30])).contents(wanted())
    other = ParquetSource(write(tmp_path / "c", [30, 31])).contents(wanted())
    assert [s.fingerprint for s in first.shards] == [s.fingerprint for s in second.shards]
    assert first.content == second.content != other.content
    assert first.shards[0].fingerprint != first.shards[1].fingerprint


def test_a_resumed_epoch_goes_on_where_it_was(tmp_path: Path) -> None:
    source = ParquetSource(write(tmp_path / "data", [47, 20]), buffer_bytes=600)
    contents = source.contents(wanted())
    plan = plan_of(contents)
    whole = epoch_of(contents, plan, 1, epoch=2)
    for start in (0, 1, 4, plan.steps_per_epoch - 1):
        rest = epoch_of(contents, plan, 1, epoch=2, start_step=start)
        assert labels(rest) == labels(whole[start:])
    assert labels(epoch_of(contents, plan, 1, epoch=3)) != labels(whole)


def test_sorted_rows_are_mixed(tmp_path: Path) -> None:
    source = ParquetSource(write(tmp_path / "data", [2000] * 4, group=50), buffer_bytes=40_000)
    contents = source.contents(wanted(num_shards=1))
    order = labels(epoch_of(contents, plan_of(contents, 64), 0))
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.1
    neighbours = np.abs(np.diff(order)) < 50
    assert neighbours.mean() < 0.1


def test_a_column_marks_validation_rows(tmp_path: Path) -> None:
    source = ParquetSource(write(tmp_path / "data", [33, 41]))
    contents = source.contents(wanted(validation="held"))
    plan = plan_of(contents)
    held = [y for y in range(74) if y % 5 == 0]
    train = joined(labels(epoch_of(contents, plan, rank)) for rank in (0, 1))
    assert sorted(train) == [y for y in range(74) if y not in held]
    assert sorted(joined(validation_of(contents, plan, r) for r in (0, 1))) == held
    assert [s.num_validation_rows for s in contents.shards] in ([7, 8], [8, 7])


def test_a_fraction_of_the_row_groups_is_held_out(tmp_path: Path) -> None:
    source = ParquetSource(write(tmp_path / "data", [100, 100]), validation_fraction=0.2)
    contents = source.contents(wanted())
    plan = plan_of(contents)
    held = joined(validation_of(contents, plan, r) for r in (0, 1))
    train = joined(labels(epoch_of(contents, plan, r)) for r in (0, 1))
    assert len(held) == 40
    assert sorted(held + train) == list(range(200))
    again = source.contents(wanted(num_shards=4))
    assert sorted(joined(validation_of(again, plan_of(again), r) for r in range(4))) == sorted(held)
    with pytest.raises(ConfigError, match="either validation_fraction or validationIndicatorCol"):
        source.contents(wanted(validation="held"))
    single = ParquetSource(write(tmp_path / "one", [5]), validation_fraction=0.1)
    with pytest.raises(DataError, match="no rows are left for training"):
        single.contents(wanted())


def rewritten(folder: Path, **columns: Any) -> ParquetSource:
    path = folder / "part-1.parquet"
    changed = pq.read_table(path)
    for name, values in columns.items():
        index = changed.schema.get_field_index(name)
        changed = changed.set_column(index, name, pa.array(values, changed.schema.field(name).type))
    pq.write_table(changed, path, row_group_size=10)
    return ParquetSource(folder)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"y": [1, None, *range(28)]},
            r'column "y" has 1 null row \(first: row 1 of row group 0 of part-1.parquet\)',
        ),
        (
            {"x": [[1.0, 2.0, None]] * 2 + [[1.0, 2.0, 3.0]] * 28},
            r'"x" has 2 rows with a null, .* \(first: row 0 of row group 0 of part-1.parquet\)',
        ),
        (
            {"x": [[1.0, 2.0, 3.0]] * 29 + [[1.0]]},
            r'column "x" is ragged: most rows have shape \(3,\), but 1 do not \(first: row 9 of '
            r"row group 2 of part-1.parquet",
        ),
        (
            {"y": [-1] * 3 + [0] * 27},
            r'column "y" must hold whole, non-negative class indices .* 3 rows do not \(first: -1 '
            r"in row 0 of row group 0 of part-1.parquet\)",
        ),
    ],
)  # fmt: skip
def test_bad_rows_are_counted_before_training(
    tmp_path: Path, columns: dict[str, Any], message: str
) -> None:
    source = rewritten(write(tmp_path / "data", [30, 30]), **columns)
    with pytest.raises(DataError, match=message):
        source.contents(wanted())


def test_what_footers_do_not_tell_workers_find(tmp_path: Path) -> None:
    odd = [[1.0, 2.0, 3.0]] * 28 + [[1.0], [1.0, 2.0, 3.0, 4.0, 5.0]]
    contents = rewritten(write(tmp_path / "data", [30, 30]), x=odd).contents(wanted(num_shards=1))
    with pytest.raises(DataError, match=r'column "x" is ragged: .*row group 2 of part-1.parquet'):
        epoch_of(contents, plan_of(contents), 0)


def test_labels_outside_the_classes_are_counted(tmp_path: Path) -> None:
    contents = ParquetSource(write(tmp_path / "data", [30, 30])).contents(wanted())
    assert contents.labels_outside(1, 60) is None
    assert contents.labels_outside(1, 53) == (7, "row 3 of row group 2 of part-1.parquet")


def test_files_that_change_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", [30, 30])
    contents = ParquetSource(folder).contents(wanted(num_shards=1))
    write(folder, [30, 29])
    with pytest.raises(DataError, match="has changed since fit has listed it"):
        epoch_of(contents, plan_of(contents), 0)


def test_the_order_is_another_where_other_row_groups_are_mixed(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", [40, 40])
    group = 10 * (3 * 4 + 8)
    two, also_two, three, all_of_them, more = (
        ParquetSource(folder, buffer_bytes=2 * size).contents(wanted())
        for size in (2 * group, 3 * group - 1, 3 * group, 100 * group, 1000 * group)
    )
    prints = [
        tuple(shard.fingerprint for shard in contents.shards)
        for contents in (two, also_two, three, all_of_them, more)
    ]
    assert prints[0] == prints[1]
    assert prints[3] == prints[4]
    assert len(set(prints)) == 3
    assert two.content == three.content, "a checkpoint is found, and begins its epoch anew"
    plan = plan_of(two)
    assert labels(epoch_of(two, plan, 0)) == labels(epoch_of(also_two, plan, 0))


def test_a_fraction_of_few_row_groups_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / "data", [20])
    ParquetSource(folder, validation_fraction=0.4).contents(wanted())
    assert "held out" not in caplog.text
    ParquetSource(folder, validation_fraction=0.05).contents(wanted())
    assert "validation_fraction=0.05 takes 10 of the 20 rows" in caplog.text


def test_places_without_files(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="check the path"):
        ParquetSource(tmp_path / "absent").schema()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="there is no Parquet file under"):
        ParquetSource(tmp_path / "empty").schema()
    with pytest.raises(DataError, match="have no rows"):
        ParquetSource(write(tmp_path / "none", [0])).contents(wanted())
    for content in (b"x,label\n1,2\n", b"PA"):
        (tmp_path / "empty" / "rows.csv").write_bytes(content)
        with pytest.raises(DataError, match=r"rows.csv is no Parquet file; have Spark read it"):
            ParquetSource(tmp_path / "empty").schema()
    for frame in (pa.table({"x": [1]}), [tmp_path]):
        with pytest.raises(ConfigError, match=r"received (Table|list); .*fit\(df\)"):
            ParquetSource(frame)  # type: ignore[arg-type]


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="buffer_bytes must be at least 1"):
        ParquetSource(tmp_path, buffer_bytes=0)
    with pytest.raises(ConfigError, match="validation_fraction must be in"):
        ParquetSource(tmp_path, validation_fraction=1.0)
    assert isinstance(ParquetSource(tmp_path), Source)


def one_column(tmp_path: Path, values: pa.Array, column: SpoolColumn) -> Batch:
    tmp_path.joinpath("one").mkdir(exist_ok=True)
    data = pa.table({"v": values, "y": list(range(len(values)))})
    pq.write_table(data, tmp_path / "one" / "a.parquet")
    contents = ParquetSource(tmp_path / "one").contents(wanted(column, LABEL, num_shards=1))
    plan = plan_of(contents, 100)
    (batch,) = epoch_of(contents, plan, 0)
    order = batch.target.argsort()
    return batch.map(lambda value: value[order])


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        (pa.array([1, 2, 3], pa.uint8()), "int16", [1, 2, 3]),
        (pa.array([1, 2], pa.int32()).dictionary_encode(), "int32", [1, 2]),
        (pa.array([Decimal("1.25"), Decimal("2.50")]), "float32", [1.25, 2.5]),
        (pa.array([True, False]), "bool", [True, False]),
        (pa.array([b"ab", b"cd"]), "uint8", [[97, 98], [99, 100]]),
        (pa.array([[[1, 2]], [[3, 4]]]), "int64", [[[1, 2]], [[3, 4]]]),
    ],
)
def test_types(tmp_path: Path, values: pa.Array, dtype: str, expected: list[Any]) -> None:
    batch = one_column(tmp_path, values, SpoolColumn(name="v", role="feature", dtype=dtype))
    assert batch.inputs[0].tolist() == expected
    assert batch.inputs[0].dtype == getattr(torch, dtype)


def vectors() -> pa.Array:
    kind = pa.struct(
        {"type": pa.int8(), "size": pa.int32(), "indices": pa.list_(pa.int32()),
         "values": pa.list_(pa.float64())}
    )  # fmt: skip
    return pa.array(
        [
            {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0]},
            {"type": 0, "size": 3, "indices": [2], "values": [5.0]},
        ],
        kind,
    )


def test_vectors_of_spark_are_dense_rows(tmp_path: Path) -> None:
    batch = one_column(tmp_path, vectors(), SpoolColumn(name="v", role="feature", dtype="float32"))
    assert batch.inputs[0].tolist() == [[1, 2, 3], [0, 0, 5]]


def test_sequences_keep_their_lengths(tmp_path: Path) -> None:
    kind = SequenceInput("v", padding_value=-1)
    column = SpoolColumn(name="v", role="feature", dtype="int64", specification=kind)
    batch = one_column(tmp_path, pa.array([[1, 2, 3], [], [4]]), column)
    assert batch.inputs[0].tolist() == [[1, 2, 3], [-1, -1, -1], [4, -1, -1]]


def test_a_transform_gets_the_columns_as_spark_has_them(tmp_path: Path) -> None:
    def total(batch: pa.RecordBatch) -> list[list[float]]:
        assert batch.schema.names == ["v", "y"]
        assert batch.schema.field("v").type == pa.list_(pa.float32())
        pairs = zip(batch.column("v").to_pylist(), batch.column("y").to_pylist(), strict=True)
        return [[sum(vector), y] for vector, y in pairs]

    kind = Tensor(("v", "y"), transform=total)
    column = SpoolColumn(name="v, y", role="feature", dtype="float32", specification=kind)
    assert one_column(tmp_path, vectors(), column).inputs[0].tolist() == [[6, 0], [5, 1]]


def test_fields_of_structs_and_folders_names_are_columns(tmp_path: Path) -> None:
    for year in (2023, 2024):
        folder = tmp_path / "data" / f"year={year}"
        folder.mkdir(parents=True)
        users = [{"age": year - 2000 + i, "name": "a"} for i in range(3)]
        pq.write_table(pa.table({"User": users, "y": [year] * 3}), folder / "a.parquet")
    (tmp_path / "data" / "_SUCCESS").touch()
    source = ParquetSource(tmp_path / "data")
    assert source.schema().names == ["User", "y", "year"]
    names = [("user.age", "int64"), ("year", "int32")]
    columns = [SpoolColumn(name=name, role="feature", dtype=dtype) for name, dtype in names]
    contents = source.contents(wanted(*columns, LABEL))
    plan = plan_of(contents)
    seen = joined(epoch_of(contents, plan, rank) for rank in (0, 1))
    for batch in seen:
        assert torch.equal(batch.inputs[1], batch.target.int())
        assert ((batch.inputs[0] - batch.target) % 1000 >= 0).all()
    assert sorted(int(age) for b in seen for age in b.inputs[0]) == [23, 24, 24, 25, 25, 26]


def test_s3(tmp_path: Path, s3_url: str) -> None:
    folder = write(tmp_path / "data", [12, 9])
    storage = open_storage(s3_url)
    for file in folder.iterdir():
        storage.write(f"data/{file.name}", file.read_bytes())
    contents = ParquetSource(f"{s3_url}/data").contents(wanted(num_shards=1))
    assert sorted(labels(epoch_of(contents, plan_of(contents), 0))) == list(range(21))


def test_another_file_system(tmp_path: Path) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    files.put(str(write(tmp_path / "data", [12, 9])), "/bucket/data", recursive=True)
    try:
        contents = ParquetSource("memory://bucket/data").contents(wanted(num_shards=1))
        assert sorted(labels(epoch_of(contents, plan_of(contents), 0))) == list(range(21))
    finally:
        files.rm("/bucket", recursive=True)
    with pytest.raises(StorageError, match=r"cannot open what://\*\*\*@else"):
        ParquetSource("what://user:secret@else").schema()


def test_a_footer_that_is_no_text_is_an_error_of_ours(tmp_path: Path) -> None:
    path = write(tmp_path / "data", [20]) / "part-0.parquet"
    content = path.read_bytes()
    for start in [n for n in range(len(content)) if content.startswith(b"held", n)]:
        path.write_bytes(content[:start] + b"\xff" + content[start + 1 :])
        with contextlib.suppress(StorageError, DataError):
            source = ParquetSource(path).contents(wanted(num_shards=1))
            assert len(labels(epoch_of(source, plan_of(source), 0))) == 20
