"""How fast do the surveys' networks train? ``fit`` and torchrun DDP, by workers and batch size.

ResNet-50 on synthetic CIFAR-10: images per second, forward only and training, and memory, over
workers and batch sizes. FCN-R, AlexNet-R and ResNet-56: seconds per batch. Each worker has one
thread; data is in memory for both, so that only the networks count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import common
import pandas as pd
from common import HERE, Measurements, spark_session
from networks_ddp import EPOCHS, NETWORKS, Task, peak_memory, reset_peak_memory

from sparkdl import DatasetSource, TorchClassifier, TorchModel
from sparkdl.train.callbacks import Callback, CallbackState

BATCHES = (32, 64, 128, 256)
OTHERS = {"FCN-R": 64, "AlexNet-R": 128, "ResNet-56": 128}
"""Network -> rows per worker and step."""


def main() -> None:
    """Measure, several times in turn."""
    options = common.arguments(
        1,
        rows=(256, "images per worker and epoch of ResNet-50; the others take ten batches"),
        workers=(2, "processes, one thread each"),
    )
    found = Measurements()
    # As many slots as workers: a worker takes the threads of all slots that it has for itself.
    spark = spark_session(options.workers, daemon="sparkdl.spark.daemon")
    for _ in range(options.runs):
        for batch in BATCHES:
            steps = options.rows // batch
            task = Task(network="ResNet-50", batch=batch, workers=options.workers, steps=steps)
            compare(spark, task, options, found)
        for network, batch in OTHERS.items():
            task = Task(network=network, batch=batch, workers=options.workers, steps=10)
            compare(spark, task, options, found)
    tables(found)
    found.report(f"networks_{options.workers}", options)
    spark.stop()


def compare(spark, task: Task, options: argparse.Namespace, found: Measurements) -> None:
    """One network, number of workers and batch size, with both."""
    for name, measure in (("fit", partial(run_fit, spark)), ("torchrun", run_torchrun)):
        common.wait_until_idle(options.patience)
        for what, value in measure(task).items():
            found.add(f"{task.name}: {name} {what}", value)


def run_fit(spark, task: Task) -> dict[str, float]:
    """Training by the estimator."""
    with tempfile.TemporaryDirectory() as place:
        classifier = TorchClassifier(
            module=NETWORKS[task.network],
            optimizer="sgd",
            optimizerParams={"momentum": 0.9},
            learningRate=0.001,
            batchSize=task.batch,
            epochs=EPOCHS,
            numWorkers=task.workers,
            checkpointInterval=-1,
            callbacks=[Memory(place)],
            verbose=0,
        )
        model = classifier.fit(DatasetSource(task.dataset_of_all))
        history = model.summary.history
        memory = max(int(path.read_text()) for path in Path(place).iterdir())
    seconds = [record["seconds"] / task.steps for record in history[1:]]
    return {
        "s per batch": statistics.median(seconds),
        "memory MB": memory / 1e6,
        "forward s per batch": run_transform(spark, model.setBatchSize(task.batch), task),
    }


def run_transform(spark, model: TorchModel, task: Task) -> float:
    """Seconds per batch of the forward pass alone: the median of `transform` after the first."""
    images = task.dataset_of_all().tensors[0].flatten(1).numpy()
    rows = pd.DataFrame({"features": [image.tobytes() for image in images]})
    df = spark.createDataFrame(rows).repartition(task.workers).cache()
    df.count()
    seconds = []
    for _ in range(EPOCHS):
        started = time.perf_counter()
        model.transform(df).select("prediction").write.format("noop").mode("overwrite").save()
        seconds.append((time.perf_counter() - started) / task.steps)
    df.unpersist()
    return statistics.median(seconds[1:])


@dataclass
class Memory(Callback):
    """Writes the most memory that a worker took while it trained."""

    place: str

    def on_train_begin(self, state: CallbackState) -> None:
        """Begin to measure."""
        reset_peak_memory()

    def on_train_end(self, state: CallbackState) -> None:
        """Write it to a file of the rank's."""
        Path(self.place, str(state.rank)).write_text(str(peak_memory()))


def run_torchrun(task: Task) -> dict[str, float]:
    """Training by DDP, and the forward pass alone."""
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "seconds.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(task.workers), "--local-addr", "127.0.0.1"]
        command += [str(HERE / "networks_ddp.py"), task.to_json(), str(output)]
        subprocess.run(command, check=True)
        return json.loads(output.read_text())


def tables(found: Measurements) -> None:
    """The speeds of both over each other, run by run."""
    for name in [n for n in found.names() if n.endswith("s per batch") and ": fit" in n]:
        what = "forward" if "forward" in name else "training"
        speed = f"{name.split(':')[0]}: fit / torchrun, speed of {what}"
        found.ratio(speed, name.replace(": fit", ": torchrun"), name)


if __name__ == "__main__":
    main()
