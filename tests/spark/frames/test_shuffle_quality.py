"""Rows that come sorted and in skewed partitions are trained on in an order that shows neither.

The bounds are those of independent random orders. Hashes and orders are the same in every run, so
the numbers are, too; `docs/data.md` has them.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest
import torch
from pyspark.sql import functions as F

from sparkdl.data.shuffle import WindowedOrder, cut_rows, epoch_order, windowed_order
from sparkdl.data.shuffle_windows import make_windows
from sparkdl.data.spool.spool_source import open_spool
from sparkdl.spark.frames.prepare_columns import prepare
from sparkdl.spark.frames.row_table import TableSpec
from sparkdl.spark.frames.shard_table import ShardTable
from tests.data.row_windows import whole

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS, CLASSES, BATCH, SHARDS = 40_000, 10, 50, 2
EPOCHS = 20
Ints = npt.NDArray[np.int64]


@dataclass
class Spooled:
    """The rows of one shard, as numbers of rows in the sorted source."""

    fingerprint: str
    source: Ints


@pytest.fixture(scope="module")
def shards(spark: SparkSession) -> list[Spooled]:
    """Of a table sorted by label whose first partition holds nine tenths of the rows."""
    large = spark.range(0, ROWS * 9 // 10, 1, 1)
    small = spark.range(ROWS * 9 // 10, ROWS, 1, 7)
    label = (F.col("id") * CLASSES / ROWS).cast("int")
    df = large.union(small).withColumn("label", label.cast("double"))
    prepared = (
        prepare(df.schema, "id", "feature", float_dtype="float32"),
        prepare(df.schema, "label", "label", float_dtype="float32", as_classes=True),
    )
    spec = TableSpec(columns=prepared, num_shards=SHARDS)
    table = ShardTable(df, spec, run_id=uuid.uuid4().hex[:12])
    try:
        spooled = table.collect()
        columns = table.columns(spooled)
        found = []
        for part in spooled:
            rows = part.shard.num_rows
            spool = open_spool(Path(part.shard.path), columns, num_rows=rows, split="train")
            ids = spool.columns["feature id"]
            assert isinstance(ids, torch.Tensor)
            found.append(Spooled(part.shard.fingerprint, ids.clone().numpy().astype(np.int64)))
        return found
    finally:
        table.close()


def correlation(order: Ints) -> float:
    """Spearman's rank correlation of an order of rows with the order of the source."""
    ranks = np.argsort(np.argsort(order, kind="stable"), kind="stable")
    return float(np.corrcoef(np.arange(len(order)), ranks)[0, 1])


def imbalance(labels: Ints) -> float:
    """Mean over batches of chi-squared of the labels' counts over its expected value; 1: random."""
    batches = labels[: len(labels) // BATCH * BATCH].reshape(-1, BATCH)
    counts = np.stack([(batches == label).sum(1) for label in range(CLASSES)], 1)
    expected = BATCH * np.bincount(labels, minlength=CLASSES) / len(labels)
    return float(((counts - expected) ** 2 / expected).sum(1).mean() / (CLASSES - 1))


def by_windows(order: WindowedOrder) -> Ints:
    return np.array(whole(order), dtype=np.int64)


def training_orders(shard: Spooled, *, windows: bool) -> list[Ints]:
    """Rows of the source in the order of each epoch."""
    rows, orders = len(shard.source), []
    for epoch in range(EPOCHS):
        positions = epoch_order(7, epoch, shard.fingerprint, rows).astype(np.int64)
        if windows:
            chosen = make_windows(rows * 16 // 8, 16)  # an eighth of the shard
            sizes = cut_rows(rows, chosen.group_rows)
            positions = by_windows(
                windowed_order(7, epoch, shard.fingerprint, sizes, chosen.groups_together)
            )
        orders.append(shard.source[positions])
    return orders


@pytest.mark.spark
@pytest.mark.parametrize("windows", [False, True])
def test_sorted_and_skewed_rows_are_mixed(shards: list[Spooled], windows: bool) -> None:
    sizes = [len(shard.source) for shard in shards]
    assert sum(sizes) == ROWS and max(sizes) < 1.05 * ROWS / SHARDS
    for shard in shards:
        orders = training_orders(shard, windows=windows)
        assert all(sorted(order.tolist()) == sorted(shard.source.tolist()) for order in orders)
        # In units of the standard deviation that independent random orders have.
        found = np.array([correlation(order) for order in orders]) * np.sqrt(len(shard.source))
        assert abs(found.mean()) < 3 / np.sqrt(EPOCHS)
        assert found.std() == pytest.approx(1, abs=0.5)
        assert np.median(np.abs(found)) < 1 < np.max(np.abs(found)) < 4
        num_batches = EPOCHS * (len(shard.source) // BATCH)
        mixed = np.mean([imbalance(order * CLASSES // ROWS) for order in orders])
        assert abs(mixed - 1) < 3 * np.sqrt(2 / (CLASSES - 1) / num_batches)
    assert imbalance(np.arange(ROWS) * CLASSES // ROWS) == pytest.approx(BATCH)


@pytest.mark.parametrize("num_groups", [64, 1024])
def test_windows_alone_mix_groups_of_a_sorted_source(num_groups: int) -> None:
    """What is left if nothing but the order of row groups mixes rows that lie sorted."""
    found = []
    for seed in range(40):
        order = by_windows(windowed_order(seed, 0, "a", [ROWS // num_groups] * num_groups, 32))
        found.append(correlation(order))
    assert max(map(abs, found)) < 3.5 / np.sqrt(num_groups - 1)  # of 40 values
    assert np.std(found) == pytest.approx(1 / np.sqrt(num_groups - 1), rel=0.35)
    labels = order * CLASSES // ROWS
    # Labels of a batch come from the 32 groups of its window: as if drawn from 32 values.
    assert 1 <= imbalance(labels) < 1 + 1.6 * BATCH / 32
