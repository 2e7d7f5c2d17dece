"""Every Spark type becomes the right dtype, or one sentence."""

from __future__ import annotations

import datetime
import decimal
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import Matrices, Vectors, VectorUDT
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, LongType, StructField, StructType

from sparkdl.data.arrow_arrays import examine, uniform
from sparkdl.data.plan import Column, Role, SpoolColumn
from sparkdl.errors import DataError
from sparkdl.inference.regression import REGRESSION
from sparkdl.inputs import Image, Named, Tensor
from sparkdl.spark.frames.columns import CaseSensitive, drawn, require, validation_indicator
from sparkdl.spark.frames.prepare_columns import prepare, prepare_labels, prepare_trained

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

D = decimal.Decimal


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    """One row with a column of every type."""
    schema = """
        bool boolean, byte tinyint, short smallint, int int, long bigint, float float,
        double double, decimal decimal(10, 2), string string, binary binary, date date,
        timestamp timestamp, ntz timestamp_ntz, floats array<float>, doubles array<double>,
        ints array<int>, bools array<boolean>, decimals array<decimal(10, 2)>,
        bytes array<tinyint>, matrix array<array<double>>, cube array<array<array<smallint>>>,
        strings array<string>, binaries array<binary>, map map<string, int>,
        struct struct<a: int>, interval interval day to second, `a.b` double, `tick``s` int
    """
    row = (
        True, -1, -300, 70000, 2**40, 0.5, 0.1, D("1.25"), "s", b"\x00\xff", datetime.date.today(),
        datetime.datetime.now(), datetime.datetime.now(), [0.5, 1.5], [0.1, 0.2],
        [1, 2, 3], [True, False], [D("1.25")], [1, -1], [[1.0, 2.0], [3.0, 4.0]],
        [[[1], [2]]], ["a"], [b"a"], {"a": 1}, (1,), datetime.timedelta(1), 2.5, 3,
    )  # fmt: skip
    return spark.createDataFrame([row], schema)


@pytest.fixture(scope="module")
def vectors(spark: SparkSession) -> DataFrame:
    rows = [
        (Vectors.dense(1.0, 2.0), Vectors.sparse(2, {1: 3.0}), Matrices.dense(1, 1, [1.0])),
    ]  # fmt: skip
    return spark.createDataFrame(rows, ["dense", "sparse", "matrix"])


def values(df: DataFrame, prepared: Iterable[SpoolColumn]) -> list[np.ndarray]:
    """What a worker would see of each column, found by one job."""
    columns = [p.expression.alias(f"c{number}") for number, p in enumerate(prepared)]
    table = df.select(*columns).toArrow()
    return [uniform(column.combine_chunks()) for column in table.columns]


def test_features_keep_their_dtype(df: DataFrame) -> None:
    cases: list[tuple[str, str, Any]] = [
        ("bool", "bool", [True]),
        ("byte", "int8", [-1]),
        ("short", "int16", [-300]),
        ("int", "int32", [70000]),
        ("long", "int64", [2**40]),
        ("float", "float32", [0.5]),
        ("double", "float32", [np.float32(0.1)]),
        ("decimal", "float32", [1.25]),
        ("binary", "uint8", [[0, 255]]),
        ("floats", "float32", [[0.5, 1.5]]),
        ("doubles", "float32", [[np.float32(0.1), np.float32(0.2)]]),
        ("ints", "int32", [[1, 2, 3]]),
        ("bools", "bool", [[True, False]]),
        ("decimals", "float32", [[1.25]]),
        ("bytes", "int8", [[1, -1]]),
        ("matrix", "float32", [[[1.0, 2.0], [3.0, 4.0]]]),
        ("cube", "int16", [[[[1], [2]]]]),
        ("a.b", "float32", [2.5]),
        ("tick`s", "int32", [3]),
    ]
    prepared = [prepare(df.schema, name, "feature", float_dtype="float32") for name, *_ in cases]
    for (name, dtype, expected), p, got in zip(cases, prepared, values(df, prepared), strict=True):
        assert (p.name, p.role, p.dtype) == (name, "feature", dtype)
        assert got.dtype == np.dtype(dtype), name
        np.testing.assert_array_equal(got, np.array(expected, dtype), err_msg=name)


def test_floating_columns_take_the_dtype_of_the_module(df: DataFrame) -> None:
    names = ["float", "double", "decimal", "floats", "doubles", "matrix"]
    prepared = [prepare(df.schema, name, "feature", float_dtype="float64") for name in names]
    assert {p.dtype for p in prepared} == {"float64"}
    assert {got.dtype for got in values(df, prepared)} == {np.dtype("float64")}


def test_vectors(vectors: DataFrame) -> None:
    cases = [
        (name, dtype, expected)
        for dtype in ("float32", "float64")
        for name, expected in (("dense", [[1.0, 2.0]]), ("sparse", [[0.0, 3.0]]))
    ]
    prepared = [
        prepare(vectors.schema, name, "feature", float_dtype=dtype) for name, dtype, _ in cases
    ]
    for (_, dtype, expected), got in zip(cases, values(vectors, prepared), strict=True):
        assert got.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(got, expected)


def test_a_null_vector_is_found_not_thrown(spark: SparkSession) -> None:
    rows = [(Vectors.dense(1.0),), (None,)]
    df = spark.createDataFrame(rows, vector_schema())
    prepared = prepare(df.schema, "v", "feature", float_dtype="float32")
    arrow = df.select(prepared.expression.alias("c")).toArrow().column("c").combine_chunks()
    assert examine(arrow).nulls == 1


def vector_schema() -> Any:
    from pyspark.ml.linalg import VectorUDT

    return StructType([StructField("v", VectorUDT())])


LABELS = [
    ("bool", "int64"), ("byte", "int64"), ("int", "int64"), ("long", "int64"),
    ("float", "float32"), ("double", "float32"), ("decimal", "float32"),
    ("doubles", "float32"), ("ints", "int64"), ("bools", "int64"), ("matrix", "float32"),
    ("binary", "int64"),
]  # fmt: skip
# Floating ones stay so until the worker has seen that they are whole.
CLASSES = [
    ("bool", "int64"), ("byte", "int64"), ("long", "int64"), ("float", "float64"),
    ("double", "float64"), ("decimal", "float64"),
]  # fmt: skip


def test_labels_are_what_losses_accept(df: DataFrame) -> None:
    labels = [prepare(df.schema, name, "label", float_dtype="float32") for name, _ in LABELS]
    assert [(p.dtype, p.as_classes) for p in labels] == [(dtype, False) for _, dtype in LABELS]
    classes = [
        prepare(df.schema, name, "label", float_dtype="float32", as_classes=True)
        for name, _ in CLASSES
    ]
    assert {(p.dtype, p.as_classes) for p in classes} == {("int64", True)}
    weights = [
        prepare(df.schema, name, "weight", float_dtype="float32")
        for name in ("bool", "int", "float", "double", "decimal")
    ]
    assert {p.dtype for p in weights} == {"float32"}
    found = [str(got.dtype) for got in values(df, [*labels, *classes, *weights])]
    found[len(LABELS) - 1] = "int64"  # bytes are cast when they are stored
    assert found == [dtype for _, dtype in (*LABELS, *CLASSES)] + ["float32"] * len(weights)


@pytest.mark.parametrize(
    ("name", "role", "shown", "advice"),
    [
        *[
            (name, "feature", shown, "with a transform, whatever else, such as text")
            for name, shown in [
                ("string", "string"), ("date", "date"), ("timestamp", "timestamp"),
                ("ntz", "timestamp_ntz"), ("strings", "array<string>"),
                ("binaries", "array<binary>"), ("map", "map<string,int>"),
                ("struct", "struct<a:int>"), ("interval", "interval day to second"),
            ]
        ],
        ("string", "label", "string", "index strings with StringIndexer"),
        ("binary", "weight", "binary", "a weight is a number"),
        ("string", "weight", "string", "a weight is a number"),
        ("doubles", "weight", "array<double>", "a weight is a number"),
    ],
)  # fmt: skip
def test_types_of_which_no_tensor_can_be_made(
    df: DataFrame, name: str, role: Role, shown: str, advice: str
) -> None:
    with pytest.raises(DataError) as caught:
        prepare(df.schema, name, role, float_dtype="float32")
    message = str(caught.value)
    assert message.startswith(f'column "{name}" has type {shown} and cannot become a tensor')
    assert advice in message


def test_how_to_make_numbers_of_values_that_are_none(spark: SparkSession) -> None:
    for shown, remedy in (
        ("string", "read numbers of a CSV file with inferSchema=True, or cast the text: "
         'F.col("x").cast("float")'),
        ("array<string>", 'cast the text: F.col("x").cast("array<float>")'),
        ("array<array<string>>", 'cast the text: F.col("x").cast("array<array<float>>")'),
        ("date", 'make numbers of it, such as by F.unix_date("x")'),
        ("timestamp", 'make numbers of it, such as by F.unix_seconds("x")'),
        ("map<string,int>", 'make numbers of it, such as by F.map_values("x")'),
        ("struct<a:int,b:int>", 'name a field of it, such as "x.a"'),
    ):  # fmt: skip
        schema = StructType.fromDDL(f"x {shown}")
        with pytest.raises(DataError) as caught:
            prepare(schema, "x", "feature", float_dtype="float32")
        assert str(caught.value) == (
            f'column "x" has type {shown} and cannot become a tensor; {remedy}; a feature is a '
            "number, a boolean, an array of numbers, a Spark ML vector or binary; inputs={...} "
            "takes images (sparkdl.Image), rows of different lengths (sparkdl.Sequence) and, with "
            "a transform, whatever else, such as text"
        )


def test_paths_are_no_images(spark: SparkSession) -> None:
    schema = StructType.fromDDL("x string")
    with pytest.raises(DataError) as caught:
        prepare(
            schema, Named(argument=None, specification=Image("x")), "feature", float_dtype="float32"
        )
    assert str(caught.value) == (
        'column "x" has type string, of which Image cannot be made; it must be binary (a file\'s '
        'bytes) or Spark\'s image struct; spark.read.format("binaryFile").load(folder) reads '
        'files, as "content"'
    )


@pytest.mark.parametrize(
    ("name", "role"), [("dense", "label"), ("sparse", "weight"), ("matrix", "feature")]
)
def test_vectors_where_none_fits(vectors: DataFrame, name: str, role: Role) -> None:
    with pytest.raises(DataError, match=f'column "{name}" has type (vector|matrix)'):
        prepare(vectors.schema, name, role, float_dtype="float32")


@pytest.mark.parametrize("name", ["string", "doubles", "binary"])
def test_types_that_are_no_class(df: DataFrame, name: str) -> None:
    with pytest.raises(DataError, match=f'"{name}" has type .* a class is a whole number from 0'):
        prepare(df.schema, name, "label", float_dtype="float32", as_classes=True)


def test_how_to_make_classes_of_what_is_one_hot() -> None:
    vectors = StructType([StructField("y", VectorUDT())])
    with pytest.raises(DataError, match=r"has type vector .*: leave OneHotEncoder out"):
        prepare(vectors, "y", "label", float_dtype="float32", as_classes=True)
    arrays = StructType([StructField("y", ArrayType(LongType()))])
    remedy = re.escape('F.expr("array_position(y, array_max(y)) - 1")')
    with pytest.raises(DataError, match=f"has type array<bigint> .* {remedy}"):
        prepare(arrays, "y", "label", float_dtype="float32", as_classes=True)


def test_numbers_of_several_outputs_are_cast_whatever_their_depth(df: DataFrame) -> None:
    for name in ("int", "ints", "doubles"):
        (label,) = prepare_labels(
            df.schema, REGRESSION, "mse", labels=(), label_col=name, weight_col=None,
            float_dtype="float64", weight_dtype="float64",
        )  # fmt: skip
        assert label.dtype == "float64"
        kind = df.select(label.expression.alias("y")).schema["y"].dataType.simpleString()
        assert kind == ("double" if name == "int" else "array<double>")


def test_a_missing_column_lists_those_there_are(spark: SparkSession) -> None:
    df = spark.range(1).selectExpr("id", "id AS Label")
    message = '"label" is not in the DataFrame; its columns: id, Label'
    with pytest.raises(DataError, match=message):
        prepare(CaseSensitive(df.schema.fields), "label", "label", float_dtype="float32")
    with pytest.raises(DataError, match='"labels" is not in the DataFrame; its columns: id, Label'):
        prepare(df.schema, "labels", "label", float_dtype="float32")


def test_a_misspelt_column_is_named_last() -> None:
    schema = StructType([StructField("label", LongType()), StructField("x", LongType())])
    with pytest.raises(DataError, match=r"its columns: label, x; did you mean 'label'\?$"):
        require(schema, "labels")


def test_case_counts_only_where_spark_says_so() -> None:
    schema = StructType([StructField("Label", LongType()), StructField("x", LongType())])
    assert require(schema, "label").name == "Label"
    assert require(schema, "X").name == "x"
    both = StructType([*schema.fields, StructField("label", LongType())])
    assert require(CaseSensitive(both.fields), "label") is both.fields[2]
    with pytest.raises(DataError, match=r'"LABEL" .* 2 times \("Label", "label"\)'):
        require(both, "LABEL")


def test_a_column_that_is_there_twice(spark: SparkSession) -> None:
    df = spark.range(1).selectExpr("id", "id AS id")
    with pytest.raises(
        DataError, match=r'column "id" is in the DataFrame 2 times .*; give each a name'
    ):
        prepare(df.schema, "id", "feature", float_dtype="float32")


def test_the_validation_indicator_is_boolean(df: DataFrame) -> None:
    assert df.select(validation_indicator(df.schema, "bool")).first() == (True,)
    with pytest.raises(DataError, match='"int" marks validation rows and must be boolean; it is'):
        validation_indicator(df.schema, "int")
    with pytest.raises(DataError, match='"absent" is not in the DataFrame'):
        validation_indicator(df.schema, "absent")


def test_drawn_rows_are_the_same_however_the_rows_are_split(spark: SparkSession) -> None:
    rows = spark.range(4000).selectExpr("id % 2000 AS n", "array(id % 2000, 1) AS x")
    chosen = []
    for parts in (1, 5):
        spread = rows.repartition(parts, F.rand(seed=parts))
        found = spread.where(drawn([F.col("n"), F.col("x")], 0.25)).collect()
        chosen.append(sorted(row["n"] for row in found))
    assert chosen[0] == chosen[1]
    assert chosen[0][::2] == chosen[0][1::2]  # equal rows are together
    assert 420 < len(set(chosen[0])) < 580
    more = rows.where(drawn([F.col("n"), F.col("x")], 0.5)).collect()
    assert set(chosen[0]) < {row["n"] for row in more}
    shard_of = rows.where(drawn([F.col("n"), F.col("x")], 0.25)).withColumn(
        "shard", F.pmod(F.xxhash64("n", "x"), F.lit(4))
    )
    assert min(row["count"] for row in shard_of.groupBy("shard").count().collect()) > 150


def test_the_width_that_the_schema_tells_is_that_of_training(df: DataFrame) -> None:
    assembler = VectorAssembler(inputCols=["int", "long"], outputCol="v")
    schema = assembler.transform(df.select("int", "long", "floats")).schema

    def trained_on(shape: tuple[int, ...], name: str) -> str:
        column = Column(name=name, role="feature", dtype="float32", shape=shape)
        return prepare_trained(
            schema, Named(argument=None, specification=Tensor(name)), column
        ).name

    assert [trained_on(shape, "v") for shape in ((2,), (2, 1))] == ["v", "v"]
    assert trained_on((3,), "floats") == "floats"  # only the rows tell
    with pytest.raises(DataError, match=r'"v" has 2 values in a row; .* rows of shape \(3,\)'):
        trained_on((3,), "v")
    with pytest.raises(DataError, match=r'"long" has 1 value in a row; .* rows of shape \(3,\)'):
        trained_on((3,), "long")
    assert trained_on((1,), "long") == trained_on((), "long") == "long"
