"""Requests of a classifier with one feature column, for tests of their checks."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.spark.run.run import FitRequest
from sparkdl.sync.gradients.allreduce import AllReduce

CONFIG = {field.name for field in fields(TrainConfig)}


def config(**options: Any) -> TrainConfig:
    task = options.setdefault("task", CLASSIFICATION)
    return TrainConfig(
        **{
            "loss": "cross_entropy" if task == CLASSIFICATION else "mse",
            "seed": 3,
            "sync_strategy": AllReduce(),
            **options,
        }
    )


def request(module: Any = None, **changes: Any) -> FitRequest:
    values: dict[str, Any] = {
        "module": module if module is not None else nn.Linear(4, 3),
        "config": config(**{name: changes.pop(name) for name in CONFIG & changes.keys()}),
        "feature_cols": ("x",), "input_shapes": (None,), "label_col": "y", "weight_col": None,
        "validation_col": None, "num_workers": None, "max_restarts": 0, "verbose": 0,
        "cpus_per_worker": None, "gpus_per_worker": None,
    }  # fmt: skip
    return FitRequest(**{**values, **changes})
