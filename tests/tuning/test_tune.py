"""`tune` with real fits on Spark."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
import pytest
from torch import nn

import sparkdl
from sparkdl import Range, TorchRegressor, TuneResult, tune
from sparkdl.errors import ConfigError, TrainingFailed
from sparkdl.spark.frames.shard_table import ShardTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.timeout(400)]


class Line(nn.Sequential):
    """A line; only one width fits."""

    def __init__(self, width: int = 3) -> None:
        super().__init__(nn.Linear(width, 1))


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    from pyspark.sql import functions as F

    x = F.array(*[((F.col("id") * k) % 7 - 3).cast("float") for k in (1, 2, 3)])
    frame = spark.range(0, 120, 1, 2).select(x.alias("features"), (x[0] - x[2]).alias("label"))
    return frame.withColumn("held_out", F.rand(3) < 0.3).cache()


@pytest.fixture(scope="module")
def regressor() -> TorchRegressor:
    return TorchRegressor(
        module=Line, epochs=2, batchSize=16, numWorkers=1, seed=2, optimizer="sgd",
        validationIndicatorCol="held_out",
    )  # fmt: skip


@dataclasses.dataclass
class Searched:
    result: TuneResult[TorchRegressor]
    tables: set[int]
    path: Path
    printed: str


@pytest.fixture(scope="module")
def searched(
    rows: DataFrame, regressor: TorchRegressor, tmp_path_factory: pytest.TempPathFactory
) -> Searched:
    """Eight trials, two at a time; one width fails, and some rates are worse than others."""
    tables: set[int] = set()
    path = tmp_path_factory.mktemp("search")
    collect, lines = ShardTable.collect, []

    def counted(self: ShardTable) -> Any:
        tables.add(id(self))
        return collect(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardTable, "collect", counted)
        patch.setattr("sparkdl.tuning.trial_table.say", lines.append)
        result = tune(
            regressor,
            {
                "learningRate": Range(1e-4, 0.2, log=True),
                "optimizerParams.momentum": [0.0, 0.5],
                "module.width": [3, 5],
            },
            rows,
            trials=8, parallel=2, seed=4, storage=path / "study.log",
        )  # fmt: skip
    return Searched(result=result, tables=tables, path=path, printed="\n".join(lines))


def test_trials_share_a_spool_and_the_best_one_is_given(
    searched: Searched, rows: DataFrame
) -> None:
    result = searched.result
    assert len(searched.tables) == 1
    table = result.trials
    assert len(table) == 8
    assert set(table["state"]) >= {"complete", "pruned", "failed"}
    assert table["name"].tolist() == [f"tune-{number}" for number in table["number"]]
    complete = table[table["state"] == "complete"]
    assert result.best_value == complete["val_loss"].min()
    assert result.best_params["module.width"] == 3
    failed = table[table["state"] == "failed"]
    assert all("cannot take the features" in error for error in failed["error"])
    assert set(table[table["state"] == "pruned"]["epochs"]) <= {1}
    assert result.study.best_value == result.best_value


def test_the_best_model_has_the_weights_that_were_judged(
    searched: Searched, rows: DataFrame
) -> None:
    result = searched.result
    assert list(result.models) == [result.best.number]
    held_out = rows.filter("held_out")
    loss = result.best_model.evaluate(held_out).to_dict()["loss"]
    assert loss == pytest.approx(result.best_value, rel=1e-4)
    estimator = result.best_estimator
    assert estimator.getLearningRate() == result.best_params["learningRate"]
    assert estimator.getEarlyStopping() is None  # the trials' own settings are not the user's
    assert f"trial {result.best.number}: val_loss" in repr(result)
    assert "<table" in result._repr_html_()
    assert "best so far" in searched.printed


def test_a_search_goes_on_from_its_storage(
    searched: Searched, rows: DataFrame, regressor: TorchRegressor
) -> None:
    space = {
        "learningRate": Range(1e-4, 0.2, log=True),
        "optimizerParams.momentum": [0.0, 0.5],
        "module.width": [3, 5],
    }
    storage = searched.path / "study.log"
    again = tune(regressor, space, rows, trials=8, storage=storage)
    assert again.best_params == searched.result.best_params
    with pytest.raises(ConfigError, match=r"earlier search.*fit its estimator again"):
        _ = again.best_model
    with pytest.raises(ConfigError, match="begun with another mode"):
        tune(regressor, space, rows, mode="max", storage=storage)
    with pytest.raises(ConfigError, match="begun with other rows"):
        tune(regressor, space, rows.limit(60), trials=8, storage=storage)
    with pytest.raises(ConfigError, match=r"begun with another epochs \(2, now 3\)"):
        tune(regressor.copy().setEpochs(3), space, rows, trials=8, storage=storage)


@pytest.mark.slow
def test_several_values_and_kept_models(
    rows: DataFrame, regressor: TorchRegressor, tmp_path: Path
) -> None:
    def space(trial: Any) -> dict[str, Any]:
        values: dict[str, Any] = {"optimizer": trial.suggest_categorical("kind", ["sgd", "adam"])}
        if values["optimizer"] == "sgd":
            values["optimizerParams.momentum"] = trial.suggest_float("momentum", 0.1, 0.9)
        return values

    options: Any = {
        "monitor": ["val_loss", "loss"], "trials": 3, "path": str(tmp_path), "name": "several"
    }  # fmt: skip
    result = tune(regressor, space, rows, **options)
    assert 1 <= len(result.front) <= 3
    with pytest.raises(ConfigError, match=r"choose one of result\.front"):
        _ = result.best_model
    again = tune(regressor, space, rows, **options)  # nothing is left to be done
    assert again.models == {}
    first = again.front[0]
    assert first.model.evaluate(rows).to_dict()["loss"] > 0
    assert first.estimator.getOptimizer() == first.params["optimizer"]
    assert (tmp_path / "study.png").exists()


@pytest.mark.slow
def test_rounds_search_as_a_gang_does(rows: DataFrame, regressor: TorchRegressor) -> None:
    own = regressor.copy()
    own.setSyncStrategy(sparkdl.ParameterAveraging(averaging_period=2)).setExecutionMode("rounds")
    result = tune(own, {"syncStrategy.averaging_period": [1, 4]}, rows, trials=2)
    assert set(result.trials["state"]) <= {"complete", "pruned"}


class NotesProcess(sparkdl.Callback):
    """Writes down the process of each rank that begins."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_begin(self, state: sparkdl.CallbackState) -> None:
        with Path(self.path).open("a") as file:
            file.write(f"{os.getpid()}\n")


class PrunesTheFirst(optuna.pruners.BasePruner):
    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        return trial.number == 0


@pytest.mark.slow
def test_a_pruned_trial_leaves_its_processes_to_the_next(
    rows: DataFrame, regressor: TorchRegressor, tmp_path: Path
) -> None:
    noted = tmp_path / "processes"
    own = regressor.copy().setNumWorkers(2).setEpochs(400)
    own.setCallbacks([NotesProcess(str(noted))])
    space = {"learningRate": [0.01, 0.02]}
    found = tune(own, space, rows, trials=2, pruner=PrunesTheFirst(), parallel=1)
    assert list(found.trials["state"]) == ["pruned", "complete"]
    assert found.trials["epochs"][0] < 400
    first, second = (set(noted.read_text().split()[begin : begin + 2]) for begin in (0, 2))
    assert first == second
    assert len(first) == 2


def test_what_is_wrong_is_found_before_any_trial(
    rows: DataFrame, regressor: TorchRegressor
) -> None:
    with pytest.raises(ConfigError, match="did you mean 'learningRate'"):
        tune(regressor, {"lerningRate": [0.1]}, rows)
    with pytest.raises(ConfigError, match="did you mean 'learningRate'"):
        tune(regressor, lambda trial: {"lerningRate": 0.1}, rows)
    with pytest.raises(ConfigError, match=r"needs validation rows.*validationIndicatorCol"):
        tune(TorchRegressor(module=Line), {"epochs": [1]}, rows)
    with pytest.raises(ConfigError, match="fit takes a DataFrame"):
        tune(regressor, {"epochs": [1]}, [3])  # type: ignore[arg-type]


def test_a_search_in_which_nothing_works_says_why(
    rows: DataFrame, regressor: TorchRegressor
) -> None:
    with pytest.raises(TrainingFailed, match=r"none of 1 trials.*cannot take the features"):
        tune(regressor, {"module.width": [5]}, rows, trials=1)
