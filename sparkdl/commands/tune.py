"""How does a search for hyperparameters look from a shell?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.cli import Form, JobCommand
from sparkdl.errors import TrainingFailed
from sparkdl.studyfile import TuneJob

if TYPE_CHECKING:
    from sparkdl.tuning import TuneReport


def tune(job: TuneJob, form: Form) -> None:
    """Do the job; print the best values and what to do with them.

    Raises:
        TrainingFailed: no trial came to its end.
    """
    from sparkdl.spark.starting import make_session
    from sparkdl.tuning import run_tune

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
    from sparkdl.tuning import folder_of

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
