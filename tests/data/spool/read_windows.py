"""Reads an epoch in a process of its own, and prints how much memory that took.

Arguments: directory of the spool, rows, bytes per row, JSON of the windows (or null), what to read.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from sparkdl.data.batches import Batches, sequential_batches
from sparkdl.data.plan import Column, Shard, TrainPlan, make_plan
from sparkdl.data.shuffle_windows import Windows
from sparkdl.data.spool.mapped import MappedRows, ShardData
from sparkdl.data.spool.spool_source import open_spool


def main() -> None:
    directory, num_rows, row_bytes, windows, what = sys.argv[1:]
    torch.set_num_threads(1)
    columns = (Column(name="x", role="feature", dtype="uint8", shape=(int(row_bytes),)),)
    spool = open_spool(
        Path(directory), columns, num_rows=int(num_rows), split="train", fingerprint="a"
    )
    shard = Shard(
        shard_id=0, host="", path=directory, num_rows=int(num_rows), num_validation_rows=0,
        fingerprint="a", num_bytes=int(num_rows) * int(row_bytes),
    )  # fmt: skip
    plan = make_plan(columns=columns, shards=[shard], world_size=1, batch_size=64, epochs=1)
    chosen = json.loads(windows)
    plan = replace(plan, windows=None if chosen is None else Windows(**chosen))
    shards = [spool]
    warm_up(columns)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = status("VmRSS")
    total = read(shards, plan, what)
    print(json.dumps({"peak": status("VmHWM") - before, "left": status("RssFile"), "sum": total}))


def read(shards: list[ShardData], plan: TrainPlan, what: str) -> int:
    """Sum of all values, so that every row is looked at."""
    rows = [MappedRows(shard, plan) for shard in shards]
    source = Batches(rows, plan, 0, seed=0, epoch=0)
    batches = sequential_batches(rows, plan) if what == "validation" else source
    return sum(int(batch.inputs[0].sum(dtype=torch.int64)) for batch in batches)


def warm_up(columns: tuple[Column, ...]) -> None:
    """Load the code that reading needs."""
    shard = Shard(
        shard_id=0, host="", path="", num_rows=4, num_validation_rows=0, fingerprint="", num_bytes=0
    )
    plan = make_plan(columns=columns, shards=[shard], world_size=1, batch_size=2, epochs=1)
    rows = torch.zeros((4, *columns[0].shape), dtype=torch.uint8)
    windows = Windows(group_rows=1, groups_together=2)
    read([ShardData("", {"feature x": rows})], replace(plan, windows=windows), "train")


def status(name: str) -> int:
    """A line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
