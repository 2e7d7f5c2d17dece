"""Write a saved model's predictions for the rows that a job file names."""

from __future__ import annotations

import sys

from sparkdl.cli import run_job
from sparkdl.job import make_session, run_predict
from sparkdl.jobfile import PredictJob

ROWS_SHOWN = 5


def predict(job: PredictJob) -> None:
    """Do the job; show the first rows."""
    spark = make_session(job.spark, "sparkdl predict")
    try:
        written = run_predict(job, spark)
        print(f"{written.count():,} rows in {job.output.path}, among them:")
        written.show(ROWS_SHOWN)
    finally:
        spark.stop()


if __name__ == "__main__":
    sys.exit(
        run_job(
            PredictJob,
            predict,
            description=__doc__.splitlines()[0],
            example="spark-submit jobs/predict.py --config conf/predict.toml",
        )
    )
