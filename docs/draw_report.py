"""Draws docs/report.png: the report of a fit on digits, one of whose workers is lost.

Run it by ``make picture``; it needs a Chromium, see ``.ci/get_chromium.sh``.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

from sparkdl import Callback, CallbackState, TorchClassifier
from sparkdl.models.demo import DigitsNet
from tests.browser import screenshot

PICTURE = Path(__file__).with_name("report.png")
LOST_AT_STEP = 350


class LoseRank1(Callback):
    """Kills the process of rank 1, unless training goes on from a checkpoint."""

    def on_train_begin(self, state: CallbackState) -> None:
        self.is_first = state.step == 0

    def on_step_end(self, state: CallbackState) -> None:
        if self.is_first and state.rank == 1 and state.step == LOST_AT_STEP:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Fit, and leave a picture of the report."""
    digits = load_digits()
    rows = [(x.tolist(), int(y)) for x, y in zip(digits.data, digits.target, strict=True)]
    daemon = "spark.python.daemon.module", "sparkdl.spark.daemon"  # workers start in no time
    spark = SparkSession.builder.master("local[2]").config(*daemon).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")  # Spark would report the lost worker at length
    with tempfile.TemporaryDirectory() as folder:
        model = TorchClassifier(
            module=DigitsNet,
            inputShape=(1, 8, 8),
            callbacks=[LoseRank1()],
            numWorkers=2,
            epochs=30,
            batchSize=32,
            learningRate=0.002,
            validationFraction=0.1,
            checkpointInterval=100,
            reportDir=folder,
        ).fit(spark.createDataFrame(rows, "features array<float>, label int"))
        assert model.summary.restarts == 1 and model.summary.report_path is not None
        page = Path(model.summary.report_path).resolve()
        screenshot(page.as_uri(), PICTURE, width=1120, height=1560)
    spark.stop()
    print(f"drawn: {PICTURE}")


if __name__ == "__main__":
    main()
