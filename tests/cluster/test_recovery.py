"""Whatever dies, training ends with the bits of the undisturbed run."""

from __future__ import annotations

import glob
import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.config import CheckpointConfig, TrainConfig
from sparkdl.errors import TrainingFailed, WorkerError
from tests.cluster import faults

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from torch import nn

    from sparkdl.spark.request import FitRequest, FitResult

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow]

STEPS_PER_EPOCH = 17  # of the larger shard; see `request`


def make_net() -> nn.Module:
    from torch import nn

    # Dropout: recovery must restore each rank's random generator as well.
    return nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))


@pytest.fixture(scope="module")
def df(cluster: SparkSession) -> DataFrame:
    from pyspark.sql import functions as F

    features = [((F.col("id") * k) % 7 - 3).cast("float") for k in (1, 2, 3)]
    return cluster.range(0, 1000, 1, 3).select(
        F.array(*features).alias("features"), (F.col("id") % 3).alias("label")
    )


def request(*callbacks: Any, **changes: Any) -> FitRequest:
    from sparkdl.spark.request import FitRequest

    config = TrainConfig(
        task="classification",
        loss="cross_entropy",
        optimizer="adam",
        learning_rate=0.01,
        epochs=3,
        batch_size=32,
        seed=7,
        callbacks=callbacks,
        checkpoint=changes.pop("checkpoint", CheckpointConfig(interval=5)),
    )
    values: dict[str, Any] = {
        "module": make_net,
        "config": config,
        "feature_cols": ("features",),
        "input_shapes": (None,),
        "label_col": "label",
        "weight_col": None,
        "validation_col": None,
        "num_workers": 2,
        "max_restarts": 3,
        "verbose": 0,
        "cpus_per_worker": None,
        "gpus_per_worker": None,
    }
    return FitRequest(**{**values, **changes})


def digest(result: FitResult) -> str:
    state = result.module.state_dict()
    data = b"".join(tensor.numpy().tobytes() for tensor in state.values())
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(df: DataFrame) -> str:
    from sparkdl.spark.fit import fit

    result = fit(df, request())
    assert result.summary.restarts == 0
    return digest(result)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("fault", [faults.KillWorker, faults.KillExecutor, faults.StopWorker])
@pytest.mark.parametrize(("rank", "step"), [(1, 12), (0, 1)])
def test_a_lost_worker_changes_no_bit(
    df: DataFrame, undisturbed: str, tmp_path: Path,
    fault: Callable[..., faults.Fault], rank: int, step: int,
) -> None:  # fmt: skip
    from sparkdl.spark.fit import fit

    marker = tmp_path / "struck"
    result = fit(df, request(fault(marker=str(marker), rank=rank, step=step)))
    assert marker.exists()
    assert result.summary.restarts == 1
    assert digest(result) == undisturbed
    assert [record["epoch"] for record in result.summary.history] == [1, 2, 3]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("delay_seconds", [0.0, 0.004, 0.02])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_lost_while_a_checkpoint_is_written(
    df: DataFrame, undisturbed: str, tmp_path: Path, rank: int, delay_seconds: float
) -> None:
    from sparkdl.spark.fit import fit

    fault = faults.KillWorkerSoon(
        marker=str(tmp_path / "struck"), rank=rank, step=10, delay_seconds=delay_seconds
    )
    checkpoint = CheckpointConfig(directory=str(tmp_path / "checkpoints"), interval=5)
    result = fit(df, request(fault, faults.Slow(), checkpoint=checkpoint))
    assert result.summary.restarts == 1
    assert digest(result) == undisturbed
