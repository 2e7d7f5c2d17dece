"""The data sets of a function: the columns of their batches, and their shards.

The shards of all DataFrames are spooled in one stage, whose tasks write the same of every data set:
workers of one stage cannot be where the tasks of several others happened to run.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl.data.column_stats import SpooledShard
from sparkdl.data.plan import SpoolColumn
from sparkdl.data.shuffle_windows import Windows
from sparkdl.errors import ConfigError, DataError
from sparkdl.inputs import Specification, Tensor, named
from sparkdl.spark.cluster.slots import Slots
from sparkdl.spark.frames import deal_rows, shard_table
from sparkdl.spark.frames.columns import schema_of
from sparkdl.spark.frames.example_rows import UserRows
from sparkdl.spark.frames.prepare_columns import prepare
from sparkdl.spark.frames.row_table import (
    Origin,
    SourceTable,
    TableSpec,
    slots_for,
    spool_columns,
)
from sparkdl.spark.frames.spool_task import SpoolTask
from sparkdl.spark.frames.user_data import UserData, spooled_and_read
from sparkdl.spark.run.placement import is_fixed
from sparkdl.spark.session.compat import conf
from sparkdl.spark.session.settings import session_settings
from sparkdl.worker.function_loader import DataSet

logger = logging.getLogger(__name__)

Inputs = Mapping[str, Specification]


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Errors of the block say which data set they are about."""
    try:
        yield
    except (DataError, ConfigError) as error:
        raise type(error)(f"data set {name!r}: {error}") from error


def prepare_sets(
    data: Mapping[str, UserData], inputs: Inputs | None
) -> dict[str, tuple[SpoolColumn, ...]]:
    """The columns of each data set, by their names in a batch; raises DataError or ConfigError."""
    found = {}
    for name, rows in data.items():
        with naming(name):
            found[name] = _prepare(rows, inputs)
    return found


def _prepare(rows: UserData, inputs: Inputs | None) -> tuple[SpoolColumn, ...]:
    wanted = {name: Tensor(name) for name in rows.frame.columns} if inputs is None else inputs
    if not wanted:
        raise DataError("there is no column of which a batch could be made")
    entries = named(wanted)
    rows.check_inputs(entries)
    schema = schema_of(rows.frame)
    return tuple(prepare(schema, entry, "feature", float_dtype="float32") for entry in entries)


def data_set(
    name: str,
    table: shard_table.SpooledRows | SourceTable,
    shards: Sequence[SpooledShard],
    *,
    warns: bool = True,
) -> DataSet:
    """Return what workers need to know of a data set; warns of rows that are left out."""
    columns = table.columns(shards)
    num_rows, causes = table.skipped(shards) if warns else (0, "")
    if num_rows:
        logger.warning("data set %r goes without %d row(s): %s", name, num_rows, causes)
    return DataSet(
        columns=columns, shards=tuple(part.shard for part in shards), source=table.reader
    )


def local_data_sets(
    data: Mapping[str, UserData], inputs: Inputs | None, folder: Path
) -> dict[str, DataSet]:
    """The data sets of a function in this process; those that are spooled lie in the folder."""
    found = {}
    for number, (name, columns) in enumerate(prepare_sets(data, inputs).items()):
        with naming(name):
            table = data[name].table_here(columns, folder / f"spool-{number}")
            found[name] = data_set(name, table, table.collect())
    return found


class DataSets(shard_table.SpoolTable):
    """The run's data sets, in shards that lie where their worker will be.

    Numbers of shards are meant in all data sets.
    """

    origin: Origin = "dealt"

    def __init__(
        self,
        spark: SparkSession,
        data: Mapping[str, UserData],
        prepared: Mapping[str, tuple[SpoolColumn, ...]],
        run_id: str,
        slots: Slots,
        num_shards: int | None = None,
        num_readers: int | None = None,
    ) -> None:
        """Describe them; nothing is read yet.

        ``num_readers`` workers read different rows, each of them a shard if ``num_shards`` is None;
        None: all do.
        """
        places = num_readers or slots.num_workers
        super().__init__(spark, run_id=run_id, num_places=places)
        self._slots = slots
        self._num_shards = num_shards or slots.max_workers or places
        self._windows: dict[str, Windows | None] = {}
        settings = session_settings(spark)
        seconds = settings.heartbeat_timeout_seconds
        specs = {
            name: TableSpec(
                columns=columns,
                num_shards=self._num_shards,
                num_places=places,
                # Where workers come and go shards move to them, and no stage may need all slots.
                at_once=is_fixed(slots, places),
                is_barrier=slots.is_barrier,
                profile=slots.profile,
                heartbeat_timeout_seconds=seconds,
                queue_timeout_seconds=settings.queue_timeout_seconds,
            )
            for name, columns in prepared.items()
        }
        frames, sources = spooled_and_read(data)
        self._spools = {
            name: shard_table.SpooledRows(specs[name], UserRows(df, prepared[name]))
            for name, df in frames.items()
        }
        self._sources = {
            name: SourceTable(spark, source, specs[name]) for name, source in sources.items()
        }
        self.df = slots_for(spark, slots.num_workers)
        if frames:
            spec = next(iter(specs.values()))  # equal but for the columns
            task = SpoolTask(
                run_id=run_id,
                sets=tuple(spool_columns(prepared[name]) for name in frames),
                shards_by_place=spec.shards_by_place,
                heartbeat_timeout_seconds=seconds,
            )
            self._describe(partial(_spread, frames, specs), task, spec)

    def begin(self) -> None:
        """Have Spark begin to spool the DataFrames, if there are any."""
        if self._spools:
            super().begin()

    def collect(self) -> dict[str, DataSet]:
        """Spool what is not there, and list it, as `RowTable.collect` does."""
        spooled = self._spooled(len(self._spools)) if self._spools else []
        for table in self._sources.values():
            table.collect()
        return self._checked(spooled)

    def _checked(self, spooled: Sequence[tuple[SpooledShard, ...]]) -> dict[str, DataSet]:
        for (name, rows), shards in zip(self._spools.items(), spooled, strict=True):
            with naming(name):
                rows.checked(shards)
        return self.known

    @property
    def known(self) -> dict[str, DataSet]:
        """The data sets as they were seen last."""
        found, get = {}, partial(conf, self._spark)
        for name, rows in self._spools.items():
            with naming(name):
                data = data_set(name, rows, rows.known, warns=name not in self._windows)
                if name not in self._windows:  # the order of rows stays, whoever goes on
                    plan = data.plan(self.num_places, batch_size=1)
                    self._windows[name] = shard_table.windows_of_spool(
                        plan, rows.known, self._slots.cluster, get, None
                    )
                found[name] = replace(data, windows=self._windows[name])
        for name, table in self._sources.items():
            found[name] = data_set(name, table, table.known)
        return found

    def restore(self, num_workers: int) -> tuple[dict[str, DataSet], DataFrame]:
        """See `RowTable.restore`."""
        shards = [part.shard for rows in self._spools.values() for part in rows.known]
        if shards and (table := self._to_follow(num_workers, self._num_shards)):
            return self._checked(self._spooled(len(self._spools), table)), table
        if shards:
            missing = self._nowhere(shards, num_workers, is_barrier=self._slots.is_barrier)
            if missing:
                self.remake(missing)
        return self.known, slots_for(self._spark, num_workers)

    def is_scattered(self, num_workers: int) -> bool:
        """See `RowTable.is_scattered`."""
        return False

    def forget(self) -> None:
        """See `RowTable.forget`."""
        if self._spools:
            super().forget()

    def _remake(self, missing: Collection[int]) -> None:
        if not self._spools:
            return
        made_anew = self._made_anew(missing or range(self._num_shards))
        for (name, rows), made in zip(self._spools.items(), made_anew, strict=True):
            with naming(name):
                rows.checked_with(made)

    def close(self) -> None:
        if self._spools:
            super().close()


def _spread(
    data: Mapping[str, DataFrame],
    specs: Mapping[str, TableSpec],
    shards_by_place: deal_rows.ShardsByPlace | None,
) -> DataFrame:
    """The rows of all data sets in one frame: ``set``, ``set0``, ``set1``, ..., ``hash``."""
    if len(data) == 1:
        ((name, df),) = data.items()
        return deal_rows.spread(df, specs[name], shards_by_place)
    frames = [deal_rows.selected(df, specs[name].columns) for name, df in data.items()]
    types = [df.select(F.struct(*df.columns).alias("row")).schema["row"].dataType for df in frames]
    parts = []
    for number, df in enumerate(frames):
        structs = [
            (F.struct(*df.columns) if other == number else F.lit(None).cast(data_type)).alias(
                f"set{other}"
            )
            for other, data_type in enumerate(types)
        ]
        row_hash = F.xxhash64(*df.columns).alias("hash")
        parts.append(df.select(F.lit(number).alias("set"), *structs, row_hash))
    united = reduce(lambda above, below: above.unionAll(below), parts)
    order = ["set", "hash", *(f"set{number}" for number in range(len(frames)))]
    return deal_rows.dealt(united, next(iter(specs.values())), order, shards_by_place)
