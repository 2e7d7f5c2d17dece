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
    from sparkdl.compress.base import Compression
    from sparkdl.compress.cast import BF16Compression, FP16Compression
    from sparkdl.compress.int8 import Int8Compression
    from sparkdl.compress.onebit import OneBitCompression
    from sparkdl.compress.powersgd import PowerSGD
    from sparkdl.compress.threshold import ThresholdCompression
    from sparkdl.compress.topk import TopKCompression
    from sparkdl.compress.twobit import TwoBitCompression
    from sparkdl.config import CheckpointConfig, EarlyStopping
    from sparkdl.data.dataset import DatasetShard, DatasetSource
    from sparkdl.data.parquet import ParquetSource
    from sparkdl.data.petastorm import PetastormSource
    from sparkdl.errors import (
        CheckpointError,
        ClusterError,
        ConfigError,
        DataError,
        SparkDLError,
        StorageError,
        TrainingDiverged,
        TrainingFailed,
        WorkerError,
    )
    from sparkdl.estimator import TorchClassifier, TorchEstimator, TorchRegressor
    from sparkdl.initialweights import InitialWeights
    from sparkdl.inputs import Image, Sequence, Sparse, Tensor
    from sparkdl.listeners import Listener, RunListener, RunStart
    from sparkdl.mlflow import MLflow
    from sparkdl.model import TorchClassifierModel, TorchModel, TorchRegressorModel
    from sparkdl.onnxfile import export_onnx
    from sparkdl.outputs import Output
    from sparkdl.runcontext import Context, context
    from sparkdl.runner import TorchRunner
    from sparkdl.saved import ModelSignature, load_module, load_signature
    from sparkdl.sync.adasum import Adasum
    from sparkdl.sync.allreduce import AllReduce
    from sparkdl.sync.async_sgd import AsyncSGD
    from sparkdl.sync.base import SyncStrategy
    from sparkdl.sync.block_momentum import BlockMomentum
    from sparkdl.sync.diloco import DiLoCo
    from sparkdl.sync.elastic_averaging import ElasticAveraging
    from sparkdl.sync.gossip import Gossip
    from sparkdl.sync.hogwild import Hogwild
    from sparkdl.sync.local_sgd import LocalSGD
    from sparkdl.sync.one_shot_averaging import OneShotAveraging
    from sparkdl.sync.parameter_averaging import ParameterAveraging
    from sparkdl.sync.population_based import PopulationBasedTraining
    from sparkdl.sync.slowmo import SlowMo
    from sparkdl.sync.tournament import Tournament
    from sparkdl.tensorboard import TensorBoard
    from sparkdl.train.callbacks import Callback
    from sparkdl.train.large_batch import LAMB, LARS
    from sparkdl.train.warmup import warmup

__version__ = "0.1.0.dev0"

_MODULE_OF = {
    "Adasum": "sparkdl.sync.adasum",
    "AllReduce": "sparkdl.sync.allreduce",
    "AsyncSGD": "sparkdl.sync.async_sgd",
    "BF16Compression": "sparkdl.compress.cast",
    "BlockMomentum": "sparkdl.sync.block_momentum",
    "Callback": "sparkdl.train.callbacks",
    "CheckpointConfig": "sparkdl.config",
    "CheckpointError": "sparkdl.errors",
    "ClusterError": "sparkdl.errors",
    "Compression": "sparkdl.compress.base",
    "ConfigError": "sparkdl.errors",
    "Context": "sparkdl.runcontext",
    "DataError": "sparkdl.errors",
    "DatasetShard": "sparkdl.data.dataset",
    "DatasetSource": "sparkdl.data.dataset",
    "DiLoCo": "sparkdl.sync.diloco",
    "EarlyStopping": "sparkdl.config",
    "ElasticAveraging": "sparkdl.sync.elastic_averaging",
    "FP16Compression": "sparkdl.compress.cast",
    "Gossip": "sparkdl.sync.gossip",
    "Hogwild": "sparkdl.sync.hogwild",
    "Image": "sparkdl.inputs",
    "InitialWeights": "sparkdl.initialweights",
    "Int8Compression": "sparkdl.compress.int8",
    "LAMB": "sparkdl.train.large_batch",
    "LARS": "sparkdl.train.large_batch",
    "Listener": "sparkdl.listeners",
    "LocalSGD": "sparkdl.sync.local_sgd",
    "MLflow": "sparkdl.mlflow",
    "ModelSignature": "sparkdl.saved",
    "OneBitCompression": "sparkdl.compress.onebit",
    "OneShotAveraging": "sparkdl.sync.one_shot_averaging",
    "Output": "sparkdl.outputs",
    "ParameterAveraging": "sparkdl.sync.parameter_averaging",
    "ParquetSource": "sparkdl.data.parquet",
    "PetastormSource": "sparkdl.data.petastorm",
    "PopulationBasedTraining": "sparkdl.sync.population_based",
    "PowerSGD": "sparkdl.compress.powersgd",
    "RunListener": "sparkdl.listeners",
    "RunStart": "sparkdl.listeners",
    "Sequence": "sparkdl.inputs",
    "SlowMo": "sparkdl.sync.slowmo",
    "SparkDLError": "sparkdl.errors",
    "Sparse": "sparkdl.inputs",
    "StorageError": "sparkdl.errors",
    "SyncStrategy": "sparkdl.sync.base",
    "Tensor": "sparkdl.inputs",
    "TensorBoard": "sparkdl.tensorboard",
    "ThresholdCompression": "sparkdl.compress.threshold",
    "TopKCompression": "sparkdl.compress.topk",
    "TorchClassifier": "sparkdl.estimator",
    "TorchClassifierModel": "sparkdl.model",
    "TorchEstimator": "sparkdl.estimator",
    "TorchModel": "sparkdl.model",
    "TorchRegressor": "sparkdl.estimator",
    "TorchRegressorModel": "sparkdl.model",
    "TorchRunner": "sparkdl.runner",
    "Tournament": "sparkdl.sync.tournament",
    "TrainingDiverged": "sparkdl.errors",
    "TrainingFailed": "sparkdl.errors",
    "TwoBitCompression": "sparkdl.compress.twobit",
    "WorkerError": "sparkdl.errors",
    "context": "sparkdl.runcontext",
    "export_onnx": "sparkdl.onnxfile",
    "load_module": "sparkdl.saved",
    "load_signature": "sparkdl.saved",
    "warmup": "sparkdl.train.warmup",
}

__all__ = [
    "LAMB",
    "LARS",
    "Adasum",
    "AllReduce",
    "AsyncSGD",
    "BF16Compression",
    "BlockMomentum",
    "Callback",
    "CheckpointConfig",
    "CheckpointError",
    "ClusterError",
    "Compression",
    "ConfigError",
    "Context",
    "DataError",
    "DatasetShard",
    "DatasetSource",
    "DiLoCo",
    "EarlyStopping",
    "ElasticAveraging",
    "FP16Compression",
    "Gossip",
    "Hogwild",
    "Image",
    "InitialWeights",
    "Int8Compression",
    "Listener",
    "LocalSGD",
    "MLflow",
    "ModelSignature",
    "OneBitCompression",
    "OneShotAveraging",
    "Output",
    "ParameterAveraging",
    "ParquetSource",
    "PetastormSource",
    "PopulationBasedTraining",
    "PowerSGD",
    "RunListener",
    "RunStart",
    "Sequence",
    "SlowMo",
    "SparkDLError",
    "Sparse",
    "StorageError",
    "SyncStrategy",
    "Tensor",
    "TensorBoard",
    "ThresholdCompression",
    "TopKCompression",
    "TorchClassifier",
    "TorchClassifierModel",
    "TorchEstimator",
    "TorchModel",
    "TorchRegressor",
    "TorchRegressorModel",
    "TorchRunner",
    "Tournament",
    "TrainingDiverged",
    "TrainingFailed",
    "TwoBitCompression",
    "WorkerError",
    "__version__",
    "context",
    "export_onnx",
    "load_module",
    "load_signature",
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
