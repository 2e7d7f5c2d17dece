"""Models load that earlier versions have saved: every format that there was, for ever.

``tests/golden/format-N`` was written when N was the newest format: a described module with a
summary, one that a factory makes, an exported program, and an estimator. Never write these files
anew; when the format changes, add a folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from sparkdl.serialization.initial_weights import InitialWeights, load_initial_weights
from sparkdl.serialization.load import load_module, load_signature
from sparkdl.serialization.saved_module import VERSION
from sparkdl.spark.params import stage_metadata
from tests.describable import NeedsWidth

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GOLDEN = Path(__file__).parent / "golden"
FORMATS = sorted(GOLDEN.iterdir())
X = torch.linspace(-1, 1, 6).reshape(2, 3)

formats = pytest.mark.parametrize("folder", FORMATS, ids=lambda folder: folder.name)


def filled(module: nn.Module) -> nn.Module:
    """With the weights that were saved."""
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 8 - i)
    return module.eval()


def described() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    norm: Any = module[1]
    norm.running_mean.copy_(torch.arange(4.0))
    return filled(module)


def program() -> nn.Module:
    return nn.Sequential(filled(nn.Linear(3, 2)), nn.Tanh())


EXPECTED = {"described": described, "factory": lambda: filled(NeedsWidth(5)), "program": program}


def test_every_format_has_a_folder() -> None:
    newest = max(VERSION, stage_metadata.FORMAT)
    assert [folder.name for folder in FORMATS] == [f"format-{n}" for n in range(1, newest + 1)]


@formats
@pytest.mark.parametrize("name", EXPECTED)
def test_modules_load_without_spark(folder: Path, name: str) -> None:
    module = load_module(folder / name)
    torch.testing.assert_close(module(X), EXPECTED[name]()(X))
    signature = load_signature(folder / name)
    assert [(c.name, c.dtype, c.shape) for c in signature.inputs] == [("x", "float32", (3,))]
    assert signature.num_classes == (2 if name == "described" else None)


@formats
def test_their_weights_can_be_started_from(folder: Path) -> None:
    module = NeedsWidth(5)
    load_initial_weights(module, InitialWeights(source=folder / "factory"))
    torch.testing.assert_close(module(X), EXPECTED["factory"]()(X))


@formats
@pytest.mark.spark
def test_models_load_with_spark(spark: SparkSession, folder: Path) -> None:
    from sparkdl.model import TorchClassifierModel, TorchModel

    model = TorchClassifierModel.load(str(folder / "described"))
    assert model.getProbabilityCol() == "p" and model.numClasses == 2
    assert model.summary.history == [{"epoch": 1, "loss": 0.5}] and model.summary.restarts == 1
    torch.testing.assert_close(model.module(X), described()(X))
    for name in ("factory", "program"):
        loaded = TorchModel.load(str(folder / name))
        torch.testing.assert_close(loaded.module(X), EXPECTED[name]()(X))


@formats
@pytest.mark.spark
def test_estimators_load_with_spark(spark: SparkSession, folder: Path) -> None:
    from sparkdl.config import EarlyStopping
    from sparkdl.estimator import TorchClassifier

    estimator = TorchClassifier.load(str(folder / "estimator"))
    assert estimator.getLoss() is nn.CrossEntropyLoss and estimator.getEpochs() == 3
    assert estimator.getEarlyStopping() == EarlyStopping(patience=2, mode="min")
    assert estimator.getOptimizerParams() == {"betas": (0.8, 0.9)}
    torch.testing.assert_close(estimator.getModule()[0].weight, filled(nn.Linear(3, 2)).weight)
