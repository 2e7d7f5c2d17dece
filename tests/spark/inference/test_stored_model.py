"""A fit along a mesh leaves its weights in a storage, and the model works from there."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import sparkdl
from sparkdl import Mesh, TorchClassifier
from sparkdl.storage.sharded_weights import INDEX

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl import TorchClassifierModel

pytestmark = [pytest.mark.spark, pytest.mark.slow]


class Net(nn.Module):
    """Layers to divide, statistics, and a type that shows every digit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.into = nn.Linear(3, 8, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)
        self.out = nn.Linear(8, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.norm(self.into(x)).relu())
        return out


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    rng = np.random.default_rng(0)
    rows = [(i, rng.normal(size=3).tolist(), int(rng.integers(2))) for i in range(90)]
    return spark.createDataFrame(rows, "id int, features array<double>, label int")


@pytest.fixture(scope="module")
def fitted(
    df: DataFrame, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TorchClassifierModel, Path]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    estimator = TorchClassifier(
        module=Net,
        parallelism=Mesh(shard=2, smallest_unit=1),
        checkpointDir=str(folder),
        batchSize=16,
        epochs=2,
        verbose=0,
    )
    model = estimator.fit(df)
    assert not is_read(model)
    model.transform(df).count()
    model.copy().write().overwrite().save(str(folder / "copy"))
    assert not is_read(model)
    yield model, folder


def is_read(model: TorchClassifierModel) -> bool:
    """True if the driver has had the weights."""
    from sparkdl.serialization.stored_module import StoredModule

    assert isinstance(model._module, StoredModule)
    return bool(model._module._whole)


def values(predictions: DataFrame) -> dict[int, list[float]]:
    return {row["id"]: row["rawPrediction"].tolist() for row in predictions.collect()}


def expected(module: nn.Module, df: DataFrame) -> dict[int, list[float]]:
    rows = df.collect()
    with torch.no_grad():
        found = module(torch.tensor([row["features"] for row in rows], dtype=torch.float64))
    found -= found.mean(1, keepdim=True)  # as raw predictions of two classes are
    return {row["id"]: values for row, values in zip(rows, found.tolist(), strict=True)}


def is_close(found: dict[int, Any], wanted: dict[int, Any]) -> bool:
    return found.keys() == wanted.keys() and all(
        np.allclose(found[key], wanted[key], rtol=0, atol=1e-12) for key in wanted
    )


def folder_of(path: Path) -> Path:
    (found,) = (path / "weights").iterdir()
    return found


def read(folder: Path) -> dict[str, torch.Tensor]:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in weight_map.items()}


def test_the_folder_has_the_weights(fitted: tuple[TorchClassifierModel, Path]) -> None:
    model, path = fitted
    found, state = read(folder_of(path)), model.module.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert not torch.equal(found["into.weight"], Net().into.weight)
    assert len(list(folder_of(path).glob("*.safetensors"))) >= 2


def test_it_predicts_whole(fitted: tuple[TorchClassifierModel, Path], df: DataFrame) -> None:
    model, _ = fitted
    assert is_close(values(model.transform(df)), expected(model.module, df))
    result = model.evaluate(df, metrics=["f1"])
    wanted = expected(model.module, df)
    right = [
        max(range(2), key=wanted[row["id"]].__getitem__) == row["label"] for row in df.collect()
    ]
    assert result["accuracy"] == sum(right) / len(right)


def test_it_is_saved_and_loaded(
    fitted: tuple[TorchClassifierModel, Path], df: DataFrame, tmp_path: Path
) -> None:
    from sparkdl import TorchClassifierModel
    from sparkdl.serialization.stored_module import StoredModule

    model, _ = fitted
    wanted = expected(model.module, df)
    model.write().overwrite().save(str(tmp_path / "m"))
    assert read(tmp_path / "m" / "model").keys() == model.module.state_dict().keys()
    loaded = TorchClassifierModel.load(str(tmp_path / "m"))
    assert isinstance(loaded._module, StoredModule)
    assert loaded._module.mesh == Mesh(shard=2, smallest_unit=1)
    assert is_close(values(loaded.transform(df)), wanted)
    assert not is_read(loaded)
    loaded.write().overwrite().save(str(tmp_path / "m"))
    again = TorchClassifierModel.load(str(tmp_path / "m"))
    assert is_close(values(again.transform(df)), wanted)
    assert is_close(expected(sparkdl.load_module(tmp_path / "m"), df), wanted)
    assert sparkdl.load_signature(tmp_path / "m").num_classes == 2


GANG = Mesh(shard=2, smallest_unit=1)


def test_it_predicts_in_a_gang(fitted: tuple[TorchClassifierModel, Path], df: DataFrame) -> None:
    model, _ = fitted
    wanted = expected(model.module, df)
    gang = model.copy().setParallelism(GANG)
    for rows in (df.repartition(5), df.coalesce(1), df.where("id < 1"), df.where("id < 0")):
        kept = {row["id"] for row in rows.collect()}
        found = values(gang.setBatchSize(7).transform(rows))
        assert is_close(found, {key: value for key, value in wanted.items() if key in kept})
    predictions = gang.transform(df)
    assert predictions.columns == model.transform(df).columns
    assert predictions.schema == model.transform(df).schema
    assert len(predictions.limit(3).collect()) == 3
    assert predictions.union(predictions).count() == 2 * len(wanted)
    assert predictions.coalesce(1).count() == len(wanted)
    assert len(predictions.orderBy("id").take(5)) == 5
    with_more = gang.setPredictionCol("").transform(
        predictions.drop("rawPrediction", "probability")
    )
    assert is_close(values(with_more), wanted)  # vectors and predictions pass through


def test_a_gang_that_cannot_be(fitted: tuple[TorchClassifierModel, Path], df: DataFrame) -> None:
    from sparkdl import TorchClassifierModel
    from sparkdl.errors import ClusterError, ConfigError

    model, _ = fitted
    with pytest.raises(ClusterError, match="needs 64 workers at a time"):
        model.copy().setParallelism(Mesh(shard=64)).transform(df)
    with pytest.raises(ConfigError, match="'into' returns"):
        tensor = Mesh(tensor=2, layout={"into": "columns", "out": "rows"})
        model.copy().setParallelism(tensor).setOutputs(
            {"a": sparkdl.Output(layer="into")}
        ).transform(df)
    with pytest.raises(ConfigError, match="no layer fits"):
        wrong = Mesh(tensor=2, layout={"other": "columns"})
        model.copy().setParallelism(wrong).transform(df)
    here = TorchClassifierModel(model.module, model.columns, num_classes=2)
    with pytest.raises(ConfigError, match="needs weights in a storage"):
        here.setParallelism(GANG).transform(df)


def failing(output: Any) -> Any:
    if len(output) == 6:  # a batch that one rank has
        raise ValueError("mine")
    return output


def test_an_error_of_the_users_code(
    fitted: tuple[TorchClassifierModel, Path], df: DataFrame
) -> None:
    from pyspark.errors import SparkRuntimeException

    model, _ = fitted
    gang = model.copy().setParallelism(GANG).setBatchSize(13).setPostprocessing(failing)
    rows = df.where("id < 13").coalesce(1)
    with pytest.raises(SparkRuntimeException, match="ValueError: mine"):
        gang.transform(rows).collect()


def killing_at(marker: str, output: Any) -> Any:
    """Ends the worker that has a batch of six rows, once."""
    if len(output) == 6 and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return output


def test_a_lost_worker(
    fitted: tuple[TorchClassifierModel, Path],
    df: DataFrame,
    tmp_path: Path,
) -> None:
    model, _ = fitted
    marker = tmp_path / "struck"
    kill = partial(killing_at, str(marker))
    gang = model.copy().setParallelism(GANG).setBatchSize(13).setPostprocessing(kill)
    rows = df.where("id < 13").coalesce(1)
    assert is_close(values(gang.transform(rows)), expected(model.module, rows))
    assert marker.exists()
