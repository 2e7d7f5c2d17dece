"""How fast is ``transform``, and where does its time go? Against torch and ``predict_batch_udf``.

Torch alone: as many processes as Spark has slots, one thread each, images in memory, nothing but
the forward pass. Spark's results go to the ``noop`` sink, so that each computes its columns only.

``mapInArrow, no work`` sends the images to Python and a number for each back: what Spark itself
takes. ``mapInArrow`` runs the module in the plainest way. With the small model (one linear layer)
nearly all is Spark's part. What a task takes however few rows it has is measured by one of none.

CPU seconds are those of the JVM, of Python's workers and of all that they have started. They say
more than wall seconds where other programs run too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import common
import numpy as np
import pyarrow as pa
import torch
from common import CLASSES, PIXELS, Measurements, SmallCNN, images, read_images, seconds
from pyspark.ml.functions import predict_batch_udf
from pyspark.sql.types import DoubleType
from torch import nn

from sparkdl.data.plan import Column
from sparkdl.inference.outputs import Output
from sparkdl.model import TorchClassifierModel

EMPTY_TASKS = 32
IMAGE = Column(name="image", role="feature", dtype="uint8", shape=(PIXELS,))


class OneLayer(nn.Module):
    """A linear layer on the pixels: hardly any arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(PIXELS, CLASSES))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits ``(batch, 10)`` of images ``(batch, 784)``, uint8."""
        return self.layers(images.float() / 255)


MODELS = {"CNN": SmallCNN, "one layer": OneLayer}


def main() -> None:
    """Measure, several times in turn."""
    options = common.arguments(
        3,
        rows=(480_000, "images for one layer"),
        cnn_rows=(60_000, "images for the CNN; 0 leaves it out"),
        batch=(512, "rows per forward pass"),
        slots=(2, "of Spark"),
    )
    found = Measurements()
    spark = common.spark_session(options.slots)
    sizes = {"one layer": options.rows} | ({"CNN": options.cnn_rows} if options.cnn_rows else {})
    contenders: dict[str, tuple[int, Callable[[], tuple[float, float]]]] = {}
    for name, rows in sizes.items():
        folder = images(rows)
        frames = uses(spark.read.parquet(str(folder)), MODELS[name], options)
        assert agree(frames), "all must predict the same"
        for what, frame in frames.items():
            contenders[f"{name}: {what}"] = rows, partial(spark_seconds, frame)
        contenders[f"{name}: torch alone"] = rows, partial(torch_alone, name, folder, options)
    for run in range(-1, options.runs):  # the first is a warm-up
        for name, (rows, measure) in contenders.items():
            common.wait_until_idle(options.patience)
            wall, cpu = measure()
            if run >= 0:
                found.add(f"{name} rows/s", rows / wall)
                found.add(f"{name} CPU us/row", 1e6 * cpu / rows)
        common.wait_until_idle(options.patience)
        for what, (wall, cpu) in empty_tasks(spark, options).items():
            if run >= 0:
                found.add(f"{what}, ms/task of a slot", wall)
                found.add(f"{what}, CPU ms/task", cpu)
    for name in contenders:
        model = name.partition(":")[0]
        for unit, above, below in (
            ("rows/s", name, f"{model}: torch alone"),
            ("CPU us/row", f"{model}: torch alone", name),
        ):
            if not name.endswith("torch alone"):
                title = f"{name} / torch alone, by {unit}"
                found.ratio(title, f"{above} {unit}", f"{below} {unit}")
    found.report("transform", options)
    spark.stop()


def uses(df, make, options: argparse.Namespace):
    """What is done with one model."""
    torch.manual_seed(0)
    model = TorchClassifierModel(make(), [IMAGE], num_classes=CLASSES).setBatchSize(options.batch)
    only = model.copy().setRawPredictionCol("").setProbabilityCol("")
    last = f"layers.{len(model.module.layers) - 1}"
    features = only.copy().setPredictionCol("")
    features.setOutputs({"features": Output(layer=last)})
    predict = partial(make_predict, make)
    udf = predict_batch_udf(predict, return_type=DoubleType(), batch_size=options.batch)
    return {
        "scan": df.select("image"),
        "mapInArrow, no work": df.select("image").mapInArrow(through, "prediction double"),
        "mapInArrow": df.select("image").mapInArrow(
            partial(predict_plainly, predict, options.batch), "prediction double"
        ),
        "transform": only.transform(df).select("prediction"),
        "all outputs": model.transform(df).drop("image", "label"),
        "features": features.transform(df).select("features"),
        "predict_batch_udf": df.withColumn("prediction", udf("image")).select("prediction"),
    }


def through(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Takes images and gives a number for each, without looking at them."""
    for batch in batches:
        yield pa.RecordBatch.from_arrays([pa.array(np.zeros(batch.num_rows))], ["prediction"])


def predict_plainly(
    make: Callable[[], Callable[[np.ndarray], np.ndarray]],
    batch_size: int,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """The module on batches of images, without checks of the rows, in the fewest steps."""
    predict = make()
    for batch in batches:
        column = batch.column(0)
        flat = np.frombuffer(column.buffers()[2], dtype=np.uint8)
        pixels = flat[column.offset * PIXELS :][: len(column) * PIXELS].reshape(-1, PIXELS)
        parts = [
            predict(pixels[start : start + batch_size])
            for start in range(0, len(pixels), batch_size)
        ]
        yield pa.RecordBatch.from_arrays([pa.array(np.concatenate(parts))], ["prediction"])


def empty_tasks(spark, options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Wall and CPU milliseconds of a task that has one row."""
    row = spark.range(EMPTY_TASKS, numPartitions=EMPTY_TASKS)
    df = row.selectExpr(f"cast(rpad('', {PIXELS}, 'x') as binary) as image")
    frames = uses(df, OneLayer, options)
    found = {}
    for what in ("scan", "mapInArrow, no work", "transform", "predict_batch_udf"):
        drain(frames[what])  # makes the code
        wall, cpu = spark_seconds(frames[what])
        found[f"{what}, one row"] = (
            1000 * options.slots * wall / EMPTY_TASKS,
            1000 * cpu / EMPTY_TASKS,
        )
    return found


def make_predict(make):
    """The function that ``predict_batch_udf`` calls; runs in the Python workers."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = make().eval()

    def predict(rows: np.ndarray) -> np.ndarray:
        pixels = rows
        if rows.dtype == object:  # as predict_batch_udf gives them
            pixels = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), PIXELS)
        with torch.inference_mode():
            return model(torch.from_numpy(pixels.copy())).argmax(dim=1).double().numpy()

    return predict


def agree(frames) -> bool:
    """Whether all give the same predictions."""
    names = ("transform", "mapInArrow", "predict_batch_udf")
    return len({frames[name].groupBy().sum("prediction").first()[0] for name in names}) == 1


def drain(df) -> None:
    """Compute all columns and forget them."""
    df.write.format("noop").mode("overwrite").save()


def spark_seconds(df) -> tuple[float, float]:
    """Wall and CPU seconds of a job."""
    before = common.children_cpu_seconds()
    wall = seconds(partial(drain, df))
    return wall, common.children_cpu_seconds() - before


def torch_alone(model: str, folder: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Wall seconds from the first process's start to the last's end; CPU seconds of all."""
    context = multiprocessing.get_context("spawn")
    barrier, times = context.Barrier(options.slots), context.Queue()
    arguments = (model, folder, options.slots, options.batch, barrier, times)
    processes = [
        context.Process(target=forward_all, args=(part, *arguments))
        for part in range(options.slots)
    ]
    for process in processes:
        process.start()
    spans = [times.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    wall = max(end for _, end, _ in spans) - min(start for start, _, _ in spans)
    return wall, sum(cpu for _, _, cpu in spans)


def forward_all(
    part: int, name: str, folder: Path, parts: int, batch_size: int, barrier, times
) -> None:
    """One process of `torch_alone`."""
    torch.set_num_threads(1)
    pixels, _ = read_images(folder, part, parts)
    model = MODELS[name]().eval()
    with torch.inference_mode():
        model(pixels[:batch_size])
        barrier.wait()
        started, cpu = time.time(), time.process_time()
        for start in range(0, len(pixels), batch_size):
            model(pixels[start : start + batch_size])
        times.put((started, time.time(), time.process_time() - cpu))


if __name__ == "__main__":
    main()
