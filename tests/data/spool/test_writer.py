"""A partition is written once, column by column, and opens as exactly the same tensors."""

from __future__ import annotations

import multiprocessing
import os
import resource
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from sparkdl.data.column_stats import SpooledShard
from sparkdl.data.plan import Column, SpoolColumn
from sparkdl.data.ragged import Ragged
from sparkdl.data.spool import writer as module
from sparkdl.data.spool.local_disk import DiskFull
from sparkdl.data.spool.spool_source import open_spool
from sparkdl.data.spool.writer import SpoolWriter, column_path
from sparkdl.errors import ShardLost, StorageError
from sparkdl.inputs import Sequence, Tensor

FEATURE = SpoolColumn(name="f", role="feature", dtype="float32")
LABEL = SpoolColumn(name="y", role="label", dtype="int64", as_classes=True)
COLUMNS = (
    Column(name="f", role="feature", dtype="float32", shape=(2,)),
    Column(name="y", role="label", dtype="int64", shape=()),
)


def batch(features: list[Any], labels: list[Any], validation: list[Any] | None = None,
          first_hash: int = 0) -> pa.RecordBatch:  # fmt: skip
    arrays = [pa.array(features, pa.list_(pa.float32())), pa.array(labels, pa.float64())]
    if validation is not None:
        arrays.append(pa.array(validation, pa.bool_()))
    arrays.append(pa.array(np.arange(len(labels)) + first_hash, pa.int64()))
    return pa.record_batch(arrays, names=[str(i) for i in range(len(arrays))])


def spool(directory: Path, *batches: pa.RecordBatch, validation: bool = False) -> SpooledShard:
    columns = (FEATURE, LABEL)
    with SpoolWriter(directory, columns, has_validation=validation, where=" of partition 0") as out:
        for part in batches:
            out.write(part)
    return SpooledShard.from_dict(out.summary().to_dict())


def test_others_cannot_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        spool(tmp_path / "run" / "shard", batch([[1, 2]], [0]))
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").rglob("*")}
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


def test_rows_come_back_in_order(tmp_path: Path) -> None:
    summary = spool(
        tmp_path / "s", batch([[1, 2], [3, 4]], [0, 1]), batch([[5, 6]], [2], first_hash=2)
    )
    assert (summary.shard.num_rows, summary.shard.num_bytes) == (3, 3 * (8 + 8))
    opened = open_spool(tmp_path / "s", COLUMNS, num_rows=3, split="train").columns
    assert opened["feature f"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert opened["label y"].dtype == torch.int64
    assert opened["label y"].tolist() == [0, 1, 2]
    assert (summary.columns[1].minimum, summary.columns[1].maximum) == (0, 2)


def test_writing_to_the_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    spool(tmp_path / "s", batch([[1, 2]], [0]))
    open_spool(tmp_path / "s", COLUMNS, num_rows=1, split="train").columns["feature f"].zero_()
    again = open_spool(tmp_path / "s", COLUMNS, num_rows=1, split="train").columns
    assert again["feature f"].tolist() == [[1, 2]]


def test_validation_rows_go_apart(tmp_path: Path) -> None:
    summary = spool(
        tmp_path / "s", batch([[1, 2], [3, 4], [5, 6]], [0, 1, 2], [False, True, False]),
        batch([[7, 8]], [3], [True]), validation=True,
    )  # fmt: skip
    assert (summary.shard.num_rows, summary.shard.num_validation_rows) == (2, 2)
    train = open_spool(tmp_path / "s", COLUMNS, num_rows=2, split="train").columns
    validation = open_spool(tmp_path / "s", COLUMNS, num_rows=2, split="validation").columns
    assert train["label y"].tolist() == [0, 2]
    assert validation["feature f"].tolist() == [[3, 4], [7, 8]]


def test_a_partition_without_rows(tmp_path: Path) -> None:
    summary = spool(tmp_path / "s")
    assert summary.shard.num_rows == 0
    opened = open_spool(tmp_path / "s", COLUMNS, num_rows=0, split="train").columns
    assert opened["feature f"].shape == (0, 2)


def test_fingerprint_tells_order_and_content_does_not(tmp_path: Path) -> None:
    rows = batch([[1, 2], [3, 4]], [0, 1])
    back = rows.take(pa.array([1, 0]))
    one, two = spool(tmp_path / "a", rows), spool(tmp_path / "b", back)
    cut = spool(tmp_path / "c", rows.slice(0, 1), rows.slice(1))
    assert one.shard.fingerprint == cut.shard.fingerprint != two.shard.fingerprint
    assert one.content == two.content
    other_split = spool(
        tmp_path / "d", batch([[1, 2], [3, 4]], [0, 1], [True, False]), validation=True
    )
    assert other_split.shard.fingerprint != one.shard.fingerprint


def test_the_cut_into_record_batches_does_not_tell(tmp_path: Path) -> None:
    rows = batch([[1, 2], [3, 4], [5, 6]], [0, 1, 2], [True, False, False])
    one = spool(tmp_path / "a", rows, validation=True)
    cut = spool(tmp_path / "b", rows.slice(0, 1), rows.slice(1), validation=True)
    other = batch([[1, 2], [3, 4], [5, 6]], [0, 1, 2], [False, True, False])
    assert one.shard.fingerprint == cut.shard.fingerprint
    assert one.shard.fingerprint != spool(tmp_path / "c", other, validation=True).shard.fingerprint


def test_bad_labels_are_counted_and_shown(tmp_path: Path) -> None:
    summary = spool(
        tmp_path / "s", batch([[1, 2]] * 3, [0, float("nan"), 1.5]), batch([[1, 2]], [-1])
    )
    label = summary.columns[1]
    assert label.bad_values == 3
    assert label.first_bad == "nan in row 1 of partition 0"


@pytest.mark.parametrize(
    "column",
    [
        SpoolColumn(name="w", role="weight", dtype="float32"),
        SpoolColumn(name="y", role="label", dtype="float32"),
        SpoolColumn(name="y", role="label", dtype="int64", as_classes=True),
    ],
)
def test_infinite_labels_and_weights_are_counted(tmp_path: Path, column: SpoolColumn) -> None:
    values = pa.RecordBatch.from_pydict({"v": [1.0, float("inf"), 2.0], "hash": [0, 1, 2]})
    with SpoolWriter(tmp_path / "s", [column], has_validation=False) as out:
        out.write(values)
    (stats,) = out.summary().columns
    assert (stats.bad_values, stats.first_bad) == (1, "inf in row 1")


def test_nulls_and_ragged_rows_are_counted_over_batches(tmp_path: Path) -> None:
    summary = spool(
        tmp_path / "s", batch([[1, 2], [3, 4]], [0, 1]), batch([[5], [6, 7], None], [0, 1, 0])
    )
    found = summary.columns[0].nulls_and_shapes
    assert found.nulls == 1
    assert found.first_null == "row 4 of partition 0"
    assert found.shapes == {"(2,)": 3, "(1,)": 1}


def test_width_that_changes_between_batches_is_ragged(tmp_path: Path) -> None:
    summary = spool(tmp_path / "s", batch([[1, 2]] * 3, [0] * 3), batch([[1, 2, 3]], [0]))
    assert summary.columns[0].nulls_and_shapes.shapes == {"(2,)": 3, "(3,)": 1}


def test_null_in_the_indicator_is_counted(tmp_path: Path) -> None:
    summary = spool(tmp_path / "s", batch([[1, 2]] * 2, [0, 1], [True, None]), validation=True)
    assert summary.columns[-1].nulls_and_shapes.nulls == 1


def test_lost_or_changed_files_are_noticed(tmp_path: Path) -> None:
    spool(tmp_path / "s", batch([[1, 2]], [0]))
    with pytest.raises(ShardLost, match="8 bytes, expected 16"):
        open_spool(tmp_path / "s", COLUMNS, num_rows=2, split="train")
    column_path(tmp_path / "s", "train", 0).unlink()
    with pytest.raises(ShardLost, match="is not on this host"):
        open_spool(tmp_path / "s", COLUMNS, num_rows=1, split="train")


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), SpoolWriter(tmp_path / "s", (FEATURE,), has_validation=False):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    monkeypatch.setattr(module, "column_path", lambda *_: full)
    writer = SpoolWriter(tmp_path / "s", (FEATURE, LABEL), has_validation=False)
    with pytest.raises(DiskFull, match=r"cannot write the spool .*: .*No space left"), writer:
        writer.write(batch([[1, 2]], [0]))
    assert writer.row_bytes == 8  # as far as it came


def sequences(texts: list[Any], validation: list[bool], first_hash: int = 0) -> pa.RecordBatch:
    arrays = [pa.array(texts, pa.list_(pa.int64())), pa.array(validation)]
    arrays.append(pa.array(np.arange(len(texts)) + first_hash, pa.int64()))
    return pa.record_batch(arrays, names=["c0", "validation", "hash"])


def test_rows_of_different_lengths_come_back(tmp_path: Path) -> None:
    spec = Sequence("t")
    wanted = SpoolColumn(name="t", role="feature", dtype="int64", specification=spec)
    with SpoolWriter(tmp_path / "s", [wanted], has_validation=True) as out:
        out.write(sequences([[1, 2], [], [3]], [False, False, True]))
        out.write(sequences([[4], [5, 6, 7]], [False, True], first_hash=3))
    summary = SpooledShard.from_dict(out.summary().to_dict())
    stats = summary.columns[0]
    assert (stats.longest, stats.dtype, stats.shape) == (3, "int64", ())
    column = Column(name="t", role="feature", dtype="int64", shape=(), specification=spec)
    found = {}
    for split, rows in (("train", 3), ("validation", 2)):
        opened = open_spool(tmp_path / "s", [column], num_rows=rows, split=split).columns[
            "feature t"
        ]  # type: ignore[arg-type]
        assert isinstance(opened, Ragged)
        found[split] = [opened[i : i + 1].own()[0].tolist() for i in range(len(opened))]
    assert found == {"train": [[1, 2], [], [4]], "validation": [[3], [5, 6, 7]]}
    none = open_spool(tmp_path / "s", [column], num_rows=0, split="train").columns["feature t"]
    assert isinstance(none, Ragged) and len(none) == 0
    column_path(tmp_path / "s", "train", 0, "-offsets").unlink()
    with pytest.raises(ShardLost, match=r"train-000-offsets\.bin is not on this host"):
        open_spool(tmp_path / "s", [column], num_rows=3, split="train")


def doubled(batch: pa.RecordBatch) -> Any:
    return [[2 * v for v in row] for row in batch.column(0).to_pylist()]


def test_the_fingerprint_tells_what_a_transform_made_but_not_the_record_batches(
    tmp_path: Path,
) -> None:
    def fingerprint(name: str, transform: Any, sizes: tuple[int, ...]) -> str:
        spec = Sequence("t", transform=transform)
        column = SpoolColumn(name="t", role="feature", dtype="float32", specification=spec)
        rows = [[1], [2, 3], [4], [5, 6]]
        with SpoolWriter(tmp_path / name, [column], has_validation=False) as out:
            start = 0
            for size in sizes:
                struct = pa.StructArray.from_arrays([pa.array(rows[start : start + size])], ["c0"])
                hashes = pa.array(np.arange(start, start + size), pa.int64())
                out.write(pa.record_batch([struct, hashes], names=["c0", "hash"]))
                start += size
        return out.summary().shard.fingerprint

    whole = fingerprint("a", doubled, (4,))
    assert whole == fingerprint("b", doubled, (1, 3))
    assert whole != fingerprint("c", lambda batch: batch.column(0), (4,))


def test_mixed_dtypes_of_a_transform_are_reported(tmp_path: Path) -> None:
    def whole_or_half(batch: pa.RecordBatch) -> Any:
        values = batch.column(0).to_numpy()
        return values / 2 if len(batch) == 1 else values

    spec = Tensor("t", transform=whole_or_half)
    column = SpoolColumn(name="t", role="feature", dtype="float32", specification=spec)
    with SpoolWriter(tmp_path / "s", [column], has_validation=False) as out:
        for values in ([1, 2], [3]):
            struct = pa.StructArray.from_arrays([pa.array(values)], ["c0"])
            hashes = pa.array(values, pa.int64())
            out.write(pa.record_batch([struct, hashes], names=["c0", "hash"]))
    found = out.summary().columns[0].nulls_and_shapes
    assert "float32 where others have int64: let the transform cast them" in found.message("t")


def write_until_full(directory: str, limit: int) -> tuple[str, list[str], float]:
    """Spools in a process whose files may not grow beyond ``limit`` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    writer = SpoolWriter(Path(directory) / "s", (FEATURE, LABEL), has_validation=False)
    try:
        with writer:
            for number in range(100):
                writer.write(batch([[1, 2]] * 100, [number] * 100))
    except StorageError as error:
        return str(error), [path.name for path in Path(directory).iterdir()], writer.row_bytes
    raise AssertionError("nothing was full")


def open_until_refused(directory: str, limit: int) -> tuple[list[str], list[str], int]:
    """Writes and opens spools of many columns in a process that may have few files open."""
    columns = [SpoolColumn(name=f"c{i}", role="feature", dtype="int64") for i in range(limit // 2)]
    known = [Column(name=c.name, role=c.role, dtype=c.dtype, shape=()) for c in columns]
    with SpoolWriter(Path(directory) / "s", columns, has_validation=False) as out:
        one = pa.array([1])
        names = [str(i) for i in range(len(columns) + 1)]
        out.write(pa.record_batch([one] * len(names), names=names))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    said = []
    before = len(list(Path("/proc/self/fd").iterdir()))
    for refused in (
        lambda: SpoolWriter(Path(directory) / "t", columns, has_validation=True).__enter__(),
        lambda: open_spool(Path(directory) / "s", known, num_rows=1, split="train"),
    ):
        try:
            refused()
        except StorageError as error:
            said.append(str(error))
    after = len(list(Path("/proc/self/fd").iterdir()))
    return said, [path.name for path in Path(directory).iterdir()], after - before


@pytest.mark.slow
def test_a_file_that_may_not_grow_leaves_nothing(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        message, left, row_bytes = pool.apply(write_until_full, (str(tmp_path), 20_000))
    assert "cannot write the spool" in message and "File too large" in message
    assert left == []
    assert 12 <= row_bytes <= 16  # 8 bytes of features, 8 of the label


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are told by Linux")
def test_too_many_columns_for_the_limit_of_open_files(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        said, left, opened = pool.apply(open_until_refused, (str(tmp_path), 200))
    assert [text.split(" the spool")[0] for text in said] == ["cannot write", "cannot read"]
    for text in said:
        assert "Too many open files" in text and "(VectorAssembler), or raise the limit" in text
    assert (left, opened) == (["s"], 0)
