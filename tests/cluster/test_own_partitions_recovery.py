"""The DataFrame's own partitions as shards, of which executors take some along."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster import faults
from tests.cluster.test_recovery import digest, nothing_is_left, request, training_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow]
__all__ = ["nothing_is_left"]


@pytest.fixture(scope="module")
def files(cluster: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    path = str(tmp_path_factory.mktemp("rows") / "parquet")
    training_rows(cluster).write.parquet(path)
    return cluster.read.parquet(path)


@pytest.mark.timeout(400)
def test_a_lost_executor_changes_no_bit(files: DataFrame, tmp_path: Path) -> None:
    """Spark reads the partitions that it had, and ranks find their shards wherever they are."""
    from sparkdl.spark.fit.fit import fit

    undisturbed = fit(files, request(shards="partitions"))
    assert undisturbed.summary.restarts == 0
    marker = tmp_path / "struck"
    struck = faults.KillExecutor(marker=str(marker), rank=1, step=12)
    result = fit(files, request(struck, shards="partitions"))
    assert marker.exists()
    assert result.summary.restarts == 1
    assert digest(result) == digest(undisturbed)
