"""How fast does a DataFrame become batches? The first pass (spool), later epochs, and memory.

The first pass is measured of rows that are dealt by their hash, and of the DataFrame's own
partitions, which need no shuffle.

Later epochs are random batches from the memory-mapped spool, in one process. They are compared
with the least that any loader must do: ``torch.index_select`` of a batch from tensors in memory.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import uuid
from functools import partial
from pathlib import Path

import common
import torch
from common import CLASSES, PIXELS, Measurements, SmallCNN, images, read_images, seconds

from sparkdl import TorchClassifier
from sparkdl.data.batches import Batches
from sparkdl.data.plan import TrainPlan, make_plan
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.data.spool.spool_source import open_spool
from sparkdl.runtime.process import tuned_allocator
from sparkdl.spark.fit.check_request import prepare_columns
from sparkdl.spark.frames.own_partitions import choose_shards, frame_facts
from sparkdl.spark.frames.row_table import TableSpec
from sparkdl.spark.frames.shard_table import ShardTable

ROW_BYTES = PIXELS + 8


def main() -> None:
    """Measure, several times in turn."""
    options = common.arguments(
        7, rows=(240_000, "images"), batch=(64, "rows per batch"), slots=(2, "of Spark, and shards")
    )
    folder = images(options.rows)
    torch.set_num_threads(1)
    found = Measurements()
    spark = common.spark_session(options.slots)
    gigabytes = options.rows * ROW_BYTES / 1e9
    for run in range(-1, options.runs):  # the first is a warm-up
        common.wait_until_idle(options.patience)
        df = spark.read.parquet(str(folder))
        scan = seconds(lambda df=df: df.write.format("noop").mode("overwrite").save())
        own = own_partitions(df, options)
        unmoved = seconds(own.collect)
        own.close()
        table, prepare = prepared_table(df, options)
        spool = seconds(prepare)
        if run >= 0:
            found.add("Spark scan GB/s", gigabytes / scan)
            found.add("first pass (spool) GB/s", gigabytes / spool)
            found.add("first pass of own partitions GB/s", gigabytes / unmoved)
        if run + 1 < options.runs:
            table.close()
    found.ratio(
        "own partitions / rows that are dealt",
        "first pass of own partitions GB/s",
        "first pass (spool) GB/s",
    )
    spooled = table.collect()
    plan = partial(
        make_plan,
        columns=table.columns(spooled),
        shards=[part.shard for part in spooled],
        batch_size=options.batch,
        epochs=1,
    )
    later_epochs(plan(world_size=options.slots), "one shard", folder, options, found)
    later_epochs(plan(world_size=1), f"{options.slots} shards", folder, options, found)
    table.close()
    found.report("data", options)
    spark.stop()


def prepared_table(df, options: argparse.Namespace):
    """A shard table, and the call that spools it."""
    table = table_of(df, num_shards=options.slots)
    return table, table.collect


def own_partitions(df, options: argparse.Namespace) -> ShardTable:
    """The table of a fit with ``shards="partitions"``, which moves no row."""
    choice = choose_shards(
        "partitions", frame_facts(df), num_parts=options.slots, num_executors=1,
        num_workers=options.slots, num_files=2,
    )  # fmt: skip
    assert choice.pieces is not None, choice
    return table_of(
        df, num_shards=choice.num_places * choice.pieces, num_places=choice.num_places,
        pieces=choice.pieces, is_gang=False,
    )  # fmt: skip


def table_of(df, **spec) -> ShardTable:
    """A shard table of the images and their labels."""
    classifier = TorchClassifier(module=SmallCNN(), featuresCol="image", labelCol="label")
    columns, _ = prepare_columns(df, classifier._request(), "float32")
    return ShardTable(df, TableSpec(columns=tuple(columns), **spec), run_id=uuid.uuid4().hex[:12])


def later_epochs(
    plan: TrainPlan, name: str, folder: Path, options: argparse.Namespace, found: Measurements
) -> None:
    """Rank 0's epochs from the spool against index_select in memory, in turn."""
    shards = opened(plan)
    epoch, rows = partial(from_spool, shards, plan), plan.rows_of(0)
    with multiprocessing.get_context("spawn").Pool(1) as fresh:
        memory = fresh.apply(memory_of_epoch, (plan,))
    found.add(f"{name}, memory beyond the mapped spool MB", memory / 1e6)
    epoch(0, prefetch=True)  # touches the pages, as the first epoch of a fit does
    memory = tuple(column[:rows].clone() for column in read_images(folder))
    gigabytes = rows * ROW_BYTES / 1e9
    plain, ahead = f"{name}, index_select in memory GB/s", f"{name}, later epochs GB/s"
    alone = f"{name}, later epochs without thread GB/s"
    with tuned_allocator():  # as in a worker
        for run in range(options.runs):
            common.wait_until_idle(options.patience)
            found.add(plain, gigabytes / seconds(partial(from_memory, memory, options.batch)))
            found.add(ahead, gigabytes / seconds(partial(epoch, run, prefetch=True)))
            found.add(alone, gigabytes / seconds(partial(epoch, run, prefetch=False)))
    found.ratio(f"{name}, later epochs / index_select", ahead, plain)
    found.ratio(f"{name}, without thread / index_select", alone, plain)


def opened(plan: TrainPlan) -> list[MappedRows]:
    """Rank 0's shards, mapped into memory."""
    found = []
    for shard in plan.shards_of(0):
        path, rows, known = Path(shard.path), shard.num_rows, shard.fingerprint
        found.append(
            open_spool(path, plan.columns, num_rows=rows, split="train", fingerprint=known)
        )
    return [MappedRows(shard, plan) for shard in found]


def memory_of_epoch(plan: TrainPlan) -> int:
    """Most memory beyond files' pages that an epoch adds to a fresh process, after a first one.

    One batch is drawn before, which loads the code it needs.
    """
    torch.set_num_threads(1)
    shards = opened(plan)
    next(iter(Batches(shards, plan, 0, seed=0, epoch=0, prefetch=False)))
    gc.collect()
    before = most = anonymous_bytes()
    for step, _ in enumerate(Batches(shards, plan, 0, seed=0, epoch=1)):
        if step % 50 == 0:
            most = max(most, anonymous_bytes())
    return most - before


def from_spool(shards: list[MappedRows], plan: TrainPlan, number: int, *, prefetch: bool) -> None:
    """All batches of an epoch."""
    rows = 0
    for batch in Batches(shards, plan, 0, seed=0, epoch=number, prefetch=prefetch):
        rows += len(batch.inputs[0])
    assert rows == plan.rows_of(0)


def from_memory(memory: tuple[torch.Tensor, torch.Tensor], batch_size: int) -> None:
    """The same with tensors in memory."""
    pixels, labels = memory
    for positions in torch.randperm(len(labels)).split(batch_size):
        picked = torch.index_select(pixels, 0, positions), torch.index_select(labels, 0, positions)
        assert len(picked[0]) <= batch_size
    assert int(labels.max()) < CLASSES


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
