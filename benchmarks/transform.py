"""How fast is ``transform``, and where does its time go? Against torch and ``predict_batch_udf``.

Torch alone: as many processes as Spark has slots, one thread each, images in memory, nothing but
the forward pass. Spark's results go to the ``noop`` sink, so that each computes its columns only.

The parts are differences: a scan; the same with the images sent to Python and a number sent back;
the same with the images made tensors; and ``transform``, which runs the module besides. With the
small model (one linear layer) the way to Python and back is most of it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import common
import numpy as np
import pyarrow as pa
import torch
from common import CLASSES, PIXELS, Measurements, SmallCNN, images, read_images, seconds
from pyspark.ml.functions import predict_batch_udf
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import DoubleType
from torch import nn

from sparkdl.data.plan import Column
from sparkdl.inference.outputs import Output
from sparkdl.inference.predict import runs
from sparkdl.model import TorchClassifierModel

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
        5, rows=(60_000, "images"), batch=(512, "rows per forward pass"), slots=(2, "of Spark")
    )
    folder = images(options.rows)
    found = Measurements()
    spark = common.spark_session(options.slots)
    spark.conf.set("spark.sql.files.maxPartitionBytes", "8m")
    df = spark.read.parquet(str(folder))
    contenders = {"scan": df.select("image")}
    for name, work in (("to Python and back", through), ("and made tensors", as_tensors)):
        contenders[name] = df.select(arrow_udf(work, DoubleType())("image").alias("prediction"))
    for name, make in MODELS.items():
        contenders |= {f"{name}: {what}": frame for what, frame in uses(df, make, options).items()}
        assert agree(name, contenders), "both must predict the same"
    for run in range(-1, options.runs):  # the first is a warm-up
        rates = {}
        for name, frame in contenders.items():
            common.wait_until_idle(options.patience)
            rates[name] = options.rows / seconds(partial(drain, frame))
        for name in MODELS:
            common.wait_until_idle(options.patience)
            rates[f"{name}: torch alone"] = torch_alone(name, folder, options)
        if run >= 0:
            for name, rate in rates.items():
                found.add(f"{name} rows/s", rate)
            for name, spent in parts(rates, options.slots).items():
                found.add(f"{name} us/row of a slot", spent)
    for name in MODELS:
        for what in ("transform", "all outputs", "features", "predict_batch_udf"):
            found.ratio(
                f"{name}: {what} / torch alone",
                f"{name}: {what} rows/s",
                f"{name}: torch alone rows/s",
            )
        found.ratio(
            f"{name}: transform / predict_batch_udf",
            f"{name}: transform rows/s",
            f"{name}: predict_batch_udf rows/s",
        )
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
    udf = predict_batch_udf(
        partial(make_predict, make), return_type=DoubleType(), batch_size=options.batch
    )
    return {
        "transform": only.transform(df).select("prediction"),
        "all outputs": model.transform(df).drop("image", "label"),
        "features": features.transform(df).select("features"),
        "predict_batch_udf": df.withColumn("prediction", udf("image")).select("prediction"),
    }


def through(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
    """Takes images and gives a number for each, without looking at them."""
    for array in batches:
        yield pa.array(np.zeros(len(array)))


def as_tensors(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
    """The same, but makes tensors of them as ``transform`` does."""
    for array in batches:
        for run in runs([array], [IMAGE], len(array), torch.device("cpu")):
            yield pa.array(np.zeros(run.num_rows))


def parts(rates: dict[str, float], slots: int) -> dict[str, float]:
    """Where a row's time in a slot goes, in microseconds."""
    spent = {name: 1e6 * slots / rate for name, rate in rates.items()}
    found = {
        "scan": spent["scan"],
        "to Python and back": spent["to Python and back"] - spent["scan"],
        "made tensors": spent["and made tensors"] - spent["to Python and back"],
    }
    for name in MODELS:
        one = spent[f"{name}: transform"]
        found[f"{name}: module"] = one - spent["and made tensors"]
        found[f"{name}: two vectors more"] = spent[f"{name}: all outputs"] - one
    return found


def make_predict(make):
    """The function that ``predict_batch_udf`` calls; runs in the Python workers."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = make().eval()

    def predict(rows: np.ndarray) -> np.ndarray:
        pixels = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), PIXELS)
        with torch.inference_mode():
            return model(torch.from_numpy(pixels.copy())).argmax(dim=1).double().numpy()

    return predict


def agree(model: str, contenders) -> bool:
    """Whether transform and predict_batch_udf give the same predictions."""
    sums = [
        contenders[f"{model}: {name}"].groupBy().sum("prediction").first()[0]
        for name in ("transform", "predict_batch_udf")
    ]
    return sums[0] == sums[1]


def drain(df) -> None:
    """Compute all columns and forget them."""
    df.write.format("noop").mode("overwrite").save()


def torch_alone(model: str, folder: Path, options: argparse.Namespace) -> float:
    """Rows per second of all processes together, from the first's start to the last's end."""
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
    return options.rows / (max(end for _, end in spans) - min(start for start, _ in spans))


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
        started = time.time()
        for start in range(0, len(pixels), batch_size):
            model(pixels[start : start + batch_size])
        times.put((started, time.time()))


if __name__ == "__main__":
    main()
