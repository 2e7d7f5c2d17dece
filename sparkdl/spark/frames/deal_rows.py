"""The shard to which a row goes, and the order of rows within it, as Spark writes them.

The order of each epoch is `data.shuffle`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparkdl.data.plan import SpoolColumn
from sparkdl.spark.frames.row_table import TableSpec

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn

ShardsByPlace = Sequence[Sequence[int]]


def selected(
    df: DataFrame, columns: Sequence[SpoolColumn], validation: SparkColumn | None = None
) -> DataFrame:
    """The prepared columns by number, and which rows are for validation, if some are."""
    expressions = [column.expression.alias(f"c{index}") for index, column in enumerate(columns)]
    if validation is not None:
        expressions.append(validation.alias("validation"))
    return df.select(*expressions)


def spread(
    df: DataFrame, spec: TableSpec, shards_by_place: ShardsByPlace | None = None
) -> DataFrame:
    """The rows as they are written, shard by shard, each with its hash.

    The order is canonical: equal data gives equal shards in equal order, run after run and after
    the loss of an executor, which round-robin repartitioning does not. The DataFrame's own
    partitions (``spec.pieces``) stay as Spark reads them, at most packed together.

    Args:
        df: the rows.
        spec: what the shards shall hold.
        shards_by_place: those of each partition, where they are some of all; None: all of them.
    """
    rows = selected(df, spec.columns, spec.validation)
    hashed = rows.withColumn("hash", F.xxhash64(*[F.col(name) for name in rows.columns]))
    if spec.pieces is not None:
        return hashed.coalesce(spec.num_partitions)
    # Rows that differ only in where nulls or ends of arrays are have equal hashes.
    return dealt(hashed, spec, ("hash", *rows.columns), shards_by_place)


def dealt(
    hashed: DataFrame,
    spec: TableSpec,
    order: Sequence[str],
    shards_by_place: ShardsByPlace | None = None,
) -> DataFrame:
    """Rows with a ``hash`` in the partitions of their shards, in this order of columns.

    Where a partition may have several shards, the first column is ``shard``, after which the rows
    are ordered first.
    """
    if shards_by_place is None and spec.shards_by_place is None:
        return hashed.repartition(spec.num_shards, "hash").sortWithinPartitions(*order)
    shard = F.pmod(F.hash("hash"), F.lit(spec.num_shards))  # to which `repartition` deals a row
    numbered = hashed.select(shard.alias("shard"), *hashed.columns)
    if shards_by_place is None:
        # As `assign_shards` has it: the last place that begins at the shard, or before.
        place = F.floor(((F.col("shard") + 1) * spec.num_partitions - 1) / spec.num_shards)
        places = numbered.repartitionById(spec.num_partitions, place.cast("int"))
        return places.sortWithinPartitions("shard", *order)
    place_of = {shard: place for place, own in enumerate(shards_by_place) for shard in own}
    entries = [F.lit(number) for pair in place_of.items() for number in pair]
    wanted = numbered.where(F.col("shard").isin(list(place_of)))
    place = F.element_at(F.create_map(*entries), F.col("shard"))
    return wanted.repartitionById(len(shards_by_place), place).sortWithinPartitions("shard", *order)
