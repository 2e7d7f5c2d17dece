"""Wrong values are refused when the configuration is made, under the Params' names."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from sparkdl.config import CheckpointConfig, EarlyStopping, TrainConfig, direction
from sparkdl.errors import ConfigError
from sparkdl.inference.regression import REGRESSION


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1; received 0"),
        ({"batch_size": 0}, "batchSize must be at least 1; received 0"),
        ({"gradient_accumulation_steps": 0}, "gradientAccumulationSteps must be at least 1"),
        ({"max_steps": 0}, "maxSteps must be at least 1, or -1 for no limit; received 0"),
        ({"max_steps": -2}, "maxSteps must be at least 1, or -1 for no limit; received -2"),
        ({"precision": "fp8"}, "precision must be one of .*; received 'fp8'"),
        ({"memory_format": "nhwc"}, "memoryFormat must be one of .*; received 'nhwc'"),
        ({"device": "tpu"}, "device must be one of .*; received 'tpu'"),
        ({"compile": True, "elasticity": "bits"}, "compile does not go with elasticity='bits'"),
        ({"compile": True, "sync_batch_norm": True}, "compile does not go with syncBatchNorm"),
        ({"learning_rate": 0.0}, "learningRate must be positive; received 0.0"),
        ({"learning_rate": float("nan")}, "learningRate must be positive; received nan"),
        ({"gradient_clip_norm": -1.0}, "gradientClipNorm must be positive; received -1.0"),
        ({"gradient_clip_norm": float("nan")}, "gradientClipNorm must be positive; received nan"),
        (
            {"gradient_accumulation_steps": 5, "batch_size": 4},
            r"gradientAccumulationSteps \(5\) cannot exceed batchSize \(4\)",
        ),
    ],
)
def test_wrong_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patience": 0}, "patience must be at least 1; received 0"),
        ({"mode": "up"}, "mode must be 'auto', 'min' or 'max'; received 'up'"),
        ({"min_delta": -0.1}, "min_delta must not be negative; received -0.1"),
    ],
)
def test_wrong_early_stopping(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EarlyStopping(**changes)


@pytest.mark.parametrize("interval", [0, -2])
def test_wrong_checkpoint_interval(interval: int) -> None:
    with pytest.raises(ConfigError, match=f"checkpointInterval .* received {interval}"):
        CheckpointConfig(interval=interval)


def test_a_checkpoint_must_be_kept() -> None:
    with pytest.raises(ConfigError, match="keep must be at least 1; received 0"):
        CheckpointConfig(keep=0)


def test_limits_are_allowed() -> None:
    config = TrainConfig(
        max_steps=-1,
        gradient_accumulation_steps=4,
        batch_size=4,
        checkpoint=CheckpointConfig(interval=-1),
        early_stopping=EarlyStopping(patience=1, mode="max"),
    )
    assert config.checkpoint.interval == -1


def test_a_configuration_is_frozen_and_travels() -> None:
    config = TrainConfig(task=REGRESSION, optimizer_params={"momentum": 0.9})
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(FrozenInstanceError):
        config.epochs = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("monitor", "expected"),
    [
        ("loss", "min"),
        ("val_loss", "min"),
        ("val_rmse", "min"),
        ("val_accuracy", "max"),
        ("accuracy", "max"),
        ("val_f1_colour", "max"),  # of the label "colour"
        ("val_acc", "max"),
        ("val_accuracyless", "min"),
    ],
)
def test_what_is_better_follows_from_the_name(monitor: str, expected: str) -> None:
    assert EarlyStopping(monitor=monitor).direction == expected
    opposite: Any = {"min": "max", "max": "min"}[expected]
    assert EarlyStopping(monitor=monitor, mode=opposite).direction == opposite


def test_every_metric_by_name_has_a_direction() -> None:
    """The lists stand apart: values are checked without torch."""
    from sparkdl.train.objective.named_metrics import OF_CLASSES, OF_NUMBERS

    errors = {"mae", "mape", "mse", "rmse"}
    for name in (*OF_CLASSES, *OF_NUMBERS):
        assert direction(f"val_{name}", "auto") == ("min" if name in errors else "max")
