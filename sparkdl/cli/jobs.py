"""The work behind the commands that take a job file: a job and a session in, a report out."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BinaryType, MapType, StructType

from sparkdl.cli.job_files.job_file import DataSection, EvaluateJob, PredictJob, TrainJob
from sparkdl.cli.job_files.job_objects import VALIDATION_COLUMN, make_estimator
from sparkdl.cli.job_files.places import refuse_model, refuse_rows, require_saved
from sparkdl.cli.job_files.prepare_file import PrepareJob
from sparkdl.cli.job_files.study_file import TuneJob
from sparkdl.cli.job_files.toml_values import to_tables
from sparkdl.errors import ConfigError, DataError, StorageError
from sparkdl.explain.explanation import Explanation
from sparkdl.inference.scores import Evaluation
from sparkdl.report.summary import TrainingSummary
from sparkdl.runtime.activity import doing
from sparkdl.spark.frames.columns import find, quoted, schema_of
from sparkdl.spark.inference.output_columns import vectors_to_arrays
from sparkdl.spark.params.stage_metadata import check_place, is_there, load_instance
from sparkdl.spark.session.failures import raise_unless_loss
from sparkdl.spark.session.interrupts import interruptible
from sparkdl.spark.session.stage_progress import working
from sparkdl.storage.hadoop_storage import open_on_driver, open_parent
from sparkdl.storage.storage import Storage, check_writable, without_password

if TYPE_CHECKING:
    from sparkdl.cli.images.ledger import Report
    from sparkdl.tuning.tune import TuneResult

logger = logging.getLogger(__name__)

REPORT_DIR = "runs"
"""Folder in which jobs leave their reports, unless they say otherwise."""


@dataclass(frozen=True, kw_only=True)
class TrainReport:
    """The results of a training job."""

    path: str
    summary: TrainingSummary
    scores: Evaluation | None
    """On the rows of ``[test]``, of the model as it was saved."""


def run_train(job: TrainJob, spark: SparkSession) -> TrainReport:
    """Train as the job says, save and evaluate the model; raises first what can be seen first."""
    with _working(spark, "looking at the rows and at the output's place"):
        estimator = make_estimator(job)
        refuse_model(job, lambda place: is_there(place, spark))
        check_place(job.output.path, spark)
        if job.estimator.report_dir is None and can_report(spark):
            estimator.set(estimator.getParam("reportDir"), REPORT_DIR)
        test = read_data(spark, job.test) if job.test is not None else None
        rows = read_training_data(spark, job)
    model = estimator.fit(rows)
    with _working(spark, "saving the model"):
        writer = model.write()
        (writer.overwrite() if job.output.overwrite else writer).save(job.output.path)
        scores = None
        if test is not None:
            doing("testing the model on held-out rows")
            kind: Any = type(model)
            saved = kind.read().trusting(*_packages_of(job)).load(job.output.path)
            scores = saved.evaluate(test)
    return TrainReport(path=job.output.path, summary=model.summary, scores=scores)


@contextmanager
def _working(spark: SparkSession, what: str) -> Iterator[None]:
    """Show what the block does, and let Ctrl-C cancel its Spark jobs before it ends the block."""
    with interruptible(spark), working(spark, what):
        yield


def _packages_of(job: TrainJob) -> set[str]:
    """The packages whose code a job names, which its author trusts."""
    references = [
        text for text in _texts(to_tables((job.model, job.estimator.given))) if ":" in text
    ]
    names = {text.partition(":")[0].partition(".")[0] for text in references}
    return {name for name in names if name.isidentifier()}


def _texts(value: Any) -> Iterator[str]:
    """The texts in tables and lists, without the names of keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def can_report(spark: SparkSession) -> bool:
    """Return True if the report, for which nobody asked, can be left in `REPORT_DIR`; else warn."""
    try:
        check_writable(open_on_driver(spark, REPORT_DIR))
    except StorageError as error:
        logger.warning(
            "the run will leave no report, since %s; say where with estimator.report_dir", error
        )
        return False
    return True


def run_explain(job: TrainJob, spark: SparkSession) -> Explanation:
    """Explain what the job would do, its time, and what would be better; see docs/explain.md."""
    with working(spark, "looking at the rows"):
        estimator: Any = make_estimator(job)
        rows = read_training_data(spark, job)
        explanation: Explanation = estimator.explain(rows, **vars(job.explain))
    return explanation


def run_tune(job: TuneJob, spark: SparkSession) -> TuneResult[Any]:
    """Search as the job says, and keep all trials under ``output.path``; see `tune`."""
    from sparkdl.tuning.space import Chooser
    from sparkdl.tuning.study import StudyOptions, make_pruner
    from sparkdl.tuning.tune import tune_made

    section = job.study
    options = StudyOptions(
        name=section.name,
        trials=section.trials,
        parallel=section.parallel,
        monitors=(section.metric,),
        modes=("min" if section.direction == "minimize" else "max",),
        sampler=section.sampler,
        pruner=make_pruner(
            section.pruner,
            startup_trials=section.startup_trials,
            warmup_epochs=section.warmup_epochs,
        ),
        seed=section.seed,
        storage=section.storage,
    )

    def make(values: Mapping[str, Any]) -> Any:
        return make_estimator(job.trial(values))

    chooser = Chooser({key: space.domain for key, space in section.search.items()})
    with _working(spark, "looking at the rows"):
        rows = read_training_data(spark, job)
    return tune_made(make, chooser, rows, options, job.output.path)


def run_evaluate(job: EvaluateJob, spark: SparkSession) -> Evaluation:
    """Compare a saved model's predictions with the labels; write the numbers if asked to."""
    output = None if job.output is None else _file_at(job.output.path)
    section = job.evaluation
    columns = {"labelCol": section.label_col, "weightCol": section.weight_col}
    given = {param: name for param, name in columns.items() if name is not None}
    with _working(spark, "loading the model"):
        model = load_model(spark, job.model.path)
        scores: Evaluation = model.evaluate(read_data(spark, job.data), **given)
    if output is not None:
        storage, name = output
        storage.write(name, (json.dumps(scores.to_dict(), indent=2) + "\n").encode())
    return scores


def run_predict(job: PredictJob, spark: SparkSession) -> DataFrame:
    """Write a saved model's predictions, vectors as arrays; returns the rows that were written."""
    with _working(spark, "loading the model"):
        predictions = load_model(spark, job.model.path).transform(read_data(spark, job.data))
        rows = _choose_columns(vectors_to_arrays(predictions), job.output.columns)
        if job.output.format == "csv":
            _check_csv(rows)
        refuse_rows(job, lambda place: is_there(place, spark))
        doing("predicting and writing the rows")
        writer = rows.write.format(job.output.format).mode(job.output.mode)
        writer.options(**job.output.options).save(job.output.path)
    reader = spark.read.format(job.output.format).options(**job.output.options)
    return reader.schema(rows.schema).load(job.output.path)


def run_prepare(job: PrepareJob, spark: SparkSession) -> Report:
    """Make Parquet of a folder of image files; see `images.prepare`."""
    from sparkdl.cli.images.prepare import prepare

    table = None if job.labels.table is None else read_data(spark, job.labels.table)
    with interruptible(spark):
        return prepare(spark, job, table)


def read_data(spark: SparkSession, section: DataSection) -> DataFrame:
    """The rows that a data section describes; raises DataError if they or columns are not there."""
    try:
        if section.format == "table":
            rows = spark.read.options(**section.options).table(str(section.table))
        else:
            reader = spark.read.format(section.format).options(**section.options)
            if section.schema is not None:
                reader = reader.schema(section.schema)
            path = section.path
            rows = reader.load(list(path) if isinstance(path, tuple) else path)
        # Spark Connect looks at neither path nor expressions before somebody asks.
        rows = rows.selectExpr(*section.select) if section.select else rows
        rows.schema  # noqa: B018
    except AnalysisException as error:
        what = section.table or section.path
        cause = str(error).strip().splitlines()[0]
        if error.getCondition() == "UNABLE_TO_INFER_SCHEMA":
            cause = f"it has no {section.format} files; name the folder that they lie in"
        text = f"cannot read {what!r}: {cause}"
        raise DataError(without_password(text)) from error
    except Exception as error:  # Spark reads some formats to find the columns
        raise_unless_loss(error)
        raise
    return rows


def read_training_data(spark: SparkSession, job: TrainJob) -> DataFrame:
    """The rows of ``[data]``; with ``validation.path`` also those, which a column marks."""
    rows = read_data(spark, job.data)
    if job.validation is None or job.validation.path is None:
        return rows
    apart = read_data(spark, replace(job.data, path=job.validation.path))
    return rows.withColumn(VALIDATION_COLUMN, F.lit(False)).unionByName(
        apart.withColumn(VALIDATION_COLUMN, F.lit(True))
    )


def load_model(spark: SparkSession, path: str) -> Any:
    """A saved model of whatever class; raises StorageError if there is none at ``path``."""
    require_saved(path, lambda place: is_there(place, spark))
    return load_instance(path, spark)


def _file_at(path: str) -> tuple[Storage, str]:
    """The folder of a path or URL, which can be written to, and the file's name in it."""
    storage, name = open_parent(path)
    if not name:
        raise ConfigError(
            f"output.path must name a file; received {without_password(path)!r}; write it like "
            "runs/scores.json"
        )
    check_writable(storage)
    return storage, name


def _choose_columns(rows: DataFrame, columns: tuple[str, ...]) -> DataFrame:
    schema = schema_of(rows)
    unknown = [name for name in columns if not find(schema, name)]
    if unknown:
        raise ConfigError(
            f"output.columns names {unknown}, which are not there; known: {', '.join(rows.columns)}"
        )
    return rows.select(*map(quoted, columns)) if columns else rows


def _check_csv(rows: DataFrame) -> None:
    nested = ArrayType | MapType | StructType | BinaryType
    wrong = [item.name for item in rows.schema.fields if isinstance(item.dataType, nested)]
    if wrong:
        raise ConfigError(
            f"CSV cannot hold the columns {wrong}; name the others in output.columns, or choose "
            f"another output.format"
        )
