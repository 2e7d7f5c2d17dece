"""Train a PyTorch model as a job file says, save it, and test it on rows it has never seen."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sparkdl.cli import run_job
from sparkdl.job import make_session, run_train
from sparkdl.jobfile import TrainJob


def train(job: TrainJob) -> None:
    """Do the job; print the result and what to do with it."""
    spark = make_session(job.spark, "sparkdl train")
    try:
        report = run_train(job, spark)
    finally:
        spark.stop()
    summary = report.summary
    print(
        f"\ntrained {len(summary.history)} epochs ({summary.steps:,} steps) on "
        f"{summary.world_size} workers in {summary.seconds:.0f} s, restarts: {summary.restarts}"
    )
    if report.scores is not None:
        print("\nheld-out rows:")
        print("\n".join(f"  {line}".rstrip() for line in report.scores.lines()))
    print(f"\nmodel: {report.path}")
    print("next:")
    print("\n".join(f"  {command}" for command in next_commands(report.path)))


def next_commands(path: str) -> list[str]:
    """What a user would run now, from the shell that ran this job."""
    commands = [
        f"spark-submit jobs/{name}.py --config conf/{name}.toml --set model.path={path}"
        for name in ("evaluate", "predict")
    ]
    # make runs the Python of .venv without activating it in the user's shell.
    if sys.prefix != sys.base_prefix and "VIRTUAL_ENV" not in os.environ:
        folder = os.path.relpath(sys.prefix, Path.cwd())
        commands.insert(0, f"source {folder}/bin/activate && export SPARK_CONF_DIR=conf")
    return commands


if __name__ == "__main__":
    sys.exit(
        run_job(
            TrainJob,
            train,
            description=__doc__.splitlines()[0],
            example="spark-submit jobs/train.py --config conf/digits.toml --set estimator.epochs=5",
        )
    )
