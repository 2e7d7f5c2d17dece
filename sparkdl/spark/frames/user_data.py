"""The data that a user gives: a DataFrame, or a source that workers read by themselves.

`UserData` is the one place that asks which of the two they are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import PySparkRuntimeError
from pyspark.ml.linalg import VectorUDT
from pyspark.ml.param import Params
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type

from sparkdl.config import TrainConfig
from sparkdl.data.plan import SpoolColumn, TrainPlan
from sparkdl.data.source import Source
from sparkdl.errors import ClusterError, ConfigError, DataError
from sparkdl.inputs import Named
from sparkdl.spark.cluster.cluster_info import require_plain_files
from sparkdl.spark.frames.first_rows import FirstLook
from sparkdl.spark.frames.frame_sample import Sample, take_sample
from sparkdl.spark.frames.row_table import RowTable, SourceTable, TableSpec
from sparkdl.spark.frames.shard_table import LocalTable, ShardTable
from sparkdl.spark.session.compat import conf
from sparkdl.spark.session.failures import raise_if_ended
from sparkdl.spark.session.settings import Settings
from sparkdl.sync.population.population import Competition
from sparkdl.sync.strategy import SyncStrategy
from sparkdl.train.state import check_monitored

if TYPE_CHECKING:
    import pandas as pd

Data = DataFrame | Source
_ROW_METADATA = b"org.apache.spark.sql.parquet.row.metadata"
"""Key of the metadata in which Spark notes the types of the columns that it writes."""
_VECTOR = "pyspark.ml.linalg.VectorUDT"
_WIDER = {
    pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(),
    pa.uint64(): pa.int64(), pa.float16(): pa.float32(),
}  # fmt: skip
"""Type that Spark does not have -> the type that takes its values."""


@dataclass(frozen=True, kw_only=True)
class UserData:
    """Data to train on. Nothing is read before a table of it is collected."""

    spark: SparkSession
    frame: DataFrame
    """The rows; of a source an empty DataFrame with its columns, by which Params are checked."""
    source: Source | None = None
    """None: the rows are those of ``frame``, which executors spool to their disks."""

    def check_files(self, settings: Settings) -> None:
        """Refuse to spool where Spark encrypts its local files; raises ClusterError."""
        if self.source is None:
            require_plain_files(partial(conf, self.spark), settings)

    def check_inputs(self, entries: Iterable[Named]) -> None:
        """Refuse to leave out rows of a source, whose number is known; raises ConfigError."""
        if self.source is not None and any(entry.specification.skips for entry in entries):
            raise ConfigError(
                f"on_error='skip' changes the number of rows, which {type(self.source).__name__} "
                "must know before training; mend the images, or use a DataFrame"
            )

    def check_training(
        self, config: TrainConfig, validation: str | float | None, *, has_logs: bool
    ) -> None:
        """Refuse what needs validation rows that are not there, or a spool; raises ConfigError.

        ``validation`` is the column that marks rows for validation, or their fraction.
        """
        if self.source is None:
            check_monitored(config, has_validation=validation is not None, has_logs=has_logs)
            return
        name = type(self.source).__name__  # only its rows show whether some are for validation
        if isinstance(validation, float):
            raise ConfigError(
                f"validationFraction draws rows of a DataFrame; {name} has an option of its own, "
                "such as ParquetSource(validation_fraction=...)"
            )
        if config.group_by_length:
            raise ConfigError(
                f"groupByLength needs the lengths of all rows, which {name} does not know; fit on "
                "a DataFrame"
            )
        if config.shuffle_window_bytes is not None:
            raise ConfigError(
                f"shuffleWindowBytes is for DataFrames; {name} has options of its own"
            )

    def check_plan(self, plan: TrainPlan, strategy: SyncStrategy) -> None:
        """Refuse a competition on a source without validation rows; raises ConfigError."""
        is_blind = self.source is not None and not plan.num_validation_rows
        if is_blind and isinstance(strategy, Competition):
            raise ConfigError(
                f"{type(strategy).__name__} measures models on rows that are not trained on, and "
                f"{type(self.source).__name__} has none; give it a validation_fraction, mark rows "
                "with validationIndicatorCol, or fit on a DataFrame"
            )

    def first_look(self, spec: TableSpec, run_id: str) -> FirstLook | None:
        """A look at the first rows; None: a source is not looked at."""
        return None if self.source is not None else FirstLook(self.frame, spec, run_id)

    def sample(self, spec: TableSpec, seconds: float) -> Sample | None:
        """Some of the rows, see `take_sample`; None: a source tells everything without them."""
        if self.source is not None:
            return None
        return take_sample(self.frame, spec.columns, spec.validation, seconds)

    def table(self, spec: TableSpec, run_id: str) -> RowTable:
        """The table of a run's shards, named by its id; whoever makes it closes it."""
        if self.source is None:
            return ShardTable(self.frame, spec, run_id=run_id)
        return SourceTable(self.spark, self.source, spec)

    def table_here(
        self, columns: tuple[SpoolColumn, ...], directory: Path
    ) -> LocalTable | SourceTable:
        """The only shard of a run in this process, which is spooled to the directory, if at all."""
        spec = TableSpec(columns=columns, num_shards=1)
        if self.source is None:
            return LocalTable(self.frame, spec, directory)
        return SourceTable(self.spark, self.source, spec)


def user_data(data: Any) -> UserData:
    """A DataFrame, or a source, as the data of a run; raises ConfigError if it is neither."""
    data = spark_frame(data)
    require_data(data)
    if isinstance(data, DataFrame):
        return UserData(spark=data.sparkSession, frame=data)
    spark = active_session()
    return UserData(spark=spark, frame=empty_frame(spark, data), source=data)


def spark_frame(data: Any) -> Any:
    """A pandas DataFrame as one of the active session's (see `arrow_table`); others as they are."""
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(data, pandas.DataFrame):
        return data
    return active_session().createDataFrame(arrow_table(data))


def arrow_table(data: pd.DataFrame) -> pa.Table:
    """A pandas DataFrame as a table of types that Spark has; raises DataError if it has others."""
    try:
        table = pa.Table.from_pandas(data, preserve_index=False)
        fields = [field.with_type(_of_spark(field.type)) for field in table.schema]
        table = table.cast(pa.schema(fields))
        from_arrow_schema(table.schema)  # raises where Spark will, such as of periods
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(
            f"a column of the pandas DataFrame cannot be read: {error}; give each column a name of "
            "its own, and values of one type that Arrow and Spark know, or leave it out"
        ) from None
    untyped = [f'"{field.name}"' for field in table.schema if pa.types.is_null(field.type)]
    if untyped and not table.num_rows:
        raise DataError(
            f"the pandas DataFrame has no rows, so the type of column {', '.join(untyped)} is not "
            "known; check where it comes from, or give its columns types (astype)"
        )
    return table


def _of_spark(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(_of_spark(kind.value_type))
    return _WIDER.get(kind, kind)


def rows_of(data: Any, *, needs_table: str | None = None) -> DataFrame:
    """The rows to which a model is applied; raises ConfigError if it is no DataFrame.

    ``needs_table`` names what cannot be done with the rows of a stream.
    """
    frame = spark_frame(data)
    if not isinstance(frame, DataFrame):
        raise ConfigError(
            "a model takes a DataFrame of Spark or pandas; received "
            f"{_described(data, takes_source=False)}{_in_columns(data)}"
        )
    raise_if_ended(frame.sparkSession)
    if needs_table is not None:
        refuse_stream(frame, needs_table)
    return frame


def require_data(data: Any) -> None:
    """Refuse what is neither a table nor a source; raises ConfigError."""
    # DataFrames first: they have an attribute for each column, whatever its name.
    if isinstance(data, DataFrame):
        refuse_stream(data, "fit")
    elif isinstance(data, type | Column) or not isinstance(data, Source):
        raise ConfigError(
            "fit takes a DataFrame of Spark or pandas, or a source such as sparkdl.ParquetSource; "
            f"received {_described(data)}{_in_columns(data)}"
        )


def _described(data: Any, *, takes_source: bool = True) -> str:
    """Say what was given for data, and what to do with it where that is known."""
    if isinstance(data, type):
        return f"the class {data.__name__}; pass an object of it, {data.__name__}(...)"
    kind = type(data).__name__
    if isinstance(data, Column):
        return "a Column, which has an attribute for whatever name; pass the DataFrame it is of"
    if isinstance(data, list | tuple) and data and isinstance(data[0], DataFrame):
        return f"a {kind} of DataFrames; pass one: train, test = df.randomSplit([0.8, 0.2])"
    if type(data).__module__.startswith("pyspark.pandas"):
        return f"a {kind} of pandas on Spark; pass what its to_spark() gives"
    if isinstance(data, str):
        source = " and sparkdl.ParquetSource(path) read" if takes_source else " reads"
        table = "spark.table(name) a table or a view"
        return f"{kind}; spark.read.parquet(path){source} files, and {table}"
    packages = [one.__module__.partition(".")[0] for one in type(data).__mro__]
    if takes_source and "torch" in packages and not _is_array(data):
        return f"{kind}; sparkdl.DatasetSource(function) takes what makes a dataset"
    return f"{kind}; rdd.toDF(names) makes a DataFrame" if kind.endswith("RDD") else kind


def refuse_stream(frame: DataFrame, what: str) -> None:
    """Raise ConfigError if the rows of a DataFrame are a stream, which ``what`` cannot take."""
    if frame.isStreaming:
        raise ConfigError(
            f"this is a stream, and {what} needs a table: use foreachBatch, which gives the rows "
            "of a stream as tables (stream.writeStream.foreachBatch(function).start())"
        )


def check_params(owner: Params, params: Any) -> None:
    """Refuse what are no values by Param, such as the labels of ``fit(X, y)``; ConfigError.

    So are Params of another estimator, which Spark would leave out without a word.
    """
    several = params if isinstance(params, list | tuple) else [params]
    if params is not None and not all(isinstance(one, dict) for one in several):
        remedy = _JOINED
        if isinstance(params, DataFrame):
            remedy = (
                "; rows for validation go into the same one, with a boolean column that marks them "
                "(validationIndicatorCol), or are drawn from it (validationFraction=0.1)"
            )
        raise ConfigError(
            f"{type(owner).__name__} takes one DataFrame with all columns, and Params as a dict; "
            f"received {type(params).__name__} as the second argument{remedy}"
        )
    for param in {param: None for one in several for param in one or ()}:
        if isinstance(param, str):
            raise ConfigError(
                f"the keys are Params, and {param!r} is a name; write {{estimator.{param}: ...}} "
                f"with the name of your {type(owner).__name__} in place of estimator"
            )
        if getattr(param, "parent", owner.uid) != owner.uid:
            raise ConfigError(
                f"the Param {param.name} of {param.parent} is none of {owner.uid}, which is to be "
                "fitted; take the Params of that one"
            )


_JOINED = "; put inputs and labels together: pandas.DataFrame({'features': list(X), 'label': y})"


def _is_array(value: Any) -> bool:
    """True for arrays, series and tensors."""
    return hasattr(value, "__array__")


def _in_columns(data: Any) -> str:
    """Return how to give arrays, or lists of rows."""
    is_of_frames = isinstance(data, list | tuple) and data and isinstance(data[0], DataFrame)
    is_of_rows = _is_array(data) or isinstance(data, list | tuple)
    return _JOINED if is_of_rows and not is_of_frames else ""


def spooled_and_read(
    data: Mapping[str, UserData],
) -> tuple[dict[str, DataFrame], dict[str, Source]]:
    """The data sets that executors spool, and those that workers read by themselves."""
    frames = {name: rows.frame for name, rows in data.items() if rows.source is None}
    sources = {name: rows.source for name, rows in data.items() if rows.source is not None}
    return frames, sources


def session_of(data: Items[Data]) -> SparkSession | None:
    """The session of the first DataFrame, else the active one if there are data at all."""
    frames = (one.sparkSession for one in data if isinstance(one, DataFrame))
    return next(frames, None) or (active_session() if data else None)


def described(data: Data) -> str:
    """Without running a job, as a notebook's ``repr`` of a DataFrame may, nor showing secrets."""
    if isinstance(data, DataFrame):
        return f"DataFrame[{', '.join(f'{name}: {kind}' for name, kind in data.dtypes)}]"
    place = getattr(data, "path", getattr(data, "url", None))
    return f"{type(data).__name__}({'' if place is None else repr(place)})"


def active_session() -> SparkSession:
    """The session for a fit that gets no DataFrame; raises ClusterError."""
    try:
        return SparkSession.active()  # or the default one: each thread has its own active session
    except PySparkRuntimeError as error:
        raise ClusterError(
            "there is no active Spark session to train with; make one by "
            "SparkSession.builder.getOrCreate() before fit"
        ) from error


def empty_frame(spark: SparkSession, source: Source) -> DataFrame:
    """A DataFrame without rows that has the source's columns."""
    schema = source.schema()
    metadata = json.loads((schema.metadata or {}).get(_ROW_METADATA, b"{}"))
    noted = {field["name"]: field["type"] for field in metadata.get("fields", [])}
    fields = [T.StructField(f.name, _spark_type(f.type, noted.get(f.name))) for f in schema]
    return spark.createDataFrame([], T.StructType(fields))


def _spark_type(kind: pa.DataType, noted: Any) -> T.DataType:
    """The Spark type of a column, of which Spark has ``noted`` what Parquet cannot tell."""
    if isinstance(noted, dict) and noted.get("pyClass") == _VECTOR:
        return VectorUDT()
    if pa.types.is_struct(kind):
        inner = noted.get("fields", []) if isinstance(noted, dict) else []
        types = {field["name"]: field["type"] for field in inner}
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return T.StructType(
            [T.StructField(f.name, _spark_type(f.type, types.get(f.name))) for f in fields]
        )
    if pa.types.is_list(kind):
        return T.ArrayType(_spark_type(kind.value_type, None))
    try:
        return from_arrow_type(kind)
    except Exception:  # pyspark's own, for types that Spark has not; only a wanted column matters
        return T.NullType()
