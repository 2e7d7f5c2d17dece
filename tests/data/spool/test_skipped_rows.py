from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from sparkdl.data.column_stats import SpooledShard, no_rows, skipped_rows
from sparkdl.data.plan import Column, SpoolColumn
from sparkdl.data.ragged import Ragged
from sparkdl.data.spool.spool_source import open_spool
from sparkdl.data.spool.writer import SpoolWriter
from sparkdl.inputs import Image
from tests.cli.images.trees import png

LABEL = SpoolColumn(name="y", role="label", dtype="int64")


def picture(value: int, size: tuple[int, int] = (2, 3)) -> bytes:
    return png(np.full((*size, 3), value, np.uint8))


def spool(
    directory: Path, kind: Image, values: list[Any], *, cut: int = 100, validation: bool = False
) -> SpooledShard:
    """Values in the column of images; labels and hashes count from 0; odd rows for validation."""
    columns = [SpoolColumn(name="x", role="feature", dtype="uint8", specification=kind), LABEL]
    rows = np.arange(len(values))
    arrays = [pa.array(values, pa.binary()), pa.array(rows)]
    if validation:
        arrays.append(pa.array(rows % 2 == 1))
    whole = pa.RecordBatch.from_arrays(
        [*arrays, pa.array(rows + 7)], names=[str(n) for n in range(len(arrays) + 1)]
    )
    with SpoolWriter(directory, columns, has_validation=validation, where=" of partition 4") as out:
        for start in range(0, len(values), cut):
            out.write(whole.slice(start, cut))
    return SpooledShard.from_dict(out.summary().to_dict())


def labels(directory: Path, kind: Image, summary: SpooledShard, split: Any = "train") -> list[int]:
    """The labels of the rows in the spool; their images must be those of the labels."""
    count = {"train": summary.shard.num_rows, "validation": summary.shard.num_validation_rows}[
        split
    ]
    columns = [
        Column(name="x", role="feature", dtype="uint8", shape=(3, 2, 3), specification=kind),
        Column(name="y", role="label", dtype="int64", shape=()),
    ]
    opened = open_spool(directory, columns, num_rows=count, split=split).columns
    images, found = opened["feature x"], opened["label y"]
    assert isinstance(found, torch.Tensor)
    if isinstance(images, Ragged):
        from sparkdl.data.images import decode_rows

        images = torch.from_numpy(decode_rows(images, kind, (3, 2, 3)))
    assert images[:, 0, 0, 0].tolist() == found.tolist()
    return [int(value) for value in found]


VALUES = [picture(0), b"no image", None, picture(3), picture(4)[:-30], picture(5)]


@pytest.mark.parametrize("decode", ["spool", "batch"])
def test_bad_rows_are_left_out_whole(tmp_path: Path, decode: Any) -> None:
    kind = Image("x", decode=decode, on_error="skip")
    summary = spool(tmp_path / "s", kind, VALUES)
    assert (summary.shard.num_rows, summary.num_skipped_rows) == (3, 3)
    assert not summary.columns[0].nulls_and_shapes
    assert labels(tmp_path / "s", kind, summary) == [0, 3, 5]
    count, text = skipped_rows(["x", "y"], [summary, summary])
    assert count == 6
    assert text.startswith('column "x" has ')
    assert "2 bad rows: cannot be decoded (UnidentifiedImageError" in text
    assert "(first: row 1 of partition 4)" in text
    assert "2 null (first: row 2 of partition 4)" in text
    assert summary.hashes["row 1 of partition 4"] == 8
    assert summary.hashes["row 2 of partition 4"] == 9


def test_the_split_holds_for_the_rows_that_are_left(tmp_path: Path) -> None:
    kind = Image("x", on_error="skip")
    summary = spool(tmp_path / "s", kind, VALUES, validation=True)
    assert (
        summary.shard.num_rows,
        summary.shard.num_validation_rows,
        summary.num_skipped_rows,
    ) == (1, 2, 3)
    assert labels(tmp_path / "s", kind, summary) == [0]
    assert labels(tmp_path / "s", kind, summary, "validation") == [3, 5]


@pytest.mark.parametrize("decode", ["spool", "batch"])
def test_the_cut_into_record_batches_does_not_tell(tmp_path: Path, decode: Any) -> None:
    kind = Image("x", decode=decode, on_error="skip")
    whole = spool(tmp_path / "whole", kind, VALUES)
    for cut in (1, 2, 3):
        summary = spool(tmp_path / str(cut), kind, VALUES, cut=cut)
        assert summary.shard.fingerprint == whole.shard.fingerprint
        assert summary.content == whole.content
        assert labels(tmp_path / str(cut), kind, summary) == [0, 3, 5]


def test_fingerprint_and_content_are_those_of_the_rows_that_are_left(tmp_path: Path) -> None:
    kind = Image("x", on_error="skip")
    one = spool(tmp_path / "1", kind, [picture(0), b"?"])
    two = spool(tmp_path / "2", kind, [picture(0)])
    other = spool(tmp_path / "3", kind, [b"?", picture(1)])
    assert (one.shard.fingerprint, one.content) == (two.shard.fingerprint, two.content)
    assert one.shard.fingerprint != other.shard.fingerprint


def test_images_of_other_sizes_are_an_error_still(tmp_path: Path) -> None:
    kind = Image("x", on_error="skip")
    values = [picture(0), b"?", picture(1, (4, 4)), picture(2)]
    for cut in (1, 9):
        summary = spool(tmp_path / str(cut), kind, values, cut=cut)
        message = summary.columns[0].nulls_and_shapes.message("x")
        assert "most rows have shape (3, 2, 3)" in message
        assert summary.num_skipped_rows == 1 or cut == 9
    scaled = Image("x", size=(2, 3), on_error="skip")
    assert spool(tmp_path / "scaled", scaled, values).shard.num_rows == 3


def test_nothing_but_bad_rows(tmp_path: Path) -> None:
    summary = spool(tmp_path / "s", Image("x", on_error="skip"), [b"?", None])
    assert summary.shard.num_rows == 0
    assert no_rows([summary]) == (
        "all 2 rows were skipped (on_error='skip'); check the column of images"
    )
    assert "no rows; check its source" in no_rows([spool(tmp_path / "t", Image("x"), [])])


def test_without_the_option_they_are_an_error(tmp_path: Path) -> None:
    summary = spool(tmp_path / "s", Image("x"), VALUES)
    assert summary.num_skipped_rows == 0
    assert summary.columns[0].nulls_and_shapes.causes.total() == 2
