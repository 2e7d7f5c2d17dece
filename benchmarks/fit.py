"""How fast is ``fit``? Against torchrun DDP, TorchDistributor and Ray Train, on the same work.

Steps per second count the loop alone; "rest" is everything else of a call: for ``fit`` the
checks, the spool, the launch, the last checkpoint and the clean-up; for the others imports,
launch and reading the Parquet files. A cold fit is the first one of a new process and session,
whose start is not counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
from common import HERE, Measurements, SmallCNN, images, spark_session

from sparkdl import TorchClassifier


def main() -> None:
    """Measure, several times in turn."""
    parser = common.parser(
        5,
        rows=(60_000, "images"),
        batch=(64, "rows per worker and step"),
        epochs=(1, "epochs"),
        preload=(1, "1: workers start with torch in memory"),
        distributor=(1, "1: measure TorchDistributor too"),
        floats=(0, "1: images are arrays of float: four times as many bytes"),
        cold=(1, "1: measure cold fits too"),
    )
    parser.add_argument("--first", type=Path, help="only fit once, and write the figures there")
    options = common.with_peers(parser, "ray").parse_args()
    folder = images(options.rows, as_floats=bool(options.floats))
    found = Measurements()
    started = time.perf_counter()
    spark = spark_session(daemon="sparkdl.spark.daemon" if options.preload else "pyspark.daemon")
    found.add("session start s", time.perf_counter() - started)
    run_fit(spark, folder, options, found, "cold fit")
    if options.first:
        options.first.write_text(json.dumps({n: found.median(n) for n in found.names()}))
        spark.stop()
        return
    found = Measurements()
    for _ in range(options.runs):
        if options.cold:
            run_cold(options, found)
        common.wait_until_idle(options.patience)
        # Spark ends Python workers that were idle for a minute, as they are here after the other
        # contenders: the first fit starts new ones, the second finds them warm.
        if options.distributor:
            run_fit(spark, folder, options, found, "fit after a pause")
        run_fit(spark, folder, options, found, "fit")
        common.wait_until_idle(options.patience)
        run_torchrun(folder, options, found)
        if options.distributor:
            common.wait_until_idle(options.patience)
            run_distributor(folder, options, found)
        if options.ray:
            common.wait_until_idle(options.patience)
            run_ray(folder, options, found)
    found.ratio("fit / torchrun steps", "fit steps/s", "torchrun steps/s")
    if options.distributor:
        found.ratio("fit / TorchDistributor steps", "fit steps/s", "TorchDistributor steps/s")
    if options.ray:
        found.ratio("fit / Ray Train steps", "fit steps/s", "Ray Train steps/s")
    found.report("fit_floats" if options.floats else "fit", options)
    spark.stop()


def run_cold(options: argparse.Namespace, found: Measurements) -> None:
    """One fit in a new process."""
    common.wait_until_idle(options.patience)
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "seconds.json"
        command = [sys.executable, __file__, "--first", str(output)]
        for name in ("rows", "batch", "epochs", "preload", "floats"):
            command += [f"--{name}", str(getattr(options, name))]
        subprocess.run(command, check=True)
        for name, value in json.loads(output.read_text()).items():
            found.add(name, value)


def run_fit(
    spark,
    folder: Path,
    options: argparse.Namespace,
    found: Measurements,
    name: str,
    memory_format: str = "contiguous",
) -> None:
    """One fit, timed from outside and by its own summary."""
    classifier = TorchClassifier(
        module=SmallCNN(),
        featuresCol="image",
        labelCol="label",
        optimizer="sgd",
        optimizerParams={"momentum": 0.9},
        learningRate=0.01,
        batchSize=options.batch,
        epochs=options.epochs,
        numWorkers=2,
        memoryFormat=memory_format,
        verbose=0,
    )
    started = time.perf_counter()
    df = spark.read.parquet(str(folder))
    found.add(f"{name}, read.parquet s", time.perf_counter() - started)
    summary = classifier.fit(df).summary
    total = time.perf_counter() - started
    loop = sum(record["seconds"] for record in summary.history)
    found.add(f"{name} steps/s", summary.steps / loop)
    found.add(f"{name} rest s", total - loop)
    for phase, spent in summary.phase_seconds.items():
        if not phase.startswith("fit"):
            continue
        rest = spent - loop if phase == "fit: train" else spent
        found.add(f"{name}, {phase} s", rest)


def run_torchrun(
    folder: Path,
    options: argparse.Namespace,
    found: Measurements,
    name: str = "torchrun",
    memory_format: str = "contiguous",
) -> None:
    """One run of torchrun, from nothing."""
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "seconds.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += ["--standalone", "--local-addr", "127.0.0.1"]
        command += [*ddp(folder, options, output), memory_format]
        started = time.perf_counter()
        # torch sometimes aborts when a process ends, its work done; without its output `note` fails
        subprocess.run(command, check=False)
        note(found, name, output, time.perf_counter() - started)


def run_distributor(folder: Path, options: argparse.Namespace, found: Measurements) -> None:
    """One run of TorchDistributor in the warm session."""
    from pyspark.ml.torch.distributor import TorchDistributor

    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "seconds.json"
        distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
        started = time.perf_counter()
        distributor.run(*ddp(folder, options, output))
        note(found, "TorchDistributor", output, time.perf_counter() - started)


def run_ray(folder: Path, options: argparse.Namespace, found: Measurements) -> None:
    """One run of Ray Train, from nothing, its cluster too."""
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "seconds.json"
        command = [str(options.ray), *ddp(folder, options, output, "ray_trainer.py")]
        started = time.perf_counter()
        subprocess.run(command, check=True)
        note(found, "Ray Train", output, time.perf_counter() - started)


def ddp(folder: Path, options: argparse.Namespace, output: Path, name: str = "ddp.py") -> list[str]:
    """A script that trains with DDP, and its arguments."""
    script = HERE / name
    return [str(word) for word in (script, folder, options.batch, options.epochs, output)]


def note(found: Measurements, name: str, output: Path, total: float) -> None:
    """Take what the DDP script has measured."""
    result = json.loads(output.read_text())
    loop = sum(result["seconds"])
    found.add(f"{name} steps/s", result["steps"] / loop)
    found.add(f"{name} rest s", total - loop)


if __name__ == "__main__":
    main()
