"""The windows in which a run mixes its rows, by the memory of its hosts."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

from sparkdl.data.column_stats import SpooledShard
from sparkdl.data.plan import TrainPlan
from sparkdl.data.shuffle_windows import HostLoad, Windows, choose_windows
from sparkdl.spark.cluster.cluster_info import ClusterInfo, Get, parse_bytes

logger = logging.getLogger(__name__)


def windows_of_spool(
    plan: TrainPlan,
    spooled: Sequence[SpooledShard],
    info: ClusterInfo,
    get: Get,
    window_bytes: int | None,
) -> Windows | None:
    """The windows of a run that begins; None: rows are mixed as a whole.

    Args:
        plan: says which shards a rank has.
        spooled: its shards, with the memory of the hosts where they lie.
        info: the cluster.
        get: reads Spark's configuration.
        window_bytes: what the user says of their size.
    """
    num_bytes = sum(part.shard.num_bytes for part in spooled)
    num_rows = sum(part.shard.num_all_rows for part in spooled)
    by_rank = [
        sum(shard.num_bytes for shard in plan.shards_of(rank)) for rank in range(plan.world_size)
    ]
    windows = choose_windows(
        host_loads(spooled, info, get),
        bytes_by_rank=by_rank,
        row_bytes=max(1, -(-num_bytes // num_rows)),
        window_bytes=window_bytes,
    )
    if windows is not None:
        logger.info(
            "up to %d MiB of rows per worker are not mixed as a whole: %d row groups of %d rows "
            "at a time",
            max(by_rank) >> 20,
            windows.groups_together,
            windows.group_rows,
        )
    return windows


def host_loads(spooled: Sequence[SpooledShard], info: ClusterInfo, get: Get) -> list[HostLoad]:
    """What each host has to hold, and the memory that the executors' heaps leave for it."""
    by_host: dict[str, list[SpooledShard]] = defaultdict(list)
    for part in spooled:
        by_host[part.shard.host].append(part)
    is_one_process = info.master == "local" or info.master.startswith("local[")
    heap = get("spark.driver.memory" if is_one_process else "spark.executor.memory") or "1g"
    executors = -(-(info.num_executors or len(by_host)) // len(by_host))
    heaps = executors * parse_bytes(heap, unit=2**20)
    return [
        HostLoad(
            num_shards=len(parts),
            num_bytes=sum(part.shard.num_bytes for part in parts),
            memory_bytes=max(0, min(part.memory_bytes for part in parts) - heaps),
        )
        for parts in by_host.values()
    ]
