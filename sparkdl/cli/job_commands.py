"""The commands that do what a job file says: `sparkdl train`, `spark-submit jobs/train.py`."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from importlib import resources
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from sparkdl.cli import completion
from sparkdl.cli.command_line import Command, run
from sparkdl.cli.job_files.job_file import (
    DataSection,
    EvaluateJob,
    PredictJob,
    SparkSection,
    TrainJob,
    brings_modules,
    load_job,
)
from sparkdl.cli.job_files.job_objects import in_file_words
from sparkdl.cli.job_files.places import (
    IsThere,
    here,
    refuse_model,
    refuse_rows,
    require_model,
    require_rows,
)
from sparkdl.cli.job_files.prepare_file import PrepareJob
from sparkdl.cli.job_files.study_file import TuneJob
from sparkdl.report.live.views import activity_view, showing
from sparkdl.runtime.console_log import log_to_console
from sparkdl.spark.session.termination import named_at_termination

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sparkdl.cli.images.ledger import Report
    from sparkdl.cli.jobs import TrainReport
    from sparkdl.inference.scores import Evaluation
    from sparkdl.tuning.tune import TuneResult


T = TypeVar("T", bound=TrainJob | EvaluateJob | PredictJob | PrepareJob)

_CHECK = "sparkdl.cli.job_files.job_objects:check_training"

_SETTING_HELP = (
    "set one key of the job file; VALUE is a TOML value or, failing that, a string; may be given "
    "several times"
)
_EXPLAIN_HELP = "only print the plan, the time that it would take, and what would be better"
_ROWS_SHOWN, _CLASSES_SHOWN, _BAD_FILES_SHOWN = 5, 12, 5
_LEVELS = "DEBUG, INFO, WARNING, ERROR"
_CELL_COLUMNS = 8, 20
"""Least and most columns of the terminal for a value of a row; 20 is Spark's own."""


class Form(Enum):
    """The way the user has started a job, hence how they would start the next one."""

    SCRIPT = "spark-submit {}"
    COMMAND = "sparkdl {}"

    def start_of(self, name: str) -> str:
        """The beginning of the command line of the job ``name``."""
        own = name if self is Form.COMMAND else shlex.quote(beside_script(f"jobs/{name}.py"))
        return self.value.format(own)


def beside_script(path: str) -> str:
    """Return ``path`` of the repository of the started script, seen from the working folder.

    The path stays as it is where the started program lies in no such place.
    """
    script = Path(sys.argv[0])
    found = script.parent.parent / path
    return os.path.relpath(found) if script.parent.name == "jobs" and found.exists() else path


@dataclass(frozen=True, kw_only=True)
class JobCommand(Generic[T]):
    """A command that a TOML file describes."""

    name: str
    kind: type[T]
    """The job's class; its fields are the sections of the file."""
    work: str
    """``module:function`` that gets the job and a Spark session; imported when it is called."""
    show: Callable[[T, Any, Form], None]
    """Prints what ``work`` returned, while the session lasts."""
    description: str
    config: str = "conf/{}.toml"
    """A file of ``conf/``, for the examples of the script; ``{}`` stands for the name."""
    starter: str = "{}.toml"
    """The job file to begin with, among those in ``starters/``, in the same way."""
    settings: tuple[str, ...] = ("",)
    """Text that follows the file in each example, such as ``--set estimator.epochs=5``."""
    check: str | None = None
    """``module:function`` that refuses values of a job which its types allow; None: there is none.
    """
    needs: tuple[Callable[[T, IsThere], None], ...] = (require_rows,)
    """The checks of the things that a job needs, before Spark starts."""
    explain: JobCommand[T] | None = None
    """Command that runs in its place with ``--explain``; None: there is no such option."""

    def command(self, form: Form) -> Command:
        """The command as the user starts it."""
        option, flag = click.Option, partial(click.Option, is_flag=True)
        options: list[click.Parameter] = [
            option(
                ["--config"],
                metavar="FILE",
                help="the job file (TOML)",
                shell_complete=completion.job_files,
            ),
            option(
                ["--set", "settings"],
                multiple=True,
                metavar="SECTION.KEY=VALUE",
                help=_SETTING_HELP,
                shell_complete=lambda _, __, prefix: list(completion.settings(self.kind, prefix)),
            ),
            flag(["--starter"], help="print a job file to begin with, and end"),
            flag(["--keys"], help="print the keys of the job file, and end"),
            *([flag(["--explain"], help=_EXPLAIN_HELP)] if self.explain is not None else []),
            option(
                ["--log-level"],
                default="WARNING",
                metavar="LEVEL",
                help=f"of sparkdl's log lines: {_LEVELS} (default: WARNING)",
            ),
        ]
        command = Command(
            self.name,
            callback=partial(self._run, form),
            params=options,
            help=self.description,
            epilog=self.examples(form),
        )
        command.words = in_file_words
        command.keys = partial(completion.keys_meant, self.kind)
        return command

    def examples(self, form: Form) -> str:
        """Last lines of ``--help``."""
        file = (self.config if form is Form.SCRIPT else self.starter).format(self.name)
        start = f"{form.start_of(self.name)} --config {file}"
        lines = [f"{start} {settings}".rstrip() for settings in self.settings]
        if form is Form.COMMAND:
            lines.insert(0, f"{form.start_of(self.name)} --starter > {file}")
        return "example:\n" + "\n".join(f"  {line}" for line in lines)

    def _run(
        self,
        form: Form,
        config: str | None,
        settings: Sequence[str],
        log_level: str,
        starter: bool,
        keys: bool,
        explain: bool = False,
    ) -> None:
        file = self.starter.format(self.name)
        if starter:
            text = resources.files("sparkdl.cli") / "starters" / file
            print(text.read_text(encoding="utf-8"), end="")
            return
        if keys:
            from sparkdl.cli.job_files.key_reference import as_text

            print("\n".join(as_text(self.kind, shutil.get_terminal_size().columns)).lstrip())
            return
        level = log_level.upper()
        if level not in logging.getLevelNamesMapping():
            raise click.UsageError(f"unknown --log-level {log_level}; known: {_LEVELS}")
        start = form.start_of(self.name)
        if config is None and not settings:
            raise click.UsageError(
                f"a job file is needed: name it with --config FILE; '{start} --starter > "
                f"{file}' writes one to begin with"
            )
        log_to_console(level)
        chosen = self.explain if self.explain is not None and explain else self
        with showing("checking the job file", partial(activity_view, has_lines=False)):
            job = chosen.load(config, settings)
        with named_at_termination(start):
            chosen.do(job, form)

    def load(self, path: str | None, settings: Sequence[str]) -> T:
        """The job, whose values are checked before Spark is started if they can be."""
        if self.check is None or brings_modules(load_job(self.kind, path, settings).spark):
            return load_job(self.kind, path, settings)
        return load_job(self.kind, path, settings, resolve_name(self.check))

    def do(self, job: T, form: Form) -> None:
        """Do the job in a session of its own, and print what came of it."""
        for check in self.needs:
            check(job, here(job.spark))
        with showing("starting Spark"):
            from sparkdl.cli.job_files.spark_session import make_session

            work = resolve_name(self.work)
            spark = make_session(job.spark, f"sparkdl {self.name}")
        try:
            self.show(job, work(job, spark), form)
        finally:
            sys.stdout.flush()
            with showing("stopping Spark", partial(activity_view, has_lines=False)):
                spark.stop()


def _show_scores(job: EvaluateJob, scores: Evaluation, form: Form) -> None:
    from sparkdl.storage.storage import without_password

    print("\n".join(scores.lines()))
    if job.output is not None:
        print(f"\nwritten to {without_password(job.output.path)}")


EVALUATE = JobCommand(
    name="evaluate",
    kind=EvaluateJob,
    work="sparkdl.cli.jobs:run_evaluate",
    show=_show_scores,
    description="Measure how good a saved model's predictions are, as a job file says.",
    settings=("", "--set model.path=models/other"),
    needs=(require_model, require_rows),
)


def _show_rows(job: PredictJob, written: DataFrame, form: Form) -> None:
    from sparkdl.spark.session.interrupts import interruptible

    with interruptible(written.sparkSession):
        print(f"{written.count():,} rows in {job.output.path}, among them:")
        width = (shutil.get_terminal_size().columns - 1) // len(written.columns) - 1
        written.show(_ROWS_SHOWN, truncate=min(_CELL_COLUMNS[1], max(_CELL_COLUMNS[0], width)))


PREDICT = JobCommand(
    name="predict",
    kind=PredictJob,
    work="sparkdl.cli.jobs:run_predict",
    show=_show_rows,
    description="Write a saved model's predictions for the rows that a job file names.",
    settings=("", "--set output.format=json --set output.path=runs/predictions-json"),
    needs=(require_model, require_rows, refuse_rows),
)


def prepared_lines(report: Report, form: Form) -> list[str]:
    """Return a terminal's lines on what was made of a folder of images, and how to train on it."""
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
    if report.bad:
        text.append(f"  {len(report.bad):,} bad files skipped, listed in bad_files.jsonl:")
        text += [f"    {path}: {why}" for path, why in report.bad[:_BAD_FILES_SHOWN]]
        hidden = len(report.bad) - _BAD_FILES_SHOWN
        text += [f"    and {hidden:,} more"] * (hidden > 0)
    sections = {"train": "data", "validation": "validation", "test": "test"}
    settings = [f"--set {sections[split]}.path={report.path}/{split}" for split in report.rows]
    if classes:
        settings.append(f"--set model.args.num_classes={len(classes)}")
    file = "FILE" if form is Form.COMMAND else shlex.quote(beside_script("conf/images.toml"))
    command = " \\\n      ".join([f"  {form.start_of('train')} --config {file}", *settings])
    return [*text, "next:", command]


PREPARE = JobCommand(
    name="prepare",
    kind=PrepareJob,
    work="sparkdl.cli.jobs:run_prepare",
    show=lambda job, report, form: print("\n".join(prepared_lines(report, form))),
    description=(
        "Make Parquet of a folder of image files, as a job file says; a killed run goes on."
    ),
    settings=(
        "",
        "--set data.path=hdfs:///photos --set output.path=hdfs:///prepared",
        "--set image.encoding=jpeg --set image.shorter_side=256",
        "--set output.on_error=skip",
    ),
)


def _show_search(job: TuneJob, found: TuneResult[Any], form: Form) -> None:
    """Print the best values and what to do with them."""
    states = found.to_dict()["states"]
    best = found.best
    settings = " ".join(f"--set '{key}={value}'" for key, value in best.params.items())
    path = best.model_path
    rows = "--set data.path=ROWS"
    if form is Form.SCRIPT:
        rows = f"--config {shlex.quote(beside_script('conf/evaluate.toml'))}"
    rows = " ".join([rows, *rows_settings(job.data)])
    print(f"\ntrials: {', '.join(f'{number} {state}' for state, number in states.items())}")
    print(f"best: trial {best.number}, {job.study.metric} {found.best_value:.6g}")
    for key, value in best.params.items():
        print(f"  {key} = {value}")
    print(f"\nmodel: {path}\nnext:")
    print(f"  {form.start_of('evaluate')} {rows} --set model.path={path}")
    print(f"  {form.start_of('train')} --config FILE {settings}")


def _require_optuna(job: TuneJob, is_there: IsThere) -> None:
    from sparkdl.tuning.study import import_optuna

    import_optuna()


TUNE = JobCommand(
    name="tune",
    kind=TuneJob,
    work="sparkdl.cli.jobs:run_tune",
    show=_show_search,
    description="Search for the values of hyperparameters that train best, as a job file says.",
    settings=("--set study.trials=10",),
    check="sparkdl.cli.job_files.study_file:check_search",
    needs=(require_rows, _require_optuna),
)


EXPLAIN = JobCommand(
    name="explain",
    kind=TrainJob,
    work="sparkdl.cli.jobs:run_explain",
    show=lambda job, explanation, form: print("\n".join(explanation.lines())),
    description="Print what a training job will do, and how long it will take, before it runs.",
    config="conf/digits.toml",
    starter="train.toml",
    settings=(
        "",
        "--set estimator.num_workers=8",
        "--set explain.num_rows=1000000 --set explain.count_seconds=300",
    ),
    check=_CHECK,
)


def _show_training(job: TrainJob, report: TrainReport, form: Form) -> None:
    summary = report.summary
    epochs = summary.history[-1]["epoch"]
    print(
        f"\ntrained {epochs:.4g} epoch{'s' * (epochs != 1)} ({summary.steps:,} steps) on "
        f"{summary.workers_text} in {summary.seconds:.0f} s, restarts: "
        f"{summary.restarts}"
    )
    if summary.weights_of is not None:
        print(f"weights of {summary.weights_of}\n  {summary.weights_of.values_text()}")
    if report.scores is not None:
        print("\nheld-out rows:")
        print("\n".join(f"  {line}".rstrip() for line in report.scores.lines()))
    print(f"\nmodel: {report.path}")
    if summary.report_path is not None:
        print(f"report: {summary.report_path}")
    print(f"next{options_to_repeat(form)}:")
    commands = next_commands(report.path, form, job.data, job.spark)
    print("\n".join(f"  {command}" for command in commands))


def options_to_repeat(form: Form) -> str:
    """Return what to add to the printed commands, where spark-submit was given a cluster."""
    from pyspark import SparkConf

    is_submitted = form is Form.SCRIPT and "PYSPARK_GATEWAY_PORT" in os.environ
    if not is_submitted or SparkConf().get("spark.master", "local").startswith("local"):
        return ""
    return ", with the --master, --properties-file and other options of this spark-submit"


def rows_settings(data: DataSection) -> list[str]:
    """The ``--set`` by which rows like those of training become what the model takes."""
    named = {item.name: getattr(data, item.name) for item in fields(data)}
    usual = {item.name: item.default for item in fields(data)}
    settings = [f"data.options.{key}={json.dumps(value)}" for key, value in data.options.items()]
    settings += [
        f"data.{key}={json.dumps(named[key])}"
        for key in ("format", "schema", "select")
        if named[key] != usual[key] and named[key] != "table"
    ]
    return [f"--set {shlex.quote(setting)}" for setting in settings]


def next_commands(
    path: str, form: Form, data: DataSection, spark: SparkSection | None = None
) -> list[str]:
    """Return the commands that a user would run now, from the shell that ran this job."""
    model, rows = f"--set model.path={shlex.quote(path)}", rows_settings(data)
    if spark is not None and spark.master is not None:
        rows.append(f"--set {shlex.quote(f'spark.master={spark.master}')}")
    if form is Form.COMMAND:
        given = " ".join([model, "--set data.path=ROWS", *rows])
        return [
            f"sparkdl evaluate {given}",
            f"sparkdl predict {given} --set output.path=NEW",
            f"sparkdl export {shlex.quote(path)} model.onnx",
        ]
    commands = []
    for name in ("evaluate", "predict"):
        file = shlex.quote(beside_script(f"conf/{name}.toml"))
        commands.append(" ".join([form.start_of(name), f"--config {file}", model, *rows]))
    # make runs the Python of .venv without activating it in the user's shell.
    if sys.prefix != sys.base_prefix and "VIRTUAL_ENV" not in os.environ:
        folder = os.path.relpath(sys.prefix, Path.cwd())
        settings = shlex.quote(beside_script("conf"))
        commands.insert(0, f"source {folder}/bin/activate && export SPARK_CONF_DIR={settings}")
    return commands


TRAIN = JobCommand(
    name="train",
    kind=TrainJob,
    work="sparkdl.cli.jobs:run_train",
    show=_show_training,
    description=(
        "Train a PyTorch model as a job file says, save it, and test it on rows it has never seen."
    ),
    config="conf/digits.toml",
    settings=("--set estimator.epochs=5", "--set 'spark.master=local[2]'", "--explain"),
    check=_CHECK,
    needs=(require_rows, refuse_model),
    explain=EXPLAIN,
)


def run_job(job: JobCommand[Any], arguments: Sequence[str] | None = None) -> int:
    """Do a job as a script of ``jobs/``; returns the exit status, see `command_line.run`."""
    return run(job.command(Form.SCRIPT), arguments)
