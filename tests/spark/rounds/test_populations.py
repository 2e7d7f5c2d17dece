"""Populations as a whole: the best is the result, bits repeat, runs go on where they stopped."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torchmetrics
from torch import nn

from sparkdl.config import CheckpointConfig, EarlyStopping
from sparkdl.errors import CheckpointError, ConfigError, DataError, TrainingDiverged
from sparkdl.inference.regression import REGRESSION
from sparkdl.spark.fit.check_request import choose_mode
from sparkdl.spark.fit.fit import fit
from sparkdl.spark.run.run import FitRequest, FitResult
from sparkdl.sync.population.one_shot_averaging import OneShotAveraging
from sparkdl.sync.population.population import PopulationStrategy
from sparkdl.sync.population.population_based_training import PopulationBasedTraining
from sparkdl.sync.population.ranges import Range
from sparkdl.sync.population.tournament import Tournament
from tests.spark.rounds import test_averaging_rounds
from tests.spark.rounds.test_averaging_rounds import Note, assert_about_equal, equal, request

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.timeout(400)]

df = test_averaging_rounds.df

TOURNAMENT = Tournament(period=2)
BASED = PopulationBasedTraining(period=2)


def wanted(strategy: PopulationStrategy, **changes: Any) -> FitRequest:
    metrics = {"accuracy": torchmetrics.classification.MulticlassAccuracy(3, average="micro")}
    values = {
        "sync_strategy": strategy, "num_workers": 3, "validation_col": "held_out",
        "batch_size": 16, "metrics": metrics,
    }  # fmt: skip
    return request(**{**values, **changes})


def records(result: FitResult) -> list[dict[str, float]]:
    """History and population, without what the clock says."""
    both = [*result.summary.history, *result.summary.population]
    return [{k: v for k, v in record.items() if k != "seconds"} for record in both]


@pytest.fixture(scope="module")
def tournament(df: DataFrame) -> FitResult:
    """Two epochs of three steps, so that periods and epochs do not end together."""
    return fit(df, wanted(TOURNAMENT))


@pytest.fixture(scope="module")
def based(df: DataFrame) -> FitResult:
    return fit(df, wanted(BASED))


@pytest.mark.slow
def test_the_best_member_is_the_result(
    df: DataFrame, tournament: FitResult, based: FitResult
) -> None:
    for result in (tournament, based):
        last, step = result.summary.history[-1], result.summary.steps
        assert {note["step"] for note in result.summary.population} == {2, 3, 4, 6}
        members = [note for note in result.summary.population if note["step"] == step]
        assert [note["member"] for note in members] == [0, 1, 2]
        losses = [note["val_loss"] for note in members]
        assert last["val_loss"] == min(losses) == losses[int(last["best_member"])]
        assert last["val_loss_spread"] == max(losses) - min(losses) > 0
        loss, accuracy = measured(result.module, df)
        assert loss == pytest.approx(last["val_loss"], abs=1e-12)
        assert accuracy == pytest.approx(last["val_accuracy"])


@pytest.mark.slow
def test_a_population_goes_on_where_it_stopped_also_without_the_drivers_channel(
    df: DataFrame, spark: SparkSession, tmp_path: Path, based: FitResult
) -> None:
    checkpoint = CheckpointConfig(directory=str(tmp_path), interval=2)
    stopped = fit(df, wanted(BASED, checkpoint=checkpoint, max_steps=4))
    assert stopped.summary.steps == 4
    with pytest.raises(CheckpointError, match=r"a population of 3, and there are 2 .* numW"):
        fit(df, wanted(BASED, checkpoint=checkpoint, num_workers=2))
    spark.conf.set("spark.sparkdl.channel", "workers")
    try:
        resumed = fit(df, wanted(BASED, checkpoint=checkpoint))
    finally:
        spark.conf.unset("spark.sparkdl.channel")
    assert equal(based, resumed)
    # The stopped run was measured at its end.
    mine, theirs = ([n for n in records(run) if n.get("step") != 4] for run in (resumed, based))
    assert mine == theirs


@pytest.mark.slow
def test_one_shot_averaging_is_that_of_a_gang_and_goes_on_where_it_stopped(
    df: DataFrame, tmp_path: Path
) -> None:
    in_rounds = wanted(OneShotAveraging(), num_workers=2)
    gang = fit(df, dataclasses.replace(in_rounds, execution_mode="gang"))
    checkpoint = CheckpointConfig(directory=str(tmp_path), interval=2)
    kept = wanted(OneShotAveraging(), num_workers=2, checkpoint=checkpoint)
    stop = gang.summary.steps // 2
    config = dataclasses.replace(kept.config, max_steps=stop)
    assert fit(df, dataclasses.replace(kept, config=config)).summary.steps == stop
    resumed = fit(df, kept)
    assert resumed.summary.population == []
    assert_about_equal(resumed, gang)


def measured(module: nn.Module, df: DataFrame) -> tuple[float, float]:
    """Loss and accuracy on the rows that are held out."""
    rows = df.where("held_out").collect()
    features = torch.tensor([row["features"] for row in rows], dtype=torch.float64)
    labels = torch.tensor([row["label"] for row in rows])
    with torch.no_grad():
        output = module(features)
    accuracy = (output.argmax(1) == labels).double().mean().item()
    return nn.functional.cross_entropy(output, labels).item(), accuracy


@pytest.fixture(scope="module")
def line(spark: SparkSession) -> DataFrame:
    from pyspark.sql import functions as F

    features = [((F.col("id") * k) % 19 / 9 - 1).cast("double") for k in (3, 7)]
    rows = spark.range(0, 200, 1, 2).select(F.array(*features).alias("features"))
    return rows.withColumn("label", 2 * F.col("features")[0] - 3 * F.col("features")[1])


def make_line() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(2, 1).double()


def regression(strategy: PopulationStrategy, **changes: Any) -> FitRequest:
    values = {
        "task": REGRESSION, "loss": "mse", "optimizer": "sgd", "module": make_line,
        "sync_strategy": strategy, "num_workers": 4, "batch_size": 5, "epochs": 3,
    }  # fmt: skip
    return request(**{**values, **changes})


@pytest.mark.slow
def test_the_learning_rate_moves_to_where_it_is_good(line: DataFrame) -> None:
    """From far too small on one end to far too large on the other.

    No rows are marked, so some of each shard are set aside.
    """
    strategy = PopulationBasedTraining(
        period=3,
        mutations={"learning_rate": Range(1e-5, 100.0, log=True)},
        holdout_fraction=0.2,
    )
    result = fit(line, regression(strategy, learning_rate=1e-4, epochs=2))
    summary = result.summary
    assert summary.rows + summary.validation_rows == 200
    assert summary.validation_rows == pytest.approx(40, abs=3)
    notes = summary.population
    first, last = notes[:4], notes[-4:]
    assert first[0]["learning_rate"] == 1e-4
    best = min(last, key=lambda note: note["val_loss"])
    assert 0.01 < best["learning_rate"] < 3
    assert result.summary.history[-1]["learning_rate"] == best["learning_rate"]
    assert best["val_loss"] < 0.1 * first[0]["val_loss"]
    copied = {(note["member"], note["donor"]) for note in notes if "donor" in note}
    assert copied
    assert all(member != donor for member, donor in copied)
    for member in range(4):  # each in turn on all shards
        mine = [note["shard"] for note in notes if note["member"] == member]
        assert set(mine) == {0, 1, 2, 3}


@pytest.mark.slow
def test_who_diverges_is_replaced(line: DataFrame) -> None:
    strategy = PopulationBasedTraining(
        period=3, mutations={"learning_rate": [0.1, 1e120]}, resample_probability=0.0
    )
    result = fit(line, regression(strategy, learning_rate=0.1, epochs=1))
    notes = result.summary.population
    diverged = [note["member"] for note in notes[:4] if note["has_diverged"]]
    assert diverged
    assert diverged == [note["member"] for note in notes[:4] if note["learning_rate"] > 1]
    assert set(diverged) <= {note["member"] for note in notes[:4] if "donor" in note}
    assert result.summary.history[-1]["loss"] < 20


@pytest.mark.slow
def test_if_all_members_diverge_the_fit_ends(line: DataFrame) -> None:
    strategy = PopulationBasedTraining(period=3, mutations={"learning_rate": [1e60, 1e80]})
    with pytest.raises(TrainingDiverged, match=r"all members: the loss is .* lower the lea"):
        fit(line, regression(strategy, learning_rate=1e70))


@pytest.mark.slow
def test_early_stopping_and_callbacks_see_the_best_member(
    df: DataFrame, tournament: FitResult
) -> None:
    """In a tournament in which losers keep their optimizer."""
    note = Note()
    result = fit(
        df,
        wanted(
            Tournament(period=2, exchange="weights"),
            early_stopping=EarlyStopping(monitor="val_loss", patience=1, min_delta=0.1),
            callbacks=(note,),
            epochs=30,
        ),
    )
    history = result.summary.history
    assert 1 < len(history) < 30
    assert [name for name, _ in note.seen] == ["begin", *["epoch"] * len(history), "end"]
    loss, _ = measured(result.module, df)
    assert loss == pytest.approx(history[-2]["val_loss"], abs=1e-12)  # the last was no better
    others = tournament.summary.history
    assert history[0]["takeovers"] == others[0]["takeovers"] > 0
    assert history[1]["val_loss"] != others[1]["val_loss"]


@pytest.mark.slow
def test_few_rows_make_few_members(df: DataFrame) -> None:
    plain = lambda: nn.Linear(3, 3).double()  # noqa: E731
    few = wanted(BASED, num_workers=5, module=plain, epochs=1)
    result = fit(df.limit(6), few)
    assert (result.summary.rows, result.summary.validation_rows) == (4, 2)
    members = {note["member"] for note in result.summary.population}
    assert members == set(range(len(members)))
    assert 1 <= len(members) <= 4
    with pytest.raises(DataError, match="none to set aside: every shard has one row at most"):
        fit(
            df.limit(1), wanted(BASED, num_workers=2, module=plain, validation_col=None, metrics={})
        )


def test_modes() -> None:
    for strategy in (TOURNAMENT, BASED, OneShotAveraging()):
        assert choose_mode("auto", strategy) == "rounds"
        assert choose_mode("rounds", strategy) == "rounds"
    assert choose_mode("gang", OneShotAveraging()) == "gang"
    for strategy in (TOURNAMENT, BASED):
        name = type(strategy).__name__
        with pytest.raises(ConfigError, match=f"{name} cannot run with executionMode='gang': its"):
            choose_mode("gang", strategy)
