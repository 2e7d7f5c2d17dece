"""The memory of hosts decides how the rows of a run that begins are mixed."""

from __future__ import annotations

import pytest

from sparkdl.data.column_stats import SpooledShard
from sparkdl.data.plan import Column, Shard, TrainPlan, make_plan
from sparkdl.data.shuffle_windows import HostLoad
from sparkdl.spark.cluster.cluster_info import ClusterInfo
from sparkdl.spark.frames.shard_table import host_loads, windows_of_spool

GIB = 1 << 30
COLUMN = Column(name="x", role="feature", dtype="float32", shape=(2,))


def spooled(host: str, num_bytes: int, memory_bytes: int, shard_id: int = 0) -> SpooledShard:
    shard = Shard(
        shard_id=shard_id, host=host, path="", num_rows=900, num_validation_rows=100,
        fingerprint="", num_bytes=num_bytes,
    )  # fmt: skip
    return SpooledShard(shard=shard, content=0, columns=(), memory_bytes=memory_bytes)


def cluster(master: str, num_executors: int | None) -> ClusterInfo:
    return ClusterInfo(master=master, num_executors=num_executors, cores_per_executor=4)


@pytest.mark.parametrize(
    ("master", "executors", "entries", "expected"),
    [
        ("local[2]", 1, {}, 9),
        ("local[2]", 1, {"spark.driver.memory": "4g"}, 6),
        ("yarn", 2, {"spark.executor.memory": "3g"}, 4),
        ("yarn", None, {"spark.executor.memory": "3g"}, 7),
        ("k8s://x", 1, {"spark.executor.memory": "30g"}, 0),
    ],
)
def test_heaps_take_their_part(
    master: str, executors: int | None, entries: dict[str, str], expected: int
) -> None:
    parts = [spooled("a", GIB, 10 * GIB, 0), spooled("a", 2 * GIB, 11 * GIB, 1)]
    (load,) = host_loads(parts, cluster(master, executors), entries.get)
    assert load == HostLoad(num_shards=2, num_bytes=3 * GIB, memory_bytes=expected * GIB)


def planned(*parts: SpooledShard) -> TrainPlan:
    return make_plan(
        columns=[COLUMN], shards=[part.shard for part in parts], world_size=len(parts),
        batch_size=4, epochs=1,
    )  # fmt: skip


def test_the_smallest_host_decides_for_all() -> None:
    parts = [spooled("a", GIB, 64 * GIB, 0), spooled("b", GIB, 3 * GIB - 1, 1)]
    for window_bytes, is_whole in ((None, False), (GIB, True), (GIB - 1, False)):
        windows = windows_of_spool(
            planned(*parts), parts, cluster("yarn", 2), {}.get, window_bytes=window_bytes
        )
        assert (windows is None) == is_whole
    assert windows is not None
    row_bytes = -(-2 * GIB // 2000)  # of validation rows too
    assert windows.group_rows == (8 << 20) // row_bytes
