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
from tests.cluster.test_populations_recovery import CASES as POPULATIONS
from tests.cluster.test_recovery import digest, nothing_is_left, request, training_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.spark.run.run import FitRequest

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow, pytest.mark.timeout(300)]

__all__ = ["nothing_is_left"]  # a fixture for every test here

# One of each kind of state that a strategy keeps; tests/sync shows for every strategy that a run
# goes on from its checkpoint with the same bits.
SYNCHRONOUS = {
    "residuals": sparkdl.AllReduce(compression="threshold"),
    "a pending gradient": sparkdl.AllReduce(double_buffering=True),
    "outer momentum": sparkdl.BlockMomentum(averaging_period=3),
    "weights of one's own": sparkdl.Gossip(probability=0.5),
    "fragments under way": sparkdl.DiLoCo(averaging_period=4, num_fragments=2, overlap_steps=1),
    "slices of a server": sparkdl.AsyncSGD(staleness_bound=0),
}
# The others, whose kind of state is among these; one epoch is enough.
ALIKE = {
    "warmed up": sparkdl.LocalSGD(averaging_period=3, warmup_steps=2),
    "averaged in a gang": sparkdl.ParameterAveraging(averaging_period=3),
    "slow momentum": sparkdl.SlowMo(averaging_period=3),
    "adaptive sum": sparkdl.Adasum(averaging_period=3),
    "elastic": sparkdl.ElasticAveraging(averaging_period=3),
}
IN_ROUNDS = {
    "outer momentum": sparkdl.BlockMomentum(averaging_period=3),
    "slow momentum": sparkdl.SlowMo(averaging_period=3),
}
DRIVEN_BY_TIME = {
    "bounded staleness": sparkdl.AsyncSGD(staleness_bound=2),
    "shared weights": sparkdl.Hogwild(),
}


@pytest.fixture(scope="module")
def df(cluster: SparkSession) -> DataFrame:
    return training_rows(cluster)


def under(strategy: Any, *callbacks: faults.Fault, epochs: int = 3, **changes: Any) -> FitRequest:
    wanted = request(*callbacks, checkpoint=CheckpointConfig(interval=4), **changes)
    return replace(wanted, config=replace(wanted.config, sync_strategy=strategy, epochs=epochs))


def test_every_strategy_is_tried() -> None:
    """Populations are in their own file."""
    named = {name: getattr(sparkdl, name) for name in sparkdl.__all__}
    known = {
        one
        for one in named.values()
        if isinstance(one, type) and issubclass(one, sparkdl.SyncStrategy)
    }
    dicts = (SYNCHRONOUS, ALIKE, IN_ROUNDS, DRIVEN_BY_TIME)
    tried = {type(strategy) for each in dicts for strategy in each.values()}
    tried |= {type(strategy) for strategy, _ in POPULATIONS.values()}
    assert known - {sparkdl.SyncStrategy} == tried


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


@pytest.mark.parametrize("kept", ALIKE)
def test_so_do_those_that_are_alike(df: DataFrame, tmp_path: Path, kept: str) -> None:
    from sparkdl.spark.fit.fit import fit

    strategy = ALIKE[kept]
    undisturbed = fit(df, under(strategy, epochs=1, execution_mode="gang"))
    fault = faults.KillWorker(str(tmp_path / "struck"), 1, 10)
    disturbed = fit(df, under(strategy, fault, epochs=1, execution_mode="gang"))
    assert disturbed.summary.restarts == 1
    assert digest(disturbed) == digest(undisturbed)


@pytest.mark.parametrize("kept", IN_ROUNDS)
def test_so_do_rounds_with_a_state_on_the_driver(df: DataFrame, tmp_path: Path, kept: str) -> None:
    from sparkdl.spark.fit.fit import fit

    strategy = IN_ROUNDS[kept]
    undisturbed = fit(df, under(strategy, epochs=1, num_workers=3, execution_mode="rounds"))
    fault = faults.KillWorker(str(tmp_path / "struck"), 1, 5)
    disturbed = fit(df, under(strategy, fault, epochs=1, num_workers=3, execution_mode="rounds"))
    assert (tmp_path / "struck").exists()
    assert disturbed.summary.restarts == 0  # Spark has run the task again
    assert digest(disturbed) == digest(undisturbed)


@pytest.mark.parametrize("kept", DRIVEN_BY_TIME)
def test_strategies_driven_by_time_come_to_their_end(
    df: DataFrame, tmp_path: Path, kept: str
) -> None:
    from sparkdl.spark.fit.fit import fit

    strategy = DRIVEN_BY_TIME[kept]
    assert not strategy.deterministic
    result = fit(df, under(strategy, faults.KillWorker(str(tmp_path / "struck"), 1, 18)))
    assert result.summary.restarts == 1
    losses = [record["loss"] for record in result.summary.history]
    assert len(losses) == 3
    assert losses[-1] < losses[0] < math.inf
