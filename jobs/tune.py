"""Search for the values of hyperparameters that train best, as a job file says."""

from __future__ import annotations

import sys

from sparkdl.cli import run_job
from sparkdl.job import make_session
from sparkdl.studyfile import TuneJob
from sparkdl.tuning import folder_of, run_tune


def tune(job: TuneJob) -> None:
    """Do the job; print the best values and what to do with them."""
    spark = make_session(job.spark, "sparkdl tune")
    try:
        report = run_tune(job, spark)
    finally:
        spark.stop()
    counts = ", ".join(f"{number} {state}" for state, number in report.states.items() if number)
    print(f"\ntrials: {counts}")
    if report.best is None:
        raise SystemExit("no trial came to its end; see trial.json of each")
    print(f"best: trial {report.best}, {job.study.metric} {report.value:.6g}")
    for key, value in report.params.items():
        print(f"  {key} = {value}")
    settings = " ".join(f"--set '{key}={value}'" for key, value in report.params.items())
    path = f"{report.path.rstrip('/')}/{folder_of(report.best)}/model"
    print(f"\nmodel: {path}")
    print("next:")
    print("  spark-submit jobs/evaluate.py --config conf/evaluate.toml --set model.path=" + path)
    print(f"  spark-submit jobs/train.py --config FILE {settings}")


if __name__ == "__main__":
    sys.exit(
        run_job(
            TuneJob,
            tune,
            description=__doc__.splitlines()[0],
            example="spark-submit jobs/tune.py --config conf/tune.toml --set study.trials=10",
        )
    )
