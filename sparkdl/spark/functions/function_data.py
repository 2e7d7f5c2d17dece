"""Which data sets has a function, what do their batches hold, and where do their shards lie?"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from pyspark.sql import DataFrame, SparkSession

from sparkdl.data.column_stats import skipped_rows
from sparkdl.data.source import Source
from sparkdl.data.spool.spool_source import SpoolSource
from sparkdl.errors import ConfigError, DataError
from sparkdl.inputs import Specification, Tensor, named
from sparkdl.spark.cluster.cluster_info import inspect_cluster
from sparkdl.spark.cluster.slots import Slots
from sparkdl.spark.fit.checks import check_skipping
from sparkdl.spark.frames.choose_windows import with_windows
from sparkdl.spark.frames.columns import Prepared
from sparkdl.spark.frames.several_frames import DatasetTable
from sparkdl.spark.frames.shard_table import SpooledShard, columns_of
from sparkdl.spark.frames.source_table import SourceTable, empty_frame
from sparkdl.spark.frames.specified_columns import prepare_named
from sparkdl.spark.session.compat import conf, is_case_sensitive
from sparkdl.worker.loader import DataSet

logger = logging.getLogger(__name__)

Data = DataFrame | Source
Inputs = Mapping[str, Specification]


def prepare_sets(
    spark: SparkSession, data: Mapping[str, Data], inputs: Inputs | None
) -> dict[str, tuple[Prepared, ...]]:
    """The columns of each data set, with the names that they have in a batch.

    Args:
        spark: the session.
        data: the data sets by name.
        inputs: columns of a batch by name; None: all columns of each data set.

    Raises:
        DataError: a data set lacks a column, or no tensor can be made of one.
        ConfigError: a source cannot do what an input asks for.
    """
    found = {}
    for name, one in data.items():
        try:
            found[name] = _prepare(spark, one, inputs)
        except (DataError, ConfigError) as error:
            raise type(error)(f"data set {name!r}: {error}") from error
    return found


def _prepare(spark: SparkSession, data: Data, inputs: Inputs | None) -> tuple[Prepared, ...]:
    frame = data if isinstance(data, DataFrame) else empty_frame(spark, data)
    wanted = {name: Tensor(name) for name in frame.columns} if inputs is None else inputs
    if not wanted:
        raise DataError("there is no column of which a batch could be made")
    entries = named(wanted)
    if not isinstance(data, DataFrame):
        check_skipping(data, entries)
    sensitive = is_case_sensitive(spark)
    return tuple(
        prepare_named(
            frame.schema, entry, "feature", float_dtype="float32", is_case_sensitive=sensitive
        )
        for entry in entries
    )


def warn_of_skipped(name: str, data: DataSet, shards: Sequence[SpooledShard]) -> None:
    """Tell the user which rows of a data set are left out, as an input asked for it."""
    names = [column.name for column in data.columns]
    num_rows, causes = skipped_rows(names, [part.summary for part in shards])
    if num_rows:
        logger.warning("data set %r goes without %d row(s): %s", name, num_rows, causes)


def source_table(
    spark: SparkSession, source: Source, prepared: Sequence[Prepared], num_shards: int
) -> SourceTable:
    """The shards of a data set that workers read by themselves."""
    return SourceTable(spark, source, prepared, None, num_shards=num_shards, shares=None)


class DataSets:
    """The run's data sets, in shards that lie where their worker will be."""

    def __init__(
        self,
        spark: SparkSession,
        data: Mapping[str, Data],
        prepared: Mapping[str, tuple[Prepared, ...]],
        run_id: str,
        slots: Slots,
    ) -> None:
        """Describe them; nothing is read yet."""
        self._spark = spark
        self._prepared = prepared
        self._num_workers = slots.num_workers
        self._is_told = False
        frames = {name: df for name, df in data.items() if isinstance(df, DataFrame)}
        self._table: DatasetTable | None = None
        if frames:
            self._table = DatasetTable(
                frames,
                prepared,
                num_shards=slots.num_workers,
                run_id=run_id,
                profile=slots.profile,
            )
        self._sources = {
            name: source_table(spark, source, prepared[name], slots.num_workers)
            for name, source in data.items()
            if not isinstance(source, DataFrame)
        }

    @property
    def df(self) -> DataFrame:
        """One row per worker, where its shards lie."""
        if self._table is not None:
            return self._table.df
        return self._spark.range(0, self._num_workers, 1, self._num_workers)

    def collect(self) -> dict[str, DataSet]:
        """Spool what is not there, and list it.

        Raises:
            DataError: rows cannot be used, or have changed since the first call.
        """
        found = {}
        if self._table is not None:
            for name, shards in self._table.collect().items():
                columns = columns_of(self._prepared[name], shards)
                data = DataSet(
                    columns=columns,
                    shards=tuple(part.shard for part in shards),
                    source=SpoolSource(),
                )
                found[name] = self._with_windows(data, shards)
                if not self._is_told:
                    warn_of_skipped(name, data, shards)
        self._is_told = True
        for name, table in self._sources.items():
            shards = table.collect()
            found[name] = DataSet(
                columns=table.columns(shards),
                shards=tuple(part.shard for part in shards),
                source=table.reader,
            )
        return found

    def _with_windows(self, data: DataSet, shards: tuple[SpooledShard, ...]) -> DataSet:
        plan = data.plan(self._num_workers, batch_size=1)
        info, entry = inspect_cluster(self._spark), partial(conf, self._spark)
        return replace(data, windows=with_windows(plan, shards, info, entry, None).windows)

    def rebuild(self) -> None:
        """Forget all spools, so that they are written anew."""
        if self._table is not None:
            self._table.rebuild()

    def close(self) -> None:
        """Remove all spools."""
        if self._table is not None:
            self._table.close()
