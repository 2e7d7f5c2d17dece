from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as F

from sparkdl.spark.frames.unstable_rows import unstable_operator

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.classic]


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    return spark.range(40).select("id", (F.col("id") % 3).alias("k"))


def test_what_may_give_other_rows_is_named(rows: DataFrame) -> None:
    def odd(value: int) -> int:
        return value

    counted = rows.groupBy("k").agg(F.collect_list("id").alias("ids"))
    marked = F.udf(odd, "long", useArrow=False).asNondeterministic()
    found = {
        "a limit without an order": rows.limit(20).filter("k > 0"),
        "rand()": rows.filter(F.rand(3) < 0.5),
        "current_timestamp()": rows.withColumn("now", F.current_timestamp()),
        "a sample of rows that come in no order": rows.repartition(4).sample(0.5, seed=1),
        "collect_list, which depends on the order of rows": counted.join(rows, "k"),
        "dropDuplicates of some of its columns, which keeps any row": rows.dropDuplicates(["k"]),
        "the function odd, which is marked as not deterministic": rows.select(marked("id")),
    }
    assert {unstable_operator(df): df for df in found.values()} == found
    assert unstable_operator(rows.limit(20).cache()) == "a limit without an order"


def test_what_gives_the_same_rows_is_not(rows: DataFrame) -> None:
    plain = F.udf(lambda value: value, "long", useArrow=False)
    for df in (
        rows,
        rows.orderBy("id").select("id").limit(20),
        rows.sample(0.5, seed=1),
        rows.groupBy("k").agg(F.sum("id"), F.max("id")),
        rows.select(plain("id").alias("x")).distinct(),
        rows.join(rows.withColumnRenamed("id", "other"), "k").repartition(3),
    ):
        assert unstable_operator(df) is None
