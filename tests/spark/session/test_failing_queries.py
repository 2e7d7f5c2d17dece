"""Queries that fail on real sessions, and what each says in the verbs that run them."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import Bucketizer, OneHotEncoder, StringIndexer, VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn

from sparkdl.data.plan import Column
from sparkdl.errors import DataError
from sparkdl.estimator import TorchClassifier
from sparkdl.model import TorchClassifierModel
from sparkdl.runner import TorchRunner
from sparkdl.spark.session.failures import raise_unless_loss
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

SCHEMA = "a double, b double, label int"


def rows(spark: SparkSession) -> DataFrame:
    return spark.range(0, 20, 1, 2).selectExpr(
        *("id", "cast(id as double) a", "cast(id % 3 as double) b", "concat('c', id % 3) s"),
        "cast(id % 2 as int) label",
    )


def assembled(df: DataFrame, **params: Any) -> DataFrame:
    stage = VectorAssembler(inputCols=["a", "b"], outputCol="features", **params)
    return stage.transform(df)


def null_of_rows(spark: SparkSession, folder: Path) -> DataFrame:
    return assembled(spark.createDataFrame([(1.0, 2.0, 0), (None, 3.0, 1)], SCHEMA))


def null_of_parquet(spark: SparkSession, folder: Path) -> DataFrame:
    rows(spark).selectExpr("nullif(a, 13.0) a", "b", "label").write.parquet(str(folder / "in"))
    return assembled(spark.read.parquet(str(folder / "in")))


def nan(spark: SparkSession, folder: Path) -> DataFrame:
    bad = rows(spark).withColumn("a", F.expr("if(id = 13, double('nan'), a)"))
    return assembled(bad, handleInvalid="error")


def unseen_label(spark: SparkSession, folder: Path) -> DataFrame:
    stage = StringIndexer(inputCol="s", outputCol="index")
    return stage.fit(rows(spark).where("s != 'c2'")).transform(rows(spark))


def not_encoded(spark: SparkSession, folder: Path) -> DataFrame:
    stage = OneHotEncoder(inputCols=["b"], outputCols=["encoded"])
    return stage.fit(rows(spark).where("b < 2")).transform(rows(spark))


def out_of_bounds(spark: SparkSession, folder: Path) -> DataFrame:
    stage = Bucketizer(splits=[0.0, 5.0, 10.0], inputCol="a", outputCol="bucket")
    return stage.transform(rows(spark))


def python_udf(spark: SparkSession, folder: Path) -> DataFrame:
    inverse = F.udf(lambda x: 1 / (x - 13), "double")
    return rows(spark).withColumn("a", inverse("a"))


def pandas_udf(spark: SparkSession, folder: Path) -> DataFrame:
    def looked_up(x: pd.Series) -> pd.Series:
        return pd.Series({"other": 1.0})["a name"]

    return rows(spark).withColumn("a", F.pandas_udf(looked_up, "double")("a"))  # type: ignore[call-overload]


def raised(spark: SparkSession, folder: Path) -> DataFrame:
    return rows(spark).withColumn("a", F.expr("if(id = 13, raise_error('no 13 here'), a)"))


def cast(spark: SparkSession, folder: Path) -> DataFrame:
    return rows(spark).withColumn("a", F.col("s").cast("double"))


def divided(spark: SparkSession, folder: Path) -> DataFrame:
    return rows(spark).withColumn("a", F.col("a") / (F.col("id") - 13))


def beyond_the_array(spark: SparkSession, folder: Path) -> DataFrame:
    return rows(spark).withColumn("a", F.expr("array(a, b)[id]"))


def java_method(spark: SparkSession, folder: Path) -> DataFrame:
    """Has no condition of Spark's."""
    return rows(spark).withColumn("a", F.expr("java_method('java.lang.Long', 'parseLong', s)"))


def corrupt_parquet(spark: SparkSession, folder: Path) -> DataFrame:
    rows(spark).write.parquet(str(folder / "in"))
    for file in (folder / "in").glob("part-*"):
        file.write_bytes(b"these are not the bytes of a table")
        (file.parent / f".{file.name}.crc").unlink()
    return spark.read.schema("id long, a double, label int").parquet(str(folder / "in"))


def removed_parquet(spark: SparkSession, folder: Path) -> DataFrame:
    rows(spark).write.parquet(str(folder / "in"))
    df = spark.read.parquet(str(folder / "in"))
    assert "a" in df.columns
    for file in (folder / "in").glob("part-*"):
        file.unlink()
    return df


def malformed_csv(spark: SparkSession, folder: Path) -> DataFrame:
    (folder / "in.csv").write_text("1.0,2.0,0\nabc,3.0,1\n")
    reader = spark.read.schema(SCHEMA).option("mode", "FAILFAST")
    return reader.csv(str(folder / "in.csv"))


Query = Callable[[SparkSession, Path], DataFrame]

TOLD: dict[Query, str] = {
    null_of_rows: r"VectorAssembler: Encountered null while .*; drop or fill .* set handleInvalid",
    null_of_parquet: r"VectorAssembler: Encountered null .*; drop or fill .* set handleInvalid",
    nan: r"VectorAssembler: Encountered NaN while .*; drop or fill such rows, or set handleInvalid",
    unseen_label: r"StringIndexerModel: Unseen label: c2\. .*; drop or fill .* set handleInvalid",
    not_encoded: r"OneHotEncoderModel: Unseen value: 2\.0\. .*; drop or fill .* set handleInvalid",
    out_of_bounds: r"Bucketizer: Feature value 1\d\.0 out of Bucketizer bounds .*; .*drop or fill",
    python_udf: r"ZeroDivisionError: .* \(<lambda>, line \d+ of .*queries\.py\); mend it",
    pandas_udf: r"KeyError: 'a name' \(looked_up, line \d+ of .*queries\.py\); mend it",
    raised: r"no 13 here; mend the query, or drop or fill such rows",
    cast: r"The value 'c\d' of the type \"STRING\" cannot be cast .*try_cast",
    divided: r"Division by zero\. Use `try_divide` .* \(in \"__truediv__\", called at .*:\d+\);",
    beyond_the_array: r"The index \d+ is out of bounds\. .* \(in array\(a, b\)\[id\]\); drop, fill",
    # Connect cuts the text of a cause without a condition before the inner one
    java_method: r"(?:For input string: \"c\d\"|InvocationTargetException); mend the query",
    corrupt_parquet: r"cannot be read \(.*is not a Parquet file.*; see that its files are of the",
    removed_parquet: r"cannot be read \(.* does not exist.* or read the source anew if they were",
    malformed_csv: r"cannot be read \(.*in\.csv: .*\[null,3\.0,1\].*For input string: \"abc\"\);",
}


def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def check(error: BaseException, told: str) -> None:
    """The error is one sentence of ours, with what is expected of it."""
    assert isinstance(error, DataError), error
    assert re.search(told, str(error)), error
    assert "\n" not in str(error) and "lost" not in str(error)


@pytest.mark.parametrize("query", TOLD, ids=lambda query: query.__name__)
def test_spark_names_the_innermost_cause(query: Query, spark: SparkSession, tmp_path: Path) -> None:
    """Also where a barrier stage has wrapped it into text."""
    for is_barrier in (False, True):
        folder = tmp_path / str(is_barrier)
        folder.mkdir()
        with pytest.raises(DataError) as caught:
            try:
                df = query(spark, folder)
                (df.mapInArrow(same, df.schema, barrier=True) if is_barrier else df).collect()
            except Exception as error:
                raise_unless_loss(error)
        check(caught.value, TOLD[query])


def classifier(**params: Any) -> TorchClassifier:
    given = {"module": make_net, "numWorkers": 1, "epochs": 1, "verbose": 0, "maxRestarts": 3}
    return TorchClassifier(**{**given, **params})


def make_net() -> nn.Module:
    return nn.Linear(2, 2)


def pipeline_stages() -> list[Any]:
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    return [assembler, classifier()]


def fit(df: DataFrame) -> None:
    classifier().fit(df)


def fit_in_rounds(df: DataFrame) -> None:
    classifier(executionMode="rounds", syncStrategy=ParameterAveraging()).fit(df)


def fit_pipeline(df: DataFrame) -> None:
    Pipeline(stages=pipeline_stages()).fit(df.drop("features"))


def cross_validate(df: DataFrame) -> None:
    estimator = classifier()
    grid = ParamGridBuilder().addGrid(estimator.getParam("seed"), [1]).build()
    search = CrossValidator(
        estimator=estimator,
        estimatorParamMaps=grid,
        evaluator=MulticlassClassificationEvaluator(),
        numFolds=2,
    )
    search.fit(df)


def evaluate(df: DataFrame) -> None:
    column = Column(name="features", role="feature", dtype="float32", shape=(2,))
    TorchClassifierModel(make_net(), [column], num_classes=2).evaluate(df)


def run_function(df: DataFrame) -> None:
    TorchRunner(num_workers=1, data=df.select("features"), verbose=0).run(int)


@pytest.mark.parametrize(
    ("verb", "query"),
    [
        (fit, null_of_rows),
        (fit, null_of_parquet),
        (fit_in_rounds, null_of_parquet),
        (fit_pipeline, null_of_rows),
        (cross_validate, null_of_parquet),
        (evaluate, null_of_parquet),
        (run_function, null_of_parquet),
    ],
    ids=lambda one: one.__name__,
)
def test_a_row_that_a_stage_refuses_ends_every_verb_at_once(
    verb: Callable[[DataFrame], None],
    query: Query,
    spark: SparkSession,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(DataError) as caught:
        verb(query(spark, tmp_path))
    check(caught.value, TOLD[query])
    said = [record.getMessage() for record in caplog.records if record.name.startswith("sparkdl")]
    assert not [text for text in said if "again" in text or "restart" in text], said
    printed = "".join(traceback.format_exception(caught.value)).splitlines()
    # pyspark's own frames of a Pipeline and of its threads stand between the user's and ours
    assert len(printed) <= (40 if verb is cross_validate else 24 if verb is fit_pipeline else 12)
