"""How fast is ``transform``? Against torch alone and against ``predict_batch_udf``.

Torch alone: as many processes as Spark has slots, one thread each, images in memory, nothing but
the forward pass. Spark's results go to the ``noop`` sink, so that each computes its columns only.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from functools import partial
from pathlib import Path

import common
import numpy as np
import torch
from common import CLASSES, PIXELS, Measurements, SmallCNN, images, read_images, seconds
from pyspark.ml.functions import predict_batch_udf
from pyspark.sql.types import DoubleType

from sparkdl.model import TorchClassifierModel
from sparkdl.plan import Column


def main() -> None:
    """Measure, several times in turn."""
    options = common.arguments(
        5, rows=(60_000, "images"), batch=(512, "rows per forward pass"), slots=(2, "of Spark")
    )
    folder = images(options.rows)
    torch.manual_seed(0)
    found = Measurements()
    spark = common.spark_session(options.slots)
    spark.conf.set("spark.sql.files.maxPartitionBytes", "8m")
    df = spark.read.parquet(str(folder))
    column = Column(name="image", role="feature", dtype="uint8", shape=(PIXELS,))
    model = TorchClassifierModel(SmallCNN(), [column], num_classes=CLASSES)
    model.setBatchSize(options.batch)
    only = model.copy().setRawPredictionCol("").setProbabilityCol("")
    udf = predict_batch_udf(make_predict, return_type=DoubleType(), batch_size=options.batch)
    with_udf = df.withColumn("prediction", udf("image")).select("prediction")
    contenders = {
        "scan alone": df.select("image"),
        "transform, prediction": only.transform(df).select("prediction"),
        "transform, all outputs": model.transform(df).drop("image", "label"),
        "predict_batch_udf, prediction": with_udf,
    }
    assert agree(contenders), "both must predict the same"
    for run in range(-1, options.runs):  # the first is a warm-up
        rates = {}
        for name, frame in contenders.items():
            common.wait_until_idle(options.patience)
            rates[name] = options.rows / seconds(partial(drain, frame))
        common.wait_until_idle(options.patience)
        rates["torch alone"] = torch_alone(folder, options)
        if run >= 0:
            for name, rate in rates.items():
                found.add(f"{name} rows/s", rate)
    for name in list(contenders)[1:]:
        found.ratio(f"{name} / torch alone", f"{name} rows/s", "torch alone rows/s")
    found.ratio(
        "transform / predict_batch_udf",
        "transform, prediction rows/s",
        "predict_batch_udf, prediction rows/s",
    )
    found.report("transform", options)
    spark.stop()


def make_predict():
    """The function that ``predict_batch_udf`` calls; runs in the Python workers."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = SmallCNN().eval()

    def predict(rows: np.ndarray) -> np.ndarray:
        pixels = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), PIXELS)
        with torch.inference_mode():
            return model(torch.from_numpy(pixels.copy())).argmax(dim=1).double().numpy()

    return predict


def agree(contenders) -> bool:
    """Whether transform and predict_batch_udf give the same predictions."""
    sums = [
        contenders[name].groupBy().sum("prediction").first()[0]
        for name in ("transform, prediction", "predict_batch_udf, prediction")
    ]
    return sums[0] == sums[1]


def drain(df) -> None:
    """Compute all columns and forget them."""
    df.write.format("noop").mode("overwrite").save()


def torch_alone(folder: Path, options: argparse.Namespace) -> float:
    """Rows per second of all processes together, from the first's start to the last's end."""
    context = multiprocessing.get_context("spawn")
    barrier, times = context.Barrier(options.slots), context.Queue()
    arguments = (folder, options.slots, options.batch, barrier, times)
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


def forward_all(part: int, folder: Path, parts: int, batch_size: int, barrier, times) -> None:
    """One process of `torch_alone`."""
    torch.set_num_threads(1)
    pixels, _ = read_images(folder, part, parts)
    model = SmallCNN().eval()
    with torch.inference_mode():
        model(pixels[:batch_size])
        barrier.wait()
        started = time.time()
        for start in range(0, len(pixels), batch_size):
            model(pixels[start : start + batch_size])
        times.put((started, time.time()))


if __name__ == "__main__":
    main()
