"""How does the preparation of image files look from a shell?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.cli import Form, JobCommand
from sparkdl.prepare.options import PrepareJob

if TYPE_CHECKING:
    from sparkdl.prepare.ledger import Report

_BAD_FILES_SHOWN = 5
_CLASSES_SHOWN = 12


def prepare(job: PrepareJob, form: Form) -> None:
    """Do the job; print what was made and how to train on it."""
    from sparkdl.job import run_prepare
    from sparkdl.spark.starting import make_session

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
    from sparkdl.prepare.ledger import BAD_FILES

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
