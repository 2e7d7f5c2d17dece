"""Train and apply PyTorch models on Spark DataFrames.

The public names below are imported when they are first used: ``import sparkdl`` alone imports
neither torch nor pyspark, so that a Spark driver, a worker and a command line each pay only for
what they need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sparkdl.installation import refuse_mixed_installation

if TYPE_CHECKING:
    from sparkdl.config import CheckpointConfig, EarlyStopping
    from sparkdl.errors import (
        CheckpointError,
        ClusterError,
        ConfigError,
        DataError,
        SparkDLError,
        StorageError,
        TrainingFailed,
        WorkerError,
    )
    from sparkdl.estimator import TorchClassifier, TorchEstimator, TorchRegressor
    from sparkdl.model import TorchClassifierModel, TorchModel, TorchRegressorModel
    from sparkdl.sync.allreduce import AllReduce
    from sparkdl.train.callbacks import Callback
    from sparkdl.train.warmup import warmup

__version__ = "0.1.0.dev0"

_MODULE_OF = {
    "AllReduce": "sparkdl.sync.allreduce",
    "Callback": "sparkdl.train.callbacks",
    "CheckpointConfig": "sparkdl.config",
    "CheckpointError": "sparkdl.errors",
    "ClusterError": "sparkdl.errors",
    "ConfigError": "sparkdl.errors",
    "DataError": "sparkdl.errors",
    "EarlyStopping": "sparkdl.config",
    "SparkDLError": "sparkdl.errors",
    "StorageError": "sparkdl.errors",
    "TorchClassifier": "sparkdl.estimator",
    "TorchClassifierModel": "sparkdl.model",
    "TorchEstimator": "sparkdl.estimator",
    "TorchModel": "sparkdl.model",
    "TorchRegressor": "sparkdl.estimator",
    "TorchRegressorModel": "sparkdl.model",
    "TrainingFailed": "sparkdl.errors",
    "WorkerError": "sparkdl.errors",
    "warmup": "sparkdl.train.warmup",
}

__all__ = [
    "AllReduce",
    "Callback",
    "CheckpointConfig",
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "DataError",
    "EarlyStopping",
    "SparkDLError",
    "StorageError",
    "TorchClassifier",
    "TorchClassifierModel",
    "TorchEstimator",
    "TorchModel",
    "TorchRegressor",
    "TorchRegressorModel",
    "TrainingFailed",
    "WorkerError",
    "__version__",
    "warmup",
]

refuse_mixed_installation(__file__)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'sparkdl' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
