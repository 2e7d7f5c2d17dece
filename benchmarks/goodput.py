"""How much is left of training that loses a worker every minute? What do checkpoints cost?

The same fit runs undisturbed, without checkpoints, disturbed, and both again, in turn. Checkpoints
come at the default interval. Goodput is measured twice, from the first step to the last. By steps
per second: those of the disturbed fit, without what was done again, over those of the undisturbed
ones; other programs on the machine disturb this. And within the disturbed fit: the part of its
time in which there were steps, times the part of its steps that were not done again.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import common
from common import Measurements, SmallCNN, images, spark_session

from sparkdl import Callback, TorchClassifier
from sparkdl.report.record.run_record import RunRecord

CHECKPOINTS = 500
"""Steps between two of them: the default."""


@dataclass
class Announce(Callback):
    """Writes down the number of each rank's process."""

    folder: str

    def on_train_begin(self, state) -> None:
        """See `Callback`."""
        Path(self.folder, str(state.rank)).write_text(str(os.getpid()))


def main() -> None:
    """Measure."""
    options = common.arguments(
        2,
        rows=(60_000, "images"),
        batch=(64, "rows per worker and step"),
        minutes=(5, "length of the disturbed fit"),
        every=(60, "seconds between two failures"),
    )
    folder = images(options.rows)
    steps_per_epoch = -(-options.rows // (2 * options.batch))
    spark = spark_session(daemon="sparkdl.spark.daemon")
    rows = spark.read.parquet(str(folder))
    found = Measurements()
    first = fit(rows, options, epochs=2)  # starts Spark's workers, and says how fast they are
    epochs = max(2, round(60 * rate(first) / steps_per_epoch))
    for run in range(options.runs):
        common.wait_until_idle(options.patience)
        with_them = fit(rows, options, epochs=epochs)
        without = fit(rows, options, epochs=epochs, interval=-1)
        spent = with_them.totals()["0"]
        found.add("undisturbed steps/s", rate(with_them))
        found.add("without checkpoints steps/s", rate(without))
        found.add(
            "checkpoints, % of the loop", 100 * spent.get("checkpoint", 0.0) / sum(spent.values())
        )
        if run == 0:
            disturbed = fit(rows, options, epochs=options.minutes * epochs, every=options.every)
    found.ratio("with / without checkpoints", "undisturbed steps/s", "without checkpoints steps/s")
    found.add("disturbed steps/s", rate(disturbed))
    found.add("failures", len(disturbed.failures))
    found.add("minutes", minutes(disturbed))
    pauses = again = 0.0
    for failure, attempt in zip(disturbed.failures, disturbed.attempts[1:], strict=True):
        last = [entry for entry in disturbed.steps if entry[0] <= failure["at"]][-1]
        pause = next(at for at, *_ in disturbed.steps if at > failure["at"]) - last[0]
        found.add("steps done again", last[1] - attempt["start_step"])
        found.add("seconds from the last step to the next", pause)
        pauses += pause
        again += last[1] - attempt["start_step"]
    seconds, steps = 60 * minutes(disturbed), disturbed.steps[-1][1] - disturbed.steps[0][1]
    kept = (seconds - pauses) / seconds * steps / (steps + again)
    found.add("goodput by pauses and steps done again", kept)
    found.add("goodput by steps/s", rate(disturbed) / found.median("undisturbed steps/s"))
    found.report("goodput", options)
    spark.stop()


def fit(
    rows, options: argparse.Namespace, *, epochs: int, interval: int = CHECKPOINTS, every: int = 0
) -> RunRecord:
    """One fit; ``every`` so many seconds rank 1 is killed."""
    with tempfile.TemporaryDirectory() as place:
        classifier = TorchClassifier(
            module=SmallCNN(),
            featuresCol="image",
            labelCol="label",
            optimizer="sgd",
            optimizerParams={"momentum": 0.9},
            learningRate=0.01,
            batchSize=options.batch,
            epochs=epochs,
            numWorkers=2,
            checkpointInterval=interval,
            maxRestarts=10,
            callbacks=[Announce(place)],
            verbose=0,
        )
        over = threading.Event()
        killer = threading.Thread(target=kill, args=(Path(place, "1"), every, over))
        killer.start()
        try:
            record = classifier.fit(rows).summary.record
        finally:
            over.set()
            killer.join()
    assert record is not None
    return record


def kill(file: Path, every: int, over: threading.Event) -> None:
    """Kill the process whose number the file holds, again and again, after it has trained."""
    while every and not file.exists():
        if over.wait(0.1):
            return
    while every and not over.wait(every):
        with suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGKILL)


def rate(record: RunRecord) -> float:
    """Steps per second, from the first to the last; what was done twice counts once."""
    return (record.steps[-1][1] - record.steps[0][1]) / (60 * minutes(record))


def minutes(record: RunRecord) -> float:
    """From the first step to the last."""
    return (record.steps[-1][0] - record.steps[0][0]) / 60


if __name__ == "__main__":
    main()
