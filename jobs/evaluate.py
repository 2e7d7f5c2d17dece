"""Measure how good a saved model's predictions are, as a job file says."""

from __future__ import annotations

import sys

from sparkdl.cli import run_job
from sparkdl.job import make_session, run_evaluate
from sparkdl.jobfile import EvaluateJob


def evaluate(job: EvaluateJob) -> None:
    """Do the job; print the measures."""
    spark = make_session(job.spark, "sparkdl evaluate")
    try:
        scores = run_evaluate(job, spark)
    finally:
        spark.stop()
    print("\n".join(scores.lines()))
    if job.output is not None:
        print(f"\nwritten to {job.output.path}")


if __name__ == "__main__":
    sys.exit(
        run_job(
            EvaluateJob,
            evaluate,
            description=__doc__.splitlines()[0],
            example="spark-submit jobs/evaluate.py --config conf/evaluate.toml",
        )
    )
