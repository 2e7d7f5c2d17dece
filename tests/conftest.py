"""What do all tests share? Settings that must be made before torch or Spark is imported."""

from __future__ import annotations

import os
import sys

# Ranks of one test share few cores; with more threads they would only wait for each other.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
# Otherwise Spark's workers run the first python3 of the PATH.
os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
