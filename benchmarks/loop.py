"""How fast is the training loop? Against torchrun DDP, and against workers that do not communicate.

The last are the limit: two processes, each of which trains a network of its own on half of the
images with the same loop, at the same time. What a gang is slower than that is its communication,
and the wait for whichever rank is slower in a step.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import common
import fit
import torch
import torch.multiprocessing as mp
from common import Measurements, SmallCNN, images, read_images, spark_session

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.config import TrainConfig
from sparkdl.data.plan import Column, Shard, make_plan
from sparkdl.data.spool.mapped import MappedRows, ShardData
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.runtime.process import torch_threads, tuned_allocator
from sparkdl.train.callbacks import NullObserver
from sparkdl.train.loop import train

WORLD_SIZE = 2
FORMATS = {"": "contiguous", ", channels last": "channels_last"}


def main() -> None:
    """Measure, several times in turn."""
    options = common.arguments(
        7,
        rows=(60_000, "images"),
        batch=(64, "rows per worker and step"),
        epochs=(2, "epochs"),
    )
    folder = images(options.rows)
    found = Measurements()
    spark = spark_session(daemon="sparkdl.spark.daemon")
    fit.run_fit(spark, folder, options, Measurements(), "first")  # starts Spark's workers
    for _ in range(options.runs):
        common.wait_until_idle(options.patience)
        for ending, memory_format in FORMATS.items():
            fit.run_torchrun(folder, options, found, f"torchrun{ending}", memory_format)
            fit.run_fit(spark, folder, options, found, f"fit{ending}", memory_format)
            run_apart(folder, options, found, f"apart{ending}", memory_format)
    for ending in FORMATS:
        for above, below in (("fit", "torchrun"), ("fit", "apart"), ("apart", "torchrun")):
            name = f"{above} / {below}{ending}"
            found.ratio(name, f"{above}{ending} steps/s", f"{below}{ending} steps/s")
    found.ratio("fit, channels last / torchrun", "fit, channels last steps/s", "torchrun steps/s")
    found.report("loop", options)
    spark.stop()


def run_apart(
    folder: Path,
    options: argparse.Namespace,
    found: Measurements,
    name: str,
    memory_format: str,
) -> None:
    """Two processes that begin together; the mean of their steps per second."""
    with tempfile.TemporaryDirectory() as place:
        begin = mp.get_context("spawn").Barrier(WORLD_SIZE)
        mp.spawn(train_apart, (folder, options, memory_format, begin, place), nprocs=WORLD_SIZE)
        speeds = [json.loads(path.read_text()) for path in Path(place).iterdir()]
    found.add(f"{name} steps/s", sum(speeds) / WORLD_SIZE)


def train_apart(
    rank: int, folder: Path, options: argparse.Namespace, memory_format: str, begin, place: str
) -> None:
    """One of the processes."""
    with tuned_allocator(), torch_threads(1):
        pixels, labels = read_images(folder, rank, WORLD_SIZE)
        shard = ShardData(str(rank), {"feature image": pixels, "label label": labels})
        config = TrainConfig(
            task=CLASSIFICATION,
            loss="cross_entropy",
            optimizer="sgd",
            optimizer_params={"momentum": 0.9},
            learning_rate=0.01,
            batch_size=options.batch,
            epochs=options.epochs,
            memory_format=memory_format,
        )
        plan = make_plan(
            columns=[
                Column(name="image", role="feature", dtype="uint8", shape=(784,)),
                Column(name="label", role="label", dtype="int64", shape=()),
            ],
            shards=[table_row(shard)],
            world_size=1,
            batch_size=config.batch_size,
            epochs=config.epochs,
        )
        begin.wait()
        outcome = train(
            module=SmallCNN(),
            config=config,
            plan=plan,
            shards=[MappedRows(shard, plan)],
            validation=[],
            comm=LocalCommunicator(),
            device=torch.device("cpu"),
            checkpoints=None,
            resume=None,
            observer=NullObserver(),
        )
    seconds = sum(record["seconds"] for record in outcome.history)
    Path(place, str(rank)).write_text(json.dumps(outcome.steps / seconds))


def table_row(shard: ShardData) -> Shard:
    """What the shard table says of ``shard``."""
    return Shard(
        shard_id=0,
        host="",
        path="",
        num_rows=shard.num_rows,
        num_validation_rows=0,
        fingerprint=shard.fingerprint,
        num_bytes=0,
    )


if __name__ == "__main__":
    main()
