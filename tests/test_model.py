from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml import PipelineModel
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn

from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError, DataError, SparkDLError
from sparkdl.inference import predict
from sparkdl.inference.outputs import Forward, Output
from sparkdl.model import TorchClassifierModel, TorchModel, TorchRegressorModel
from sparkdl.report.summary import TrainingSummary
from sparkdl.spark.inference.send_module import ARTIFACT_BYTES

pytestmark = pytest.mark.spark


def feature(name: str = "features", dtype: str = "float32", *shape: int) -> Column:
    return Column(name=name, role="feature", dtype=dtype, shape=shape)


def linear(width: int = 3, outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(width, outputs)


class Two(nn.Module):
    """Two inputs, of which the second is an index."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(5, 3)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return (x * self.embedding(index)).sum(dim=1)


class Bytes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype is torch.uint8
        return x.long().sum(dim=1)


ROWS = [[float(i), i * 0.5, -1.0 * i] for i in range(7)]


@pytest.fixture(scope="module")
def arrays(spark: SparkSession) -> DataFrame:
    rows = [(i, row, "kept") for i, row in enumerate(ROWS)]
    return spark.createDataFrame(rows, "id int, features array<float>, other string")


def direct(module: nn.Module, *inputs: Any) -> torch.Tensor:
    with torch.inference_mode():
        return module.eval()(*(torch.as_tensor(values) for values in inputs))


def assert_close(values: Any, expected: torch.Tensor) -> None:
    """Equal but for the rounding of a batch of another size: kernels treat the last rows apart."""
    np.testing.assert_allclose(values, expected.numpy(), rtol=1e-6, atol=1e-6)


def columns(df: DataFrame, *names: str) -> list[list[Any]]:
    """Values of some columns, from one job."""
    rows = df.orderBy("id").collect()
    return [[row[name] for row in rows] for name in names]


def column(df: DataFrame, name: str) -> list[Any]:
    (values,) = columns(df, name)
    return values


def test_classifier_adds_three_columns(arrays: DataFrame) -> None:
    module = linear()
    out = TorchClassifierModel(module, [feature("features", "float32", 3)]).transform(arrays)
    assert out.columns == [
        *arrays.columns, "prediction", "rawPrediction", "probability",
    ]  # fmt: skip
    prediction, raw, probability, other = columns(out, *out.columns[-3:], "other")
    logits = direct(module, ROWS).double()
    assert prediction == logits.argmax(dim=1).double().tolist()
    raw_logits = logits - logits.mean(1, keepdim=True)  # of two classes
    assert_close(np.stack([vector.toArray() for vector in raw]), raw_logits)
    found = np.stack([vector.toArray() for vector in probability])
    np.testing.assert_allclose(found, logits.softmax(dim=1).numpy(), rtol=1e-6)
    assert other == ["kept"] * 7


class OfTheProgram(nn.Module):
    """Like a class of a notebook: in no module that others can import."""

    __module__ = "__main__"

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(3, 2), nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).relu())


def test_an_output_that_saving_would_lose_is_refused(arrays: DataFrame, tmp_path: Path) -> None:
    model = TorchClassifierModel(OfTheProgram(), [feature("features", "float32", 3)])
    model.save(str(tmp_path / "without"))
    model.setOutputs({"code": Output(layer="encoder")})
    with pytest.raises(ConfigError, match=r"layer 'encoder'.*into a file that can be imported"):
        model.save(str(tmp_path / "with"))
    assert not (tmp_path / "with").exists()
    loaded = TorchClassifierModel.load(str(tmp_path / "without"))
    loaded.setOutputs({"code": Output(layer="encoder")})
    with pytest.raises(ConfigError, match="exported program, which keeps none"):
        loaded.transform(arrays)


@pytest.mark.slow
@pytest.mark.parametrize("squeeze", [False, True])
def test_classifier_with_one_logit_has_two_classes(arrays: DataFrame, squeeze: bool) -> None:
    module = linear(3, 1)
    if squeeze:
        module = nn.Sequential(module, nn.Flatten(0))
    out = TorchClassifierModel(module, [feature("features", "float32", 3)]).transform(arrays)
    prediction, raw, probability = columns(out, *out.columns[-3:])
    z = direct(module, ROWS).double().reshape(-1)
    assert prediction == (z > 0).double().tolist()
    assert_close(np.stack([vector.toArray() for vector in raw]), torch.stack([-z, z], dim=1))
    found = np.stack([vector.toArray() for vector in probability])
    np.testing.assert_allclose(found[:, 1], torch.sigmoid(z).numpy(), rtol=1e-6)


@pytest.mark.slow
def test_empty_names_turn_columns_off(arrays: DataFrame, caplog: Any) -> None:
    model = TorchClassifierModel(linear(), [feature("features", "float32", 3)])
    model.setRawPredictionCol("").setProbabilityCol("").setPredictionCol("class")
    out = model.transform(arrays)
    assert out.columns == [*arrays.columns, "class"]
    assert len(column(out, "class")) == 7
    with caplog.at_level(logging.WARNING):
        assert model.setPredictionCol("").transform(arrays).columns == arrays.columns
    assert "off" in caplog.text


@pytest.mark.classic
def test_the_udf_is_evaluated_once_and_sees_only_the_features(arrays: DataFrame) -> None:
    model = TorchClassifierModel(linear(), [feature("features", "float32", 3)])
    plan = model.transform(arrays)._jdf.queryExecution().executedPlan().toString()
    python = [line for line in plan.splitlines() if "ArrowEvalPython" in line]
    assert len(python) == 1
    assert python[0].count("torch_on_column(features#") == 1
    assert "other" not in python[0].split("[pythonUDF")[0]


@pytest.mark.slow
def test_torch_model_gives_numbers_or_arrays_and_rows_the_shape_of_training(
    arrays: DataFrame,
) -> None:
    cases: dict[str, tuple[nn.Module, tuple[int, ...], str]] = {
        "number": (linear(3, 1), (3,), "float"),
        "array": (linear(3, 2), (3,), "array<float>"),
        "shaped": (nn.Sequential(nn.Flatten(), linear(3, 1)), (1, 3), "float"),
        "flattened": (nn.Sequential(linear(3, 4), nn.Unflatten(1, (2, 2))), (3,), "array<float>"),
    }
    out = arrays
    for name, (module, shape, kind) in cases.items():
        model = TorchModel(module, [feature("features", "float32", *shape)])
        out = model.setPredictionCol(name).transform(out)
        assert out.schema[name].dataType.simpleString() == kind
    for values, (module, shape, _) in zip(columns(out, *cases), cases.values(), strict=True):
        expected = direct(module, torch.tensor(ROWS).reshape(7, *shape)).flatten(1)
        assert_close(np.array(values, dtype=np.float32).reshape(7, -1), expected)


@pytest.mark.slow
def test_regressor_gives_doubles_and_refuses_wide_outputs(arrays: DataFrame) -> None:
    module = linear(3, 1).double()
    model = TorchRegressorModel(module, [feature("features", "float64", 3)])
    out = model.transform(arrays.withColumn("features", F.col("features").cast("array<double>")))
    expected = direct(module, torch.tensor(ROWS, dtype=torch.float64)).reshape(-1).tolist()
    assert column(out, "prediction") == expected
    wide = TorchRegressorModel(linear(3, 2), [feature("features", "float32", 3)])
    with pytest.raises(ConfigError, match=r"'prediction' is one number per row, .*\(2, 2\)"):
        wide.transform(arrays)


@pytest.mark.slow
def test_several_inputs_of_several_dtypes(spark: SparkSession) -> None:
    rows = [(i, row, i % 5) for i, row in enumerate(ROWS)]
    df = spark.createDataFrame(rows, "id int, x array<double>, index bigint")
    model = TorchModel(Two(), [feature("x", "float32", 3), feature("index", "int64")])
    expected = direct(Two(), ROWS, [i % 5 for i in range(7)]).tolist()
    assert column(model.transform(df), "prediction") == expected


@pytest.mark.slow
def test_vectors_dense_and_sparse(spark: SparkSession) -> None:
    rows = [(0, Vectors.dense(1, 2, 3)), (1, Vectors.sparse(3, {1: 4.0}))]
    df = spark.createDataFrame(rows, ["id", "features"])
    module = linear(3, 1)
    out = TorchRegressorModel(module, [feature("features", "float32", 3)]).transform(df)
    expected = direct(module, [[1.0, 2.0, 3.0], [0.0, 4.0, 0.0]]).double().reshape(-1).tolist()
    assert column(out, "prediction") == expected


@pytest.mark.slow
def test_vectors_beside_and_below_the_prediction_over_columnar_files(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = [(0, Vectors.dense(1, 2, 3), Vectors.dense(9)), (1, Vectors.sparse(3, {1: 4.0}), None)]
    source = spark.createDataFrame(rows, ["id", "features", "kept"])
    source.write.parquet(str(tmp_path / "in"))
    df = spark.read.parquet(str(tmp_path / "in"))
    out = TorchClassifierModel(linear(), [feature("features", "float32", 3)]).transform(df)
    out.write.parquet(str(tmp_path / "out"))
    kept, raw = columns(spark.read.parquet(str(tmp_path / "out")), "kept", "rawPrediction")
    assert kept == [Vectors.dense(9), None]
    logits = direct(linear(), [[1.0, 2.0, 3.0], [0.0, 4.0, 0.0]]).double()
    logits -= logits.mean(1, keepdim=True)
    assert raw == [Vectors.dense(row) for row in logits.tolist()]


def test_scalar_columns(spark: SparkSession) -> None:
    df = spark.range(4).select("id", F.col("id").cast("float").alias("a"), F.lit(2).alias("b"))
    columns = [feature("a", "float32"), feature("b", "float32")]

    class Product(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a * b

    assert column(TorchModel(Product(), columns).transform(df), "prediction") == [0, 2, 4, 6]


def test_binary_keeps_bytes_and_integer_outputs(spark: SparkSession) -> None:
    df = spark.createDataFrame([(0, bytearray(b"\x01\x02")), (1, bytearray(b"\xff\x01"))],
                               "id int, features binary")  # fmt: skip
    out = TorchModel(Bytes(), [feature("features", "uint8", 2)]).transform(df)
    assert out.schema["prediction"].dataType.simpleString() == "bigint"
    assert column(out, "prediction") == [3, 256]


@pytest.mark.slow
def test_empty_partitions_and_one_row(arrays: DataFrame) -> None:
    model = TorchClassifierModel(linear(), [feature("features", "float32", 3)])
    one = arrays.where("id = 3").repartition(3)
    assert len(model.transform(one).collect()) == 1
    assert model.transform(arrays.where("id < 0")).collect() == []


def test_batches_are_cut_and_joined_in_order(arrays: DataFrame) -> None:
    module = linear()
    model = TorchModel(module, [feature("features", "float32", 3)]).setBatchSize(2)
    values = np.array(column(model.transform(arrays.coalesce(1)), "prediction"), np.float32)
    np.testing.assert_allclose(values, direct(module, ROWS).numpy(), rtol=1e-6)


@pytest.mark.parametrize("bad", [None, [1.0, None, 2.0], [1.0, 2.0]])
def test_bad_rows_are_refused_by_name(spark: SparkSession, bad: Any) -> None:
    df = spark.createDataFrame([(0, [1.0, 2.0, 3.0]), (1, bad)], "id int, features array<float>")
    model = TorchModel(linear(), [feature("features", "float32", 3)])
    with pytest.raises(Exception, match='column "features"'):
        model.transform(df.coalesce(1)).collect()


@pytest.mark.slow
def test_names_that_differ_in_case_are_the_same_column(
    spark: SparkSession, arrays: DataFrame
) -> None:
    model = TorchModel(linear(3, 1), [feature("features", "float32", 3)])
    expected = direct(linear(3, 1), ROWS).reshape(-1)
    renamed = arrays.withColumnRenamed("features", "Features")
    assert_close(column(model.transform(renamed), "prediction"), expected)
    theirs = arrays.withColumn("Prediction", F.lit(-7.0))
    with pytest.raises(DataError, match='"Prediction" is in the DataFrame already'):
        model.transform(theirs)
    spark.conf.set("spark.sql.caseSensitive", True)
    try:
        assert model.transform(theirs).columns == [*theirs.columns, "prediction"]
        with pytest.raises(DataError, match='"features" is not in the DataFrame'):
            model.transform(renamed)
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_checks_before_any_job(arrays: DataFrame) -> None:
    model = TorchModel(linear(), [feature("features", "float32", 3)])
    with pytest.raises(DataError, match=r'"absent" is not in the DataFrame.*id, features'):
        model.copy().setFeaturesCol("absent").transform(arrays)
    with pytest.raises(DataError, match='"other" is in the DataFrame already'):
        model.copy().setPredictionCol("other").transform(arrays)
    with pytest.raises(DataError, match="type string"):
        model.copy().setFeaturesCol("other").transform(arrays)
    with pytest.raises(ConfigError, match="must differ"):
        TorchClassifierModel(linear(), model.columns).setProbabilityCol("prediction").transform(
            arrays
        )


def test_digits_are_not_lost_on_the_way_to_the_trained_dtype(arrays: DataFrame) -> None:
    model = TorchModel(nn.Embedding(9, 2), [feature("features", "int64", 3)])
    with pytest.raises(DataError, match="trained on int64"):
        model.transform(arrays)


@pytest.mark.connect
def test_a_large_module_travels_as_an_artifact(arrays: DataFrame) -> None:
    module = nn.Sequential(linear(3, 2000), nn.Linear(2000, 1000))
    assert sum(p.nbytes for p in module.parameters()) > ARTIFACT_BYTES
    expected = direct(module, ROWS).numpy()
    model = TorchModel(module, [feature("features", "float32", 3)])
    for _ in range(2):  # the second time the file is there already
        values = np.array(column(model.transform(arrays), "prediction"), np.float32)
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)
    again = TorchModel(module, [feature("features", "float32", 3)])  # the same content
    assert again.transform(arrays).count() == len(ROWS)


@pytest.mark.slow
@pytest.mark.classic
def test_a_large_module_is_broadcast_once(arrays: DataFrame) -> None:
    module = nn.Sequential(linear(3, 1000), nn.Linear(1000, 500))
    model = TorchModel(module, [feature("features", "float32", 3)])
    values = np.array(column(model.transform(arrays), "prediction"), np.float32)
    np.testing.assert_allclose(values, direct(module, ROWS).numpy(), rtol=1e-4, atol=1e-5)
    (sent,) = model._sender.sent.values()
    model.transform(arrays)
    assert list(model._sender.sent.values()) == [sent]
    with torch.no_grad():
        module[1].bias += 1.0
    changed = np.array(column(model.transform(arrays), "prediction"), np.float32)
    np.testing.assert_allclose(changed, values + 1.0, rtol=1e-4, atol=1e-5)


def test_param_maps_and_copy(arrays: DataFrame) -> None:
    model = TorchModel(linear(), [feature("features", "float32", 3)])
    out = model.transform(arrays, {model.predictionCol: "mine"})
    assert out.columns[-1] == "mine"
    assert model.getPredictionCol() == "prediction"
    assert model.copy().module is model.module


@pytest.mark.slow
def test_inside_a_pipeline_model(arrays: DataFrame) -> None:
    first = TorchModel(linear(3, 4), [feature("features", "float32", 3)]).setPredictionCol("h")
    second = TorchRegressorModel(linear(4, 1), [feature("h", "float32", 4)])
    out = PipelineModel([first, second]).transform(arrays)
    expected = direct(nn.Sequential(linear(3, 4), linear(4, 1)), ROWS).reshape(-1)
    np.testing.assert_allclose(column(out, "prediction"), expected.numpy(), rtol=1e-5)


@pytest.mark.slow
def test_streaming(spark: SparkSession, arrays: DataFrame, tmp_path: Path) -> None:
    arrays.write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema(arrays.schema).parquet(str(tmp_path / "in"))
    model = TorchModel(linear(3, 1), [feature("features", "float32", 3)])
    query = (
        model.transform(stream).writeStream.format("memory").queryName("predicted")
        .trigger(availableNow=True).start()
    )  # fmt: skip
    assert query.awaitTermination(60)
    assert spark.table("predicted").count() == 7


def test_summary(arrays: DataFrame) -> None:
    summary = TrainingSummary(history=[{"epoch": 0, "loss": 1.0}])
    columns = [feature("features", "float32", 3)]
    assert TorchModel(linear(), columns, summary=summary).summary is summary
    bare = TorchModel(linear(), columns)
    assert not bare.hasSummary
    with pytest.raises(SparkDLError, match="No training summary"):
        _ = bare.summary
    assert TorchClassifierModel(linear(), columns, num_classes=2).numClasses == 2


def test_module_is_in_eval_mode() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)).train()
    assert not TorchModel(module, [feature("features", "float32", 3)]).module.training


def test_workers_keep_a_bounded_number_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparkdl.serialization.travel.packed_module import given, pack

    monkeypatch.setattr(predict, "_modules", type(predict._modules)())
    loaded = []
    for number in range(predict.MODULES_PER_WORKER + 1):
        packed = pack(linear(number + 1, 1))
        task = predict.PredictTask(
            digest=packed.digest, fetch=partial(given, packed), columns=(), batch_size=1,
            device="cpu", forward=Forward(), leaves=(),
        )  # fmt: skip
        loaded.append(predict.load(task, torch.device("cpu")))
        assert predict.load(task, torch.device("cpu")) is loaded[-1]
    assert len(predict._modules) == predict.MODULES_PER_WORKER
    assert loaded[0] not in predict._modules.values()
