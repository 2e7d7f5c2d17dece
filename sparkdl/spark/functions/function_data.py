"""The data sets of a function: the columns of their batches, and their shards."""

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
from sparkdl.spark.cluster.slots import Slots
from sparkdl.spark.frames.choose_windows import windows_of_spool
from sparkdl.spark.frames.columns import Prepared
from sparkdl.spark.frames.row_table import RowTable, SpooledShard, TableSpec
from sparkdl.spark.frames.several_frames import DatasetTable
from sparkdl.spark.frames.shard_table import columns_of
from sparkdl.spark.frames.specified_columns import prepare_named
from sparkdl.spark.frames.user_data import UserData
from sparkdl.spark.session.compat import conf, is_case_sensitive
from sparkdl.worker.loader import DataSet

logger = logging.getLogger(__name__)

Data = DataFrame | Source
Inputs = Mapping[str, Specification]


def prepare_sets(
    data: Mapping[str, UserData], inputs: Inputs | None
) -> dict[str, tuple[Prepared, ...]]:
    """The columns of each data set, with the names that they have in a batch.

    Args:
        data: the data sets by name.
        inputs: columns of a batch by name; None: all columns of each data set.

    Raises:
        DataError: a data set lacks a column, or no tensor can be made of one.
        ConfigError: a source cannot do what an input asks for.
    """
    found = {}
    for name, rows in data.items():
        try:
            found[name] = _prepare(rows, inputs)
        except (DataError, ConfigError) as error:
            raise type(error)(f"data set {name!r}: {error}") from error
    return found


def _prepare(rows: UserData, inputs: Inputs | None) -> tuple[Prepared, ...]:
    wanted = {name: Tensor(name) for name in rows.frame.columns} if inputs is None else inputs
    if not wanted:
        raise DataError("there is no column of which a batch could be made")
    entries = named(wanted)
    rows.check_inputs(entries)
    sensitive = is_case_sensitive(rows.spark)
    return tuple(
        prepare_named(
            rows.frame.schema, entry, "feature", float_dtype="float32", is_case_sensitive=sensitive
        )
        for entry in entries
    )


def warn_of_skipped(name: str, data: DataSet, shards: Sequence[SpooledShard]) -> None:
    """Tell the user which rows of a data set are left out, as an input asked for it."""
    names = [column.name for column in data.columns]
    num_rows, causes = skipped_rows(names, [part.summary for part in shards])
    if num_rows:
        logger.warning("data set %r goes without %d row(s): %s", name, num_rows, causes)


def data_set(table: RowTable) -> DataSet:
    """What workers need to know of a source's shards."""
    shards = table.collect()
    return DataSet(
        columns=table.columns(shards),
        shards=tuple(part.shard for part in shards),
        source=table.reader,
    )


class DataSets:
    """The run's data sets, in shards that lie where their worker will be."""

    def __init__(
        self,
        spark: SparkSession,
        data: Mapping[str, UserData],
        prepared: Mapping[str, tuple[Prepared, ...]],
        run_id: str,
        slots: Slots,
    ) -> None:
        """Describe them; nothing is read yet."""
        self._spark = spark
        self._prepared = prepared
        self._slots = slots
        self._has_warned = False
        frames = {name: rows.frame for name, rows in data.items() if rows.source is None}
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
            name: rows.table(
                TableSpec(columns=prepared[name], num_shards=slots.num_workers), run_id
            )
            for name, rows in data.items()
            if rows.source is not None
        }

    @property
    def df(self) -> DataFrame:
        """One row per worker, where its shards lie."""
        if self._table is not None:
            return self._table.df
        return self._spark.range(0, self._slots.num_workers, 1, self._slots.num_workers)

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
                if not self._has_warned:
                    warn_of_skipped(name, data, shards)
        self._has_warned = True
        for name, table in self._sources.items():
            found[name] = data_set(table)
        return found

    def _with_windows(self, data: DataSet, shards: tuple[SpooledShard, ...]) -> DataSet:
        plan = data.plan(self._slots.num_workers, batch_size=1)
        get = partial(conf, self._spark)
        return replace(data, windows=windows_of_spool(plan, shards, self._slots.cluster, get, None))

    def rebuild(self) -> None:
        """Forget all spools, so that they are written anew."""
        if self._table is not None:
            self._table.rebuild()

    def close(self) -> None:
        """Remove all spools."""
        if self._table is not None:
            self._table.close()
