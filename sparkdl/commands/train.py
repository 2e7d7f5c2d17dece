"""How does training look from a shell?"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sparkdl.cli import Form, JobCommand
from sparkdl.commands.explain import explain
from sparkdl.jobfile import TrainJob


def train(job: TrainJob, form: Form) -> None:
    """Do the job; print the result and what to do with it."""
    from sparkdl.job import run_train
    from sparkdl.spark.starting import make_session

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
    if summary.report_path is not None:
        print(f"report: {summary.report_path}")
    print("next:")
    print("\n".join(f"  {command}" for command in next_commands(report.path, form)))


def next_commands(path: str, form: Form) -> list[str]:
    """What a user would run now, from the shell that ran this job."""
    if form is Form.COMMAND:
        return [
            f"sparkdl evaluate --set model.path={path} --set data.path=ROWS",
            f"sparkdl predict --set model.path={path} --set data.path=ROWS --set output.path=NEW",
            f"sparkdl export {path} model.onnx",
        ]
    commands = [
        f"{form.start_of(name)} --config conf/{name}.toml --set model.path={path}"
        for name in ("evaluate", "predict")
    ]
    # make runs the Python of .venv without activating it in the user's shell.
    if sys.prefix != sys.base_prefix and "VIRTUAL_ENV" not in os.environ:
        folder = os.path.relpath(sys.prefix, Path.cwd())
        commands.insert(0, f"source {folder}/bin/activate && export SPARK_CONF_DIR=conf")
    return commands


TRAIN = JobCommand(
    name="train",
    kind=TrainJob,
    action=train,
    description=(
        "Train a PyTorch model as a job file says, save it, and test it on rows it has never seen."
    ),
    config="conf/digits.toml",
    starter="train.toml",
    settings=("--set estimator.epochs=5", "--set 'spark.master=local[2]'", "--explain"),
    explain=explain,
)
