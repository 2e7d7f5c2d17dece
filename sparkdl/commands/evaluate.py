"""How does the evaluation of a model look from a shell?"""

from __future__ import annotations

from sparkdl.cli import Form, JobCommand
from sparkdl.jobfile import EvaluateJob


def evaluate(job: EvaluateJob, form: Form) -> None:
    """Do the job; print the measures."""
    from sparkdl.job import run_evaluate
    from sparkdl.spark.starting import make_session
    from sparkdl.storage.storage import without_password

    spark = make_session(job.spark, "sparkdl evaluate")
    try:
        scores = run_evaluate(job, spark)
    finally:
        spark.stop()
    print("\n".join(scores.lines()))
    if job.output is not None:
        print(f"\nwritten to {without_password(job.output.path)}")


EVALUATE = JobCommand(
    name="evaluate",
    kind=EvaluateJob,
    action=evaluate,
    description="Measure how good a saved model's predictions are, as a job file says.",
    config="conf/evaluate.toml",
    starter="evaluate.toml",
    settings=("", "--set model.path=models/other"),
)
