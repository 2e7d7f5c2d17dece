"""What a trial's estimator has besides the values that are tried."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from sparkdl import EarlyStopping, TorchRegressor, Tournament
from sparkdl.train.training_state import TrainingMethod, TrainingState
from sparkdl.tuning.search import PlannedTrial
from sparkdl.tuning.study import StudyOptions
from sparkdl.tuning.tune import epochs_before, trial_estimator

ATTEMPT = PlannedTrial(number=3, name="mine-3", folder="trial-00001", values={})


def made(params: dict[str, Any], **options: Any) -> TorchRegressor:
    given = TorchRegressor(module=nn.Identity, epochs=2, **params)
    return trial_estimator(given, ATTEMPT, StudyOptions(name="mine", **options))


def test_it_ends_with_the_weights_of_the_best_of_all_epochs() -> None:
    stopping = made({}, monitors=("val_r2",), modes=("max",)).getEarlyStopping()
    assert (stopping.monitor, stopping.mode, stopping.restore_best) == ("val_r2", "max", True)
    assert stopping.patience > 10**6  # it restores, and stops nothing


@pytest.mark.parametrize(
    ("params", "options"),
    [
        ({}, {"monitors": ("seconds",)}),
        ({}, {"monitors": ("val_loss", "loss"), "modes": ("min", "min")}),
        ({"syncStrategy": Tournament()}, {}),
    ],
)
def test_it_ends_with_the_last_weights_where_no_epoch_is_the_best(
    params: dict[str, Any], options: dict[str, Any]
) -> None:
    assert made(params, **options).getEarlyStopping() is None


def test_what_the_user_has_set_stays() -> None:
    own = EarlyStopping(monitor="loss", patience=1)
    assert made({"earlyStopping": own}).getEarlyStopping() == own
    assert made({"verbose": 2}).getVerbose() == 2


def test_trials_have_folders_for_checkpoints_and_show_nothing_themselves() -> None:
    found = made({"checkpointDir": "runs/"})
    assert found.getCheckpointDir() == "runs/trial-00001"  # of the trial that it repeats
    assert found.getVerbose() == 0
    assert made({}).getCheckpointDir() is None


def test_epochs_of_an_earlier_fit_are_known() -> None:
    method = TrainingMethod(
        mode="gang", strategy="", optimizer="", scheduler=None, trained=(), options=()
    )
    state = TrainingState(epoch=2, step=8, rows_seen=64, method=method, parts={})
    earlier = SimpleNamespace(trainingState=state, module=nn.Identity())
    assert epochs_before(made({"initialState": earlier})) == 2
    assert epochs_before(made({})) == 0
