"""One kernel with a Spark session for all tests but those of the notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebooks.kernels import SESSION, Kernel, started_kernel

PREPARE = """
import hashlib, time
from pathlib import Path
from pyspark.sql import functions as F
from torch import nn
from sparkdl import Callback, ParameterAveraging, TorchClassifier

spark.sparkContext.setLogLevel("ERROR")
features = [((F.col("id") * k) % 7 - 3).cast("float") for k in (1, 2, 3)]
df = spark.range(0, 120, 1, 3).select(
    F.array(*features).alias("features"), (F.col("id") % 3).alias("label")
)

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))

def classifier(**params):
    return TorchClassifier(
        module=Net, batchSize=16, seed=7, **{"epochs": 2, "numWorkers": 2, **params}
    )

def digest(model):
    state = model.module.state_dict()
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values())).hexdigest()
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the kernel runs."""
    return tmp_path_factory.mktemp("kernel")


@pytest.fixture(scope="session")
def kernel(folder: Path) -> Iterator[Kernel]:
    """With ``spark``, ``df``, ``classifier`` and ``digest``."""
    with started_kernel(folder) as kernel:
        kernel.value(SESSION)
        kernel.value(PREPARE)
        yield kernel
