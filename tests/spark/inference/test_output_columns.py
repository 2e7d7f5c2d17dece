from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from torch import nn

from sparkdl.data.collate import Arguments
from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError
from sparkdl.inference.outputs import Forward, Output
from sparkdl.model import TorchClassifierModel, TorchModel, TorchRegressorModel
from sparkdl.spark.inference.output_columns import (
    WantedColumn,
    plan_outputs,
    spark_type,
    vectors_to_arrays,
)

ZEROS = Arguments((torch.zeros(2, 3),))
FEATURES = Column(name="features", role="feature", dtype="float32", shape=(3,))
ROWS = [[float(i), i * 0.5, -1.0 * i] for i in range(7)]


class Box(NamedTuple):
    size: torch.Tensor
    grid: torch.Tensor


class Heads(nn.Module):
    """Returns a dict of everything."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = self.body(x)
        box = Box(size=x.sum(1), grid=torch.stack([x, -x], dim=1))
        return {"logits": self.head(hidden), "box": box, "states": (hidden, x > 0)}


def plan(module: nn.Module, *outputs: Output, **forward: Any) -> Any:
    wanted = [WantedColumn(column=f"c{i}", output=output) for i, output in enumerate(outputs)]
    return plan_outputs(module, ZEROS, Forward(**forward), wanted)


def types_of(found: Any) -> list[str]:
    return [field.dataType.simpleString() for field in found.spark_type.fields]


@pytest.mark.parametrize(
    ("output", "types"),
    [
        (Output(key=("box", "size")), ["float"]),
        (Output(key=("box", "grid")), ["array<float>"]),
        (Output(key=("box", "grid"), form="nested"), ["array<array<float>>"]),
        (Output(key="logits", form="vector"), ["array<double>"]),
        (Output(key="states"), ["array<float>", "array<boolean>"]),
        (Output(), ["array<float>", "float", "array<float>", "array<float>", "array<boolean>"]),
    ],
)
def test_types_are_found_by_running_the_module(output: Output, types: list[str]) -> None:
    assert types_of(plan(Heads(), output)) == types


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (Output(key="absent"), "there is no 'absent'; known: 'logits', 'box', 'states'"),
        (Output(layer="tail"), "no layer 'tail'; its layers: body, body.0, body.1, head"),
        (Output(key="logits", form="value"), "'c0' is one number per row, but .*'logits'"),
    ],
)
def test_wrong_outputs_are_named_before_any_job(output: Output, message: str) -> None:
    layers = () if output.layer is None else (output.layer,)
    with pytest.raises(ConfigError, match=message):
        plan(Heads(), output, layers=layers)


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (lambda y: {}, "an empty dict"),
        (lambda y: "text", "is a str, of which no column"),
        (lambda y: y["logits"][:1], "for 2 samples"),
        (lambda y: y["logits"].to(torch.complex64), "complex64, for which Spark has no type"),
        (lambda y: y["absent"], "fails on two rows, .*KeyError"),
    ],
)
def test_what_no_column_can_be_made_of(after: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(Heads(), Output(), postprocessing=after)


def test_spark_types() -> None:
    nested = spark_type(pa.list_(pa.list_(pa.int16())))
    assert nested == T.ArrayType(T.ArrayType(T.ShortType(), False), False)


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    data = [(i, row, Vectors.dense(i)) for i, row in enumerate(ROWS)]
    frame = spark.createDataFrame(data, ["id", "features", "kept"])
    return frame.withColumn("features", F.col("features").cast("array<float>")).repartition(3)


@pytest.mark.spark
def test_every_kind_of_output_at_once(spark: SparkSession, rows: DataFrame, tmp_path: Path) -> None:
    module = Heads()
    model = TorchModel(module, [FEATURES]).setBatchSize(2).setPredictionCol("all")
    model.setOutputs(
        {
            "size": ("box", "size"),
            "grid": Output(key=("box", "grid"), form="nested"),
            "vector": Output(key="logits", form="vector"),
            "last": ("states", -1),
            "hidden": Output(layer="body.0"),
            "head": Output(layer="head", form="vector"),
        }
    )
    model.write().save(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model"))
    assert loaded.getOutputs() == model.getOutputs()
    out = loaded.transform(rows)
    assert out.columns == [*rows.columns, "all", *model.getOutputs()]
    assert out.schema["all"].dataType.simpleString() == (
        "struct<logits:array<float>,box:struct<size:float,grid:array<float>>,"
        "states:struct<_0:array<float>,_1:array<boolean>>>"
    )
    found = out.orderBy("id").collect()
    x = torch.tensor(ROWS)
    with torch.no_grad():
        expected = module(x)
        hidden = module.body[0](x)
    close = {"rtol": 1e-5, "atol": 1e-6}

    def values(get: Any) -> np.ndarray:
        return np.array([get(row) for row in found], dtype=float)

    np.testing.assert_allclose(values(lambda r: r["size"]), x.sum(1), **close)
    np.testing.assert_allclose(values(lambda r: r["all"]["box"]["size"]), x.sum(1), **close)
    np.testing.assert_allclose(values(lambda r: r["grid"]), expected["box"].grid, **close)
    np.testing.assert_allclose(values(lambda r: r["vector"].toArray()), expected["logits"], **close)
    np.testing.assert_allclose(values(lambda r: r["head"].toArray()), expected["logits"], **close)
    np.testing.assert_allclose(values(lambda r: r["hidden"]), hidden, **close)
    np.testing.assert_array_equal(values(lambda r: r["last"]), x > 0)
    assert [row["kept"] for row in found] == [Vectors.dense(i) for i in range(7)]


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def colder(output: dict[str, Any]) -> dict[str, Any]:
    return {**output, "logits": output["logits"] / 10}


@pytest.mark.slow
@pytest.mark.spark
def test_a_classifier_with_processing_before_and_after(rows: DataFrame, tmp_path: Path) -> None:
    model = TorchClassifierModel(Heads(), [FEATURES]).setPredictionOutput("logits")
    model.setPreprocessing(double).setPostprocessing(colder)
    model.setOutputs({"hidden": Output(layer="body.0")})
    model.write().save(str(tmp_path / "model"))
    out = TorchClassifierModel.load(str(tmp_path / "model")).transform(rows)
    found = out.orderBy("id").collect()
    module, x = Heads(), torch.tensor(ROWS) * 2
    with torch.no_grad():
        chances = (module(x)["logits"].double() / 10).softmax(1)
        hidden = module.body[0](x)
    got = np.array([row["probability"].toArray() for row in found])
    np.testing.assert_allclose(got, chances, rtol=1e-5)
    np.testing.assert_allclose([row["hidden"] for row in found], hidden, rtol=1e-5, atol=1e-6)
    assert [row["prediction"] for row in found] == chances.argmax(1).double().tolist()


@pytest.mark.spark
def test_outputs_are_checked_before_any_job(rows: DataFrame) -> None:
    model = TorchModel(Heads(), [FEATURES])
    with pytest.raises(ConfigError, match="must differ"):
        model.copy().setOutputs({"prediction": "logits"}).transform(rows)
    with pytest.raises(TypeError, match="the key of an output"):
        model.copy().setOutputs({"x": {"form": "list"}})
    with pytest.raises(ConfigError, match="choose one with predictionOutput"):
        TorchClassifierModel(Heads(), [FEATURES]).transform(rows)
    regressor = TorchRegressorModel(Heads(), [FEATURES])
    with pytest.raises(ConfigError, match="one number per row"):
        regressor.setPredictionOutput("logits").transform(rows)
    only = model.copy().setPredictionCol("").setOutputs({"x": ("box", "size")})
    assert only.transform(rows).columns == [*rows.columns, "x"]


def test_vectors_become_arrays_wherever_they_are(spark: SparkSession) -> None:
    vector = Vectors.dense(1.0, 2.0)
    inner = T.StructType([T.StructField("v.w", VectorUDT()), T.StructField("n", T.LongType())])
    schema = T.StructType(
        [
            T.StructField("top.level", VectorUDT()),
            T.StructField("struct", inner),
            T.StructField("list", T.ArrayType(inner)),
            T.StructField("plain", T.StructType([T.StructField("n", T.LongType())])),
        ]
    )
    data = [(vector, (vector, 1), [(vector, 2), None], (3,)), (None, (None, 4), None, None)]
    rows = vectors_to_arrays(spark.createDataFrame([*data, (None,) * 4], schema))
    simple = "struct<v.w:array<double>,n:bigint>"
    assert [kind for _, kind in rows.dtypes] == [
        "array<double>", simple, f"array<{simple}>", "struct<n:bigint>"
    ]  # fmt: skip
    found = [list(row) for row in rows.collect()]
    assert found[0] == [[1.0, 2.0], ([1.0, 2.0], 1), [([1.0, 2.0], 2), None], (3,)]
    assert found[1:] == [[None, (None, 4), None, None], [None] * 4]
