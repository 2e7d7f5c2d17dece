"""A gang of another size goes on with the same shards, in the middle of an epoch too."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from sparkdl.config import CheckpointConfig
from tests.cluster.test_recovery import request, training_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.spark.run.run import FitRequest, FitResult

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def df(cluster: SparkSession) -> DataFrame:
    return training_rows(cluster)


def plain_net() -> nn.Module:
    """Without dropout and BatchNorm, which depend on the number of workers."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))


def in_shards(*callbacks: Any, steps: int = -1, **changes: Any) -> FitRequest:
    """Three shards: eleven steps an epoch, with a checkpoint every five."""
    wanted = request(*callbacks, num_shards=3, module=plain_net, **changes)
    return replace(wanted, config=replace(wanted.config, max_steps=steps))


def losses(result: FitResult) -> list[float]:
    return [record["loss"] for record in result.summary.history]


@pytest.fixture(scope="module")
def expected(df: DataFrame) -> list[float]:
    from sparkdl.spark.fit.fit import fit

    return losses(fit(df, in_shards(num_workers=1)))


def test_a_fit_goes_on_with_another_number_of_workers_within_an_epoch(
    df: DataFrame, expected: list[float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from sparkdl.spark.fit.fit import fit

    place = CheckpointConfig(directory=str(tmp_path / "c"), interval=5)
    fit(df, in_shards(num_workers=2, checkpoint=place, steps=16))
    caplog.clear()
    with caplog.at_level(logging.INFO, "sparkdl"):
        result = fit(df, in_shards(num_workers=1, checkpoint=place))
    assert "going on from the checkpoint of step 16" in caplog.text
    assert "begins the interrupted epoch again" not in caplog.text
    assert result.summary.gang_sizes == [[16, 1]]
    assert losses(result) == pytest.approx(expected, rel=1e-6)
