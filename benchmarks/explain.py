"""How well does ``explain`` predict? Its seconds per epoch against those of fits, run by run.

Two networks: one whose steps are long, and one whose exchange counts; one and two workers; a sum of
gradients at every step, and averaging in a gang and in rounds on plain Spark stages.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import common
from common import Measurements, SmallCNN, images, spark_session
from torch import nn

from sparkdl import AllReduce, LocalSGD, ParameterAveraging, TorchClassifier

STRATEGIES = {
    "all-reduce": AllReduce(),
    "local SGD, 8": LocalSGD(averaging_period=8),
    "averaging in rounds, 16": ParameterAveraging(averaging_period=16),
}


class Wide(nn.Module):
    """Three linear layers with 3 million parameters: much to exchange, little to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(784, 1500), nn.ReLU(), nn.Linear(1500, 1200), nn.ReLU(), nn.Linear(1200, 10)
        )

    def forward(self, images):
        """Logits ``(batch, 10)`` of images ``(batch, 784)``, uint8."""
        return self.layers(images.float() / 255)


NETWORKS = {"CNN": SmallCNN, "wide": Wide}


def main() -> None:
    """Measure, several times in turn."""
    options = common.arguments(
        3, rows=(12_000, "images"), batch=(64, "rows per worker and step"), epochs=(5, "epochs")
    )
    folder = images(options.rows)
    spark = spark_session(daemon="sparkdl.spark.daemon")
    df = spark.read.parquet(str(folder))
    found = Measurements()
    next(cases(options))[2].fit(df)  # starts Spark's workers
    for _ in range(options.runs):
        common.wait_until_idle(options.patience)
        for name, workers, estimator in cases(options):
            compare(df, name, workers, estimator, found)
    found.report("explain", options)
    spark.stop()


def cases(options: argparse.Namespace) -> Iterator[tuple[str, int, TorchClassifier]]:
    """What is fitted."""
    for network, make in NETWORKS.items():
        for title, strategy in STRATEGIES.items():
            for workers in (1, 2):
                yield (
                    f"{network}, {title}, {workers} worker" + "s" * (workers > 1),
                    workers,
                    TorchClassifier(
                        module=make(),
                        featuresCol="image",
                        optimizer="sgd",
                        optimizerParams={"momentum": 0.9},
                        learningRate=0.01,
                        batchSize=options.batch,
                        epochs=options.epochs,
                        numWorkers=workers,
                        syncStrategy=strategy,
                        verbose=0,
                    ),
                )


def compare(df, name: str, workers: int, estimator: TorchClassifier, found: Measurements) -> None:
    """One explanation and one fit."""
    began = time.perf_counter()
    explanation = estimator.explain(df)
    found.add("explain s", time.perf_counter() - began)
    row = next(row for row in explanation.scaling if row.workers == workers)
    summary = estimator.fit(df).summary
    # The first epoch of a fit touches its memory for the first time.
    measured = statistics.median(record["seconds"] for record in summary.history[1:])
    found.add(f"{name}, predicted epoch s", row.epoch_seconds)
    found.add(f"{name}, measured epoch s", measured)
    found.add(f"{name}, predicted / measured", row.epoch_seconds / measured)
    found.add(f"{name}, whole fit, predicted / measured", row.total_seconds / summary.seconds)


if __name__ == "__main__":
    main()
