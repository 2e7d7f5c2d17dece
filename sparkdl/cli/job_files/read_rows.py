"""The rows that the sections ``[data]``, ``[validation]`` and ``[test]`` name, as DataFrames."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from sparkdl.cli.job_files.job_file import DataSection, TrainJob
from sparkdl.cli.job_files.job_objects import VALIDATION_COLUMN
from sparkdl.errors import DataError
from sparkdl.spark.session.failures import raise_unless_loss
from sparkdl.storage.storage import without_password

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


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
        text = f"cannot read {what!r}: {str(error).strip().splitlines()[0]}"
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
