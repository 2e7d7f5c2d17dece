from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from sparkdl.spark.daemon import PRELOADED

SCRIPT = """
import gc
import sys
from pyspark.sql import SparkSession

def loaded(batches):
    import pyarrow as pa
    found = "torch" in sys.modules and "sparkdl.train.loop" in sys.modules
    # Spark's machine learning takes most of a second, and a collection of torch's objects 0.2 s.
    found = found and "pyspark.ml" not in sys.modules and gc.get_freeze_count() > 100_000
    for batch in batches:
        yield pa.RecordBatch.from_pydict({"loaded": [found]})

spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.python.daemon.module", "sparkdl.spark.daemon")
    .getOrCreate()
)
print("loaded:", spark.range(1).mapInArrow(loaded, "loaded boolean").first().loaded)
spark.stop()
"""


def test_what_is_preloaded_exists() -> None:
    assert all(importlib.util.find_spec(name) for name in PRELOADED)


@pytest.mark.spark
@pytest.mark.slow
def test_workers_start_with_torch_in_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100
    )
    assert "loaded: True" in done.stdout, done.stderr
