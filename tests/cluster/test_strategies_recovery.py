"""Under every kind of strategy a killed worker costs a restart, and the run goes on as it was."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sparkdl
from sparkdl.config import CheckpointConfig
from tests.cluster import faults
from tests.cluster.test_recovery import digest, nothing_is_left, request, training_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.spark.run.run import FitRequest

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow, pytest.mark.timeout(300)]

__all__ = ["nothing_is_left"]  # a fixture for every test here

# Ranks keep weights of their own, residuals and fragments under way; servers keep slices. Tests of
# `sync` show for every strategy, and for the options of AllReduce, that a run goes on from its
# checkpoint with the same bits.
SYNCHRONOUS = {
    "what ranks keep": sparkdl.DiLoCo(
        averaging_period=4, num_fragments=2, overlap_steps=1, compression="threshold"
    ),
    "slices of a server": sparkdl.AsyncSGD(staleness_bound=0),
}
DRIVEN_BY_TIME = {
    "shared weights": sparkdl.Hogwild(),
}


@pytest.fixture(scope="module")
def df(cluster: SparkSession) -> DataFrame:
    return training_rows(cluster)


def under(strategy: Any, *callbacks: faults.Fault, epochs: int = 1, **changes: Any) -> FitRequest:
    wanted = request(*callbacks, checkpoint=CheckpointConfig(interval=4), **changes)
    return replace(wanted, config=replace(wanted.config, sync_strategy=strategy, epochs=epochs))


@pytest.mark.parametrize("kept", SYNCHRONOUS)
def test_synchronous_strategies_end_with_the_same_bits(
    df: DataFrame, tmp_path: Path, kept: str
) -> None:
    from sparkdl.spark.fit.fit import fit

    strategy = SYNCHRONOUS[kept]
    assert strategy.deterministic
    undisturbed = fit(df, under(strategy))
    disturbed = fit(df, under(strategy, faults.KillWorker(str(tmp_path / "struck"), 1, 10)))
    assert disturbed.summary.restarts == 1
    assert digest(disturbed) == digest(undisturbed)


def test_so_do_rounds_with_a_state_on_the_driver(df: DataFrame, tmp_path: Path) -> None:
    from sparkdl.spark.fit.fit import fit

    strategy = sparkdl.BlockMomentum(averaging_period=3)
    undisturbed = fit(df, under(strategy, num_workers=3, execution_mode="rounds"))
    fault = faults.KillWorker(str(tmp_path / "struck"), 1, 5)
    disturbed = fit(df, under(strategy, fault, num_workers=3, execution_mode="rounds"))
    assert (tmp_path / "struck").exists()
    assert disturbed.summary.restarts == 0  # Spark has run the task again
    assert digest(disturbed) == digest(undisturbed)


@pytest.mark.parametrize("kept", DRIVEN_BY_TIME)
def test_strategies_driven_by_time_come_to_their_end(
    cluster: SparkSession, tmp_path: Path, kept: str
) -> None:
    from pyspark.sql import functions as F

    from sparkdl.spark.fit.fit import fit

    # Labels that features tell, unlike those of `training_rows`: the loss falls whoever is first.
    rows = cluster.range(0, 1000, 1, 3)
    label = (F.col("id") % 3).alias("label")
    features = F.array(*[(label == k).cast("float") for k in range(3)]).alias("features")
    df = rows.select(features, label)
    strategy = DRIVEN_BY_TIME[kept]
    assert not strategy.deterministic
    result = fit(df, under(strategy, faults.KillWorker(str(tmp_path / "struck"), 1, 18), epochs=3))
    assert result.summary.restarts == 1
    losses = [record["loss"] for record in result.summary.history]
    assert len(losses) == 3
    assert losses[-1] < 0.9 * losses[0] < math.inf
