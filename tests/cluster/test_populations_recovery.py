"""In a population, too, Spark runs a lost task alone, and no bit changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sparkdl
from tests.cluster import faults
from tests.cluster.test_recovery import digest, nothing_is_left, request, training_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.spark.run.run import FitRequest

pytestmark = [
    pytest.mark.spark,
    pytest.mark.gang,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

__all__ = ["nothing_is_left"]  # a fixture for every test here


@pytest.fixture(scope="module")
def df(cluster: SparkSession) -> DataFrame:
    return training_rows(cluster)


def under(strategy: Any, *callbacks: faults.Fault) -> FitRequest:
    """More shards than the two slots."""
    wanted = request(*callbacks, num_workers=3)
    return replace(wanted, config=replace(wanted.config, sync_strategy=strategy, epochs=1))


def test_a_lost_task_changes_no_bit(df: DataFrame, tmp_path: Path) -> None:
    from sparkdl.spark.fit.fit import fit

    strategy = sparkdl.PopulationBasedTraining(period=4)
    undisturbed = fit(df, under(strategy))
    result = fit(df, under(strategy, faults.KillWorker(str(tmp_path / "struck"), 1, 6)))
    assert (tmp_path / "struck").exists()
    assert result.summary.restarts == 0  # no job had to be submitted again
    assert digest(result) == digest(undisturbed)
    assert result.summary.population == undisturbed.summary.population
