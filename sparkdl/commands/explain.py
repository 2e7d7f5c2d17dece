"""How does a shell show what a training job would cost, before anything is trained?"""

from __future__ import annotations

from sparkdl.cli import Form, JobCommand
from sparkdl.jobfile import TrainJob


def explain(job: TrainJob, form: Form) -> None:
    """Print the plan of the job, and what to expect of it."""
    from sparkdl.job import run_explain
    from sparkdl.spark.starting import make_session

    spark = make_session(job.spark, "sparkdl explain")
    try:
        explanation = run_explain(job, spark)
    finally:
        spark.stop()
    print("\n".join(explanation.lines()))


EXPLAIN = JobCommand(
    name="explain",
    kind=TrainJob,
    action=explain,
    description="Print what a training job will do, and how long it will take, before it runs.",
    config="conf/digits.toml",
    starter="train.toml",
    settings=(
        "",
        "--set estimator.num_workers=8",
        "--set explain.num_rows=1000000 --set explain.count_seconds=300",
    ),
)
