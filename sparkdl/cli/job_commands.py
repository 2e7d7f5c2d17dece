"""How does training look from a shell?"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl.cli.command_line import Form, JobCommand
from sparkdl.cli.images.options import PrepareJob
from sparkdl.cli.job_file import EvaluateJob, PredictJob, TrainJob
from sparkdl.cli.tune.study_file import TuneJob
from sparkdl.errors import TrainingFailed

if TYPE_CHECKING:
    from sparkdl.cli.images.ledger import Report
    from sparkdl.cli.tune.search import TuneReport


def evaluate(job: EvaluateJob, form: Form) -> None:
    """Do the job; print the measures."""
    from sparkdl.cli.jobs import run_evaluate
    from sparkdl.cli.spark_session import make_session
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


_ROWS_SHOWN = 5


def predict(job: PredictJob, form: Form) -> None:
    """Do the job; show the first rows."""
    from sparkdl.cli.jobs import run_predict
    from sparkdl.cli.spark_session import make_session

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


_BAD_FILES_SHOWN = 5
_CLASSES_SHOWN = 12


def prepare(job: PrepareJob, form: Form) -> None:
    """Do the job; print what was made and how to train on it."""
    from sparkdl.cli.jobs import run_prepare
    from sparkdl.cli.spark_session import make_session

    spark = make_session(job.spark, "sparkdl prepare")
    try:
        report = run_prepare(job, spark)
    finally:
        spark.stop()
    print("\n".join(lines(report, form)))


def lines(report: Report, form: Form) -> list[str]:
    """The report for a terminal."""
    text = [f"\n{report.path}"]
    for split, rows in report.rows.items():
        files = report.files[split]
        text.append(f"  {split:<10} {rows:>9,} images in {files:,} file{'s' * (files != 1)}")
    classes = report.rows_by_label.get("train", {})
    if classes:
        text.append(f"  labels: {len(classes)} classes, numbered in this order")
        shown = list(classes.items())[:_CLASSES_SHOWN]
        text += [f"    {n:>3} {name:<20} {rows:>9,}" for n, (name, rows) in enumerate(shown)]
        text += [f"    ... all in {report.path}/labels.json"] * (len(classes) > _CLASSES_SHOWN)
    return [*text, *_bad_lines(report), "next:", _next_command(report, form)]


def _bad_lines(report: Report) -> list[str]:
    from sparkdl.cli.images.ledger import BAD_FILES

    if not report.bad:
        return []
    text = [f"  {len(report.bad):,} bad files skipped, listed in {BAD_FILES}:"]
    text += [f"    {path}: {why}" for path, why in report.bad[:_BAD_FILES_SHOWN]]
    hidden = len(report.bad) - _BAD_FILES_SHOWN
    return [*text, *[f"    and {hidden:,} more"] * (hidden > 0)]


def _next_command(report: Report, form: Form) -> str:
    sections = {"train": "data", "validation": "validation", "test": "test"}
    settings = [f"--set {sections[split]}.path={report.path}/{split}" for split in report.rows]
    classes = report.rows_by_label.get("train", {})
    if classes:
        settings.append(f"--set model.args.num_classes={len(classes)}")
    file = "FILE" if form is Form.COMMAND else "conf/images.toml"
    return " \\\n      ".join([f"  {form.start_of('train')} --config {file}", *settings])


PREPARE = JobCommand(
    name="prepare",
    kind=PrepareJob,
    action=prepare,
    description=(
        "Make Parquet of a folder of image files, as a job file says; a killed run goes on."
    ),
    config="conf/prepare.toml",
    starter="prepare.toml",
    settings=(
        "",
        "--set data.path=hdfs:///photos --set output.path=hdfs:///prepared",
        "--set image.encoding=jpeg --set image.shorter_side=256",
        "--set output.on_error=skip",
    ),
)


def tune(job: TuneJob, form: Form) -> None:
    """Do the job; print the best values and what to do with them.

    Raises:
        TrainingFailed: no trial came to its end.
    """
    from sparkdl.cli.spark_session import make_session
    from sparkdl.cli.tune.search import run_tune

    spark = make_session(job.spark, "sparkdl tune")
    try:
        report = run_tune(job, spark)
    finally:
        spark.stop()
    counts = ", ".join(f"{number} {state}" for state, number in report.states.items() if number)
    print(f"\ntrials: {counts}")
    if report.best is None:
        raise TrainingFailed(f"no trial came to its end; see trial.json of each in {report.path}")
    print("\n".join(_lines(job, report, form)))


def _lines(job: TuneJob, report: TuneReport, form: Form) -> list[str]:
    from sparkdl.cli.tune.search import folder_of

    assert report.best is not None
    settings = " ".join(f"--set '{key}={value}'" for key, value in report.params.items())
    path = f"{report.path.rstrip('/')}/{folder_of(report.best)}/model"
    rows = "--set data.path=ROWS" if form is Form.COMMAND else "--config conf/evaluate.toml"
    return [
        f"best: trial {report.best}, {job.study.metric} {report.value:.6g}",
        *(f"  {key} = {value}" for key, value in report.params.items()),
        f"\nmodel: {path}",
        "next:",
        f"  {form.start_of('evaluate')} {rows} --set model.path={path}",
        f"  {form.start_of('train')} --config FILE {settings}",
    ]


TUNE = JobCommand(
    name="tune",
    kind=TuneJob,
    action=tune,
    description="Search for the values of hyperparameters that train best, as a job file says.",
    config="conf/tune.toml",
    starter="tune.toml",
    settings=("--set study.trials=10",),
)


def explain(job: TrainJob, form: Form) -> None:
    """Print the plan of the job, and what to expect of it."""
    from sparkdl.cli.jobs import run_explain
    from sparkdl.cli.spark_session import make_session

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


def train(job: TrainJob, form: Form) -> None:
    """Do the job; print the result and what to do with it."""
    from sparkdl.cli.jobs import run_train
    from sparkdl.cli.spark_session import make_session

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
