"""A stand-in for lightning, and what the blocks of docs/training_steps.md must reach."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from pyspark.sql import SparkSession
from torch import nn


class LightningModule(nn.Module):
    """Lightning's takes long to import; sparkdl asks for methods only."""

    log: Any


_PATCH = pytest.MonkeyPatch()


def prepare(spark: SparkSession) -> None:
    lightning = ModuleType("lightning")
    lightning.LightningModule = LightningModule  # type: ignore[attr-defined]
    _PATCH.setitem(sys.modules, "lightning", lightning)


def check(names: dict[str, Any]) -> None:
    _PATCH.undo()
    assert names["made"].shape == (1000, 2)
    record = names["model"].summary.history[-1]
    assert 0 < record["train_accuracy"] <= 1
    assert record["val_loss"] > 0
