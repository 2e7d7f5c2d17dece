"""Make Parquet of a folder of image files, as a job file says; a killed run goes on."""

from __future__ import annotations

import sys

from sparkdl.cli import run_job
from sparkdl.job import make_session, run_prepare
from sparkdl.prepare.ledger import BAD_FILES, Report
from sparkdl.prepare.options import PrepareJob

BAD_FILES_SHOWN = 5
CLASSES_SHOWN = 12


def prepare(job: PrepareJob) -> None:
    """Do the job; print what was made and how to train on it."""
    spark = make_session(job.spark, "sparkdl prepare")
    try:
        report = run_prepare(job, spark)
    finally:
        spark.stop()
    print("\n".join(lines(report)))


def lines(report: Report) -> list[str]:
    """The report for a terminal."""
    text = [f"\n{report.path}"]
    for split, rows in report.rows.items():
        files = report.files[split]
        text.append(f"  {split:<10} {rows:>9,} images in {files:,} file{'s' * (files != 1)}")
    classes = report.rows_by_label.get("train", {})
    if classes:
        text.append(f"  labels: {len(classes)} classes, numbered in this order")
        shown = list(classes.items())[:CLASSES_SHOWN]
        text += [f"    {n:>3} {name:<20} {rows:>9,}" for n, (name, rows) in enumerate(shown)]
        text += [f"    ... all in {report.path}/labels.json"] * (len(classes) > CLASSES_SHOWN)
    if report.bad:
        text.append(f"  {len(report.bad):,} bad files skipped, listed in {BAD_FILES}:")
        text += [f"    {path}: {why}" for path, why in report.bad[:BAD_FILES_SHOWN]]
        text += [f"    and {len(report.bad) - BAD_FILES_SHOWN:,} more"] * (
            len(report.bad) > BAD_FILES_SHOWN
        )
    text.append("next:")
    sections = {"train": "data", "validation": "validation", "test": "test"}
    settings = [f"--set {sections[split]}.path={report.path}/{split}" for split in report.rows]
    if classes:
        settings.append(f"--set model.args.num_classes={len(classes)}")
    command = "spark-submit jobs/train.py --config conf/images.toml"
    return [*text, " \\\n      ".join([f"  {command}", *settings])]


if __name__ == "__main__":
    sys.exit(
        run_job(
            PrepareJob,
            prepare,
            description=__doc__.splitlines()[0],
            example="\n  ".join(
                f"spark-submit jobs/prepare.py --config conf/prepare.toml{settings}"
                for settings in (
                    "",
                    " --set data.path=hdfs:///photos --set output.path=hdfs:///prepared",
                    " --set image.encoding=jpeg --set image.shorter_side=256",
                    " --set output.on_error=skip",
                )
            ),
        )
    )
