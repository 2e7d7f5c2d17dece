"""How does prediction look from a shell?"""

from __future__ import annotations

from sparkdl.cli import Form, JobCommand
from sparkdl.jobfile import PredictJob

_ROWS_SHOWN = 5


def predict(job: PredictJob, form: Form) -> None:
    """Do the job; show the first rows."""
    from sparkdl.job import run_predict
    from sparkdl.spark.starting import make_session

    spark = make_session(job.spark, "sparkdl predict")
    try:
        written = run_predict(job, spark)
        print(f"{written.count():,} rows in {job.output.path}, among them:")
        written.show(_ROWS_SHOWN)
    finally:
        spark.stop()


PREDICT = JobCommand(
    name="predict",
    kind=PredictJob,
    action=predict,
    description="Write a saved model's predictions for the rows that a job file names.",
    config="conf/predict.toml",
    starter="predict.toml",
    settings=("", "--set output.format=json --set output.path=runs/predictions-json"),
)
