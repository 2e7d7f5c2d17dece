"""In rounds Spark itself replaces what dies, and the bits are those of the undisturbed run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from tests.cluster import faults
from tests.cluster.test_recovery import digest, nothing_is_left, request, training_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.spark.run.run import FitRequest

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow]

__all__ = ["nothing_is_left"]  # a fixture for every test here

SHARDS = 4


@pytest.fixture(scope="module")
def df(cluster: SparkSession) -> DataFrame:
    return training_rows(cluster)


def in_rounds(*callbacks: faults.Fault) -> FitRequest:
    """More shards than the two slots, so that a slot trains several in a round."""
    wanted = request(*callbacks, num_workers=SHARDS)
    strategy = ParameterAveraging(averaging_period=6)
    return replace(wanted, config=replace(wanted.config, sync_strategy=strategy))


@pytest.fixture(scope="module")
def undisturbed(df: DataFrame) -> str:
    from sparkdl.spark.fit.fit import fit

    return digest(fit(df, in_rounds()))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("fault", "rank", "step"),
    [(faults.KillWorker, 3, 8), (faults.KillExecutor, 2, 11)],
)
def test_spark_runs_a_lost_task_alone(
    df: DataFrame,
    undisturbed: str,
    tmp_path: Path,
    fault: type[faults.Fault],
    rank: int,
    step: int,
) -> None:
    from sparkdl.spark.fit.fit import fit

    result = fit(df, in_rounds(fault(str(tmp_path / "struck"), rank, step)))
    assert (tmp_path / "struck").exists()
    assert result.summary.restarts == 0  # no job had to be submitted again
    assert digest(result) == undisturbed


@pytest.mark.timeout(240)
def test_a_worker_that_stands_still_is_replaced(
    df: DataFrame, undisturbed: str, tmp_path: Path
) -> None:
    from sparkdl.spark.fit.fit import fit

    result = fit(df, in_rounds(faults.StopWorker(str(tmp_path / "struck"), 1, 5)))
    assert result.summary.restarts == 1
    assert digest(result) == undisturbed
