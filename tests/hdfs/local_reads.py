"""A driver program: trains on row groups of HDFS, and prints who has read how much, and where.

Usage: local_reads.py MASTER ADDRESS FOLDER HDFS_URL WEBHDFS_URL

What it prints last is JSON. Of each fit: the hosts of the shards, and for each executor's host how
many bytes have come in by its network card and by its loopback during the fit, and how many its
data node has read.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import nn

from sparkdl import ParquetSource, TorchRegressor
from sparkdl.data.source import Wanted
from sparkdl.spark.frames import row_table
from sparkdl.storage.blocks import Blocks, locate_blocks, nowhere
from sparkdl.storage.hadoop_storage import open_on_driver
from tests.data.sources.test_parquet import FEATURES
from tests.faults.cluster import session
from tests.hdfs.daemons import METRICS_SECONDS, bytes_read

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILES = 12
ROWS = 40_000
"""Of a file."""
WIDTH = 16
EPOCHS = 2


def main(master: str, address: str, folder: str, url: str, webhdfs_url: str) -> None:
    """Train with and without what the name node tells."""
    spark = session(master, address, Path(folder), **{"spark.hadoop.dfs.replication": "1"})
    write(spark, f"{url}/rows")
    source = ParquetSource(f"{webhdfs_url}/rows")
    found = {"blocks": blocks(spark, url, webhdfs_url)}
    regressor(1).fit(source)  # what is done once a session is not counted
    found["explained"] = regressor(1).explain(source, calibrate=False).notes
    counts = [counted(spark)]
    found["local"] = fit(spark, source, counts)
    row_table.locate_blocks = lambda spark, *place: nowhere(*place)  # type: ignore[attr-defined]
    found["anywhere"] = fit(spark, source, counts)
    print(json.dumps(found), flush=True)
    spark.stop()


def write(spark: SparkSession, url: str) -> None:
    """Files of random numbers, of which each host has half: the name node places them by chance."""
    numbers, storage = np.random.default_rng(0), open_on_driver(spark, url)
    num_files: Counter[object] = Counter()
    for file in range(FILES):
        x = numbers.normal(size=(ROWS, WIDTH)).astype("float32")
        table = pa.table({"x": list(x), "y": x.sum(axis=1)})
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, row_group_size=ROWS // 2)
        name, data = f"part-{file:02}.parquet", sink.getvalue().to_pybytes()
        for _ in range(60):
            storage.write(name, data)
            (blocks,) = locate_blocks(spark, url, (f"/rows/{name}",)).values()
            place = blocks[0].hosts
            if num_files[place] < FILES // 2:
                break
            storage.remove(name)
        num_files[place] += 1
    assert list(num_files.values()) == [FILES // 2] * 2


def blocks(spark: SparkSession, url: str, webhdfs_url: str) -> list[Any]:
    """What Hadoop's FileSystem tells of all files, and what WebHDFS does."""
    paths = tuple(f"/rows/part-{file:02}.parquet" for file in range(FILES))
    by_hadoop, by_web = (locate_blocks(spark, f"{u}/rows", paths) for u in (url, webhdfs_url))
    return [described(by_hadoop), described(by_web)]


def described(found: Blocks) -> dict[str, Any]:
    return {
        path: [[block.start, block.stop, sorted(block.hosts)] for block in several]
        for path, several in found.items()
    }


def regressor(epochs: int) -> TorchRegressor:
    return TorchRegressor(
        module=partial(nn.Linear, WIDTH, 1), featuresCol="x", labelCol="y", epochs=epochs,
        numWorkers=2, batchSize=20_000, learningRate=0.001, seed=1, verbose=0,
    )  # fmt: skip


Counts = dict[str, dict[str, int]]


def fit(spark: SparkSession, source: ParquetSource, counts: list[Counts]) -> dict[str, Any]:
    """Train; what went through each executor's host since the last of ``counts``, which grow."""
    locate = partial(row_table.locate_blocks, spark)
    wanted = Wanted(columns=(FEATURES,), validation=None, num_shards=2, locate=locate)
    hosts = [list(shard.hosts) for shard in source.contents(wanted).shards]
    rows = regressor(EPOCHS).fit(source).summary.rows
    counts.append(counted(spark))
    before, after = counts[-2:]
    went = {
        host: {what: after[host][what] - before[host][what] for what in ("eth0", "lo", "disk")}
        for host in after
    }
    return {"rows": rows, "hosts": hosts, "bytes": went}


def counted(spark: SparkSession) -> Counts:
    """Bytes by each network card of each executor's host, and of its data node."""

    def ask(_: Iterator[int]) -> Iterator[tuple[str, dict[str, int]]]:
        time.sleep(METRICS_SECONDS)
        lines = Path("/proc/net/dev").read_text().splitlines()[2:]
        cards = {line.split(":")[0].strip(): int(line.split(":")[1].split()[0]) for line in lines}
        host = socket.gethostname()
        yield host, {**cards, "disk": bytes_read(host)}

    return dict(spark.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(ask).collect())


if __name__ == "__main__":
    main(*sys.argv[1:])
