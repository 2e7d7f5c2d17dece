"""What follows from a cluster's configuration, without a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from sparkdl.errors import ClusterError
from sparkdl.mesh import Mesh
from sparkdl.spark.cluster import cluster_info
from sparkdl.spark.cluster.cluster_info import (
    ClusterInfo,
    check_memory,
    choose_num_workers,
    from_conf,
    inspect_cluster,
    overhead_bytes,
    parse_bytes,
    require_gang_support,
    require_plain_files,
    slots_per_executor,
    wait_for_slots,
)
from sparkdl.spark.cluster.slots import make_profile, threads_per_worker
from sparkdl.spark.session.compat import num_slots
from sparkdl.spark.session.settings import Settings

MIB = 2**20


def info(executors: int | None, cores: int | None, **changes: Any) -> ClusterInfo:
    values: dict[str, Any] = {"master": "spark://h:7077", "is_complete": True, **changes}
    return ClusterInfo(num_executors=executors, cores_per_executor=cores, **values)


def described(master: str, **entries: str) -> ClusterInfo:
    texts = {name.replace("_", "."): text for name, text in entries.items()}
    return from_conf({"spark.master": master, **texts}.get)


@pytest.mark.parametrize(
    ("master", "executors", "cores"),
    [
        ("local", 1, 1),
        ("local[3]", 1, 3),
        ("local[ 3 ]", 1, 3),
        ("local[3,2]", 1, 3),
        ("local[3, 2]", 1, 3),
        ("local[*]", 1, os.cpu_count()),
        ("local[*,4]", 1, os.cpu_count()),
        ("local-cluster[2,4,1024]", 2, 4),
        ("local-cluster[2, 4, 1024]", 2, 4),
        ("spark://h:7077", None, None),
        ("yarn", 2, 1),
        ("k8s://https://h:443", 2, 1),
        ("unheard-of", None, None),
    ],
)
def test_masters(master: str, executors: int | None, cores: int | None) -> None:
    found = described(master)
    assert (found.num_executors, found.cores_per_executor) == (executors, cores)
    assert found.is_local == master.startswith("local")
    assert found.is_complete == found.is_local
    assert not found.dynamic_allocation


@pytest.mark.parametrize("master", ["yarn", "k8s://https://h:443", "spark://h:7077"])
def test_configured_executors(master: str) -> None:
    found = described(
        master, spark_executor_instances="5", spark_executor_cores="4", spark_task_cpus="2"
    )
    assert (found.num_executors, found.cores_per_executor, found.task_cpus) == (5, 4, 2)
    assert found.num_slots == 10


def test_parts_of_cores() -> None:
    found = described("local-cluster[2,3,1024]", spark_task_cpus="0.5")
    assert (found.num_slots, found.task_threads) == (12, 1)
    found = described("local-cluster[2,3,1024]", spark_task_cpus="1.5")
    assert (found.num_slots, found.task_threads) == (4, 2)
    assert all(info(1, cores, task_cpus=0.1).num_slots == cores * 10 for cores in range(1, 65))


@pytest.mark.parametrize(
    ("slots", "executors", "cpus", "cores"),
    [
        (3, 1, "0.3", 1),
        (10, 1, "0.3", 3),
        (6, 2, "0.3", 1),
        (60, 10, "0.3", 2),
        (10, 3, "0.5", 1),
        (8, 2, "1", 4),
        (3, 2, "1", 1),
        (4, 2, "2", 4),
        (0, 2, "2", 2),
    ],
)
def test_cores_follow_from_slots(
    monkeypatch: pytest.MonkeyPatch, slots: int, executors: int, cpus: str, cores: int
) -> None:
    spark = MagicMock()
    spark.sparkContext.getConf.return_value.get.return_value = cpus
    monkeypatch.setattr(cluster_info, "num_slots", lambda _: slots)
    assert cluster_info._cores_of_an_executor(spark, executors) == cores


def test_local_star_with_parts_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"spark.master": "local[*]", "spark.task.cpus": "0.3"}
    monkeypatch.setattr(cluster_info, "conf", lambda _, key: entries.get(key))
    monkeypatch.setattr(cluster_info, "num_slots", lambda _: 3)
    assert inspect_cluster(MagicMock()).cores_per_executor == 1


def test_gpus_and_dynamic_allocation() -> None:
    found = described(
        "local-cluster[2,4,1024]",
        spark_executor_resource_gpu_amount="2",
        spark_task_resource_gpu_amount="0.5",
        spark_dynamicAllocation_enabled="True",
    )
    assert (found.gpus_per_executor, found.gpus_per_task) == (2, 0.5)
    assert found.dynamic_allocation


def test_a_session_without_a_master() -> None:
    found = from_conf({}.get)
    assert found.master == "unknown"
    assert found.num_slots is None


GPUS = {"gpus_per_executor": 2, "gpus_per_task": 1.0}


@pytest.mark.parametrize(
    ("cluster", "cpus", "gpus", "slots"),
    [
        (info(1, 8), None, None, 8),
        (info(1, 8, task_cpus=3), None, None, 2),
        (info(1, 8), 4, None, 2),
        (info(1, 8), 9, None, 0),
        (info(1, 8, **GPUS), None, None, 2),
        (info(1, 1, **GPUS), None, None, 1),
        (info(1, 8, **GPUS), None, 2.0, 1),
        (info(1, 8, **GPUS), None, 0.5, 4),
        (info(1, 8, **GPUS), None, 0.4, 4),  # two tasks per GPU: none spans two
        (info(1, 80, **GPUS), None, 0.1, 20),
        (info(1, 8, gpus_per_executor=3, gpus_per_task=2.0), None, None, 1),
        (info(1, 8, gpus_per_executor=2), None, None, 8),  # GPUs that tasks do not ask for
        (info(1, 8, gpus_per_executor=2), 2, 1.0, 2),
    ],
)
def test_slots_per_executor(
    cluster: ClusterInfo, cpus: int | None, gpus: float | None, slots: int
) -> None:
    assert slots_per_executor(cluster, cpus, gpus) == slots


@pytest.mark.parametrize(
    ("cluster", "gpus", "workers"),
    [
        (info(1, 8), None, 1),
        (info(4, 8), None, 4),
        (info(4, 8, gpus_per_executor=2), None, 4),
        (info(4, 8, **GPUS), None, 8),
        (info(4, 1, **GPUS), None, 4),
        (info(4, 8, gpus_per_executor=2, gpus_per_task=0.5), None, 8),  # not 16
        (info(4, 8, gpus_per_executor=2), 1.0, 8),
        (info(4, 8, gpus_per_executor=2), 2.0, 4),
    ],
)
def test_default_number_of_workers(cluster: ClusterInfo, gpus: float | None, workers: int) -> None:
    assert choose_num_workers(cluster, None, gpus_per_worker=gpus) == workers


def test_requested_workers() -> None:
    assert choose_num_workers(info(2, 2), 4) == 4
    assert choose_num_workers(info(2, 2), 1) == 1
    assert choose_num_workers(info(None, None), 7) == 7
    with pytest.raises(ClusterError, match=r"of spark://h:7077 cannot be read .*; set numWorkers"):
        choose_num_workers(info(None, None), None)


@pytest.mark.parametrize(
    ("cluster", "requested", "options", "message"),
    [
        (
            info(2, 2),
            5,
            {},
            r"numWorkers=5 needs 5 free slots of 1 cpu at the same time, but spark://h:7077 has 4 "
            r"\(2 executors with 2 cores and 0 gpus each\); set numWorkers to at most 4 or give",
        ),
        (info(2, 2), 8, {"mesh": Mesh(shard=8)}, r"=Mesh\(.*shard=8.* product is at most 4 or"),
        (info(2, 4, task_cpus=2), 5, {}, "slots of 2 cpu .* has 4 "),
        (info(2, 4), 3, {"cpus_per_worker": 4}, "slots of 4 cpu .* at most 2 "),
        (info(2, 4, **GPUS), 5, {}, "slots of 1 cpu and 1 gpu .* has 4 "),
        (info(2, 4, **GPUS), 3, {"gpus_per_worker": 2.0}, "slots of 1 cpu and 2 gpu .* has 2 "),
    ],
)
def test_too_many_workers(
    cluster: ClusterInfo, requested: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ClusterError, match=message):
        choose_num_workers(cluster, requested, **options)


def test_executors_may_still_come() -> None:
    assert choose_num_workers(info(2, 2, is_complete=False), 5) == 5


def test_of_a_plain_stage_no_worker_may_run_twice() -> None:
    dynamic, twice = info(1, 1, dynamic_allocation=True), {"spark.speculation": "true"}
    with pytest.raises(ClusterError, match=r"a second time with spark\.speculation"):
        require_gang_support(dynamic, twice.get, Settings())
    with pytest.raises(ClusterError, match=r"a second time with spark\.speculation"):
        require_gang_support(info(1, 1), twice.get, Settings(), is_plain=True)
    require_gang_support(info(1, 1), twice.get, Settings())  # of a barrier stage there are no two
    require_gang_support(dynamic, {}.get, Settings())
    with pytest.raises(ClusterError, match="come when workers ask for them; set numWorkers"):
        choose_num_workers(dynamic, None)
    assert choose_num_workers(dynamic, 7) == 7


@pytest.mark.parametrize(
    "key", ["spark.network.crypto.enabled", "spark.ssl.enabled", "spark.ssl.rpc.enabled"]
)
def test_encryption_is_not_silently_dropped(key: str) -> None:
    get = {key: "TRUE"}.get
    with pytest.raises(ClusterError, match=f"{key} asks .* spark.sparkdl.allowUnencrypted=true"):
        require_gang_support(info(1, 1), get, Settings())
    require_gang_support(info(1, 1), get, Settings(allow_unencrypted=True))
    require_gang_support(info(1, 1), {key: "false"}.get, Settings())


def test_authentication_is_not_silently_dropped(caplog: pytest.LogCaptureFixture) -> None:
    authenticated, sasl = "spark.authenticate", "spark.authenticate.enableSaslEncryption"
    require_gang_support(info(1, 1), {sasl: "true"}.get, Settings())  # Spark ignores it then
    assert caplog.text == ""
    require_gang_support(info(1, 1), {authenticated: "true"}.get, Settings())
    assert "spark.authenticate is set, but workers exchange gradients as plain TCP" in caplog.text
    caplog.clear()
    get = {authenticated: "true", sasl: "true"}.get
    with pytest.raises(ClusterError, match=f"{sasl} asks for encrypted traffic"):
        require_gang_support(info(1, 1), get, Settings())
    require_gang_support(info(1, 1), get, Settings(allow_unencrypted=True))
    assert caplog.text == ""


def test_encrypted_files_are_not_silently_dropped() -> None:
    get = {"spark.io.encryption.enabled": "TRUE"}.get
    with pytest.raises(ClusterError, match=r"encrypted files, but the spool .*allowUnencrypted="):
        require_plain_files(get, Settings())
    require_plain_files(get, Settings(allow_unencrypted=True))
    require_plain_files({"spark.io.encryption.enabled": "false"}.get, Settings())
    require_plain_files({}.get, Settings())


@pytest.mark.parametrize(
    ("cluster", "workers", "cpus", "threads"),
    [
        (info(1, 8), 1, None, 8),
        (info(1, 8), 2, None, 4),
        (info(1, 8), 3, None, 2),
        (info(2, 8), 3, None, 4),
        (info(2, 8), 2, None, 8),
        (info(1, 2), 4, None, 1),
        (info(1, 8), 2, 3, 4),
        (info(1, 8), 8, 3, 3),
        (info(None, None), 2, None, 1),
        (info(None, None, task_cpus=2), 2, None, 2),
        (info(None, None), 2, 5, 5),
    ],
)
def test_threads(cluster: ClusterInfo, workers: int, cpus: int | None, threads: int) -> None:
    assert threads_per_worker(cluster, workers, cpus) == threads


def memory(cluster: ClusterInfo, workers: int, state_mib: int, **entries: str) -> None:
    texts = {f"spark.executor.{name}": text for name, text in entries.items()}
    check_memory(
        cluster, texts.get, replica_bytes=50 * MIB, state_bytes=state_mib * MIB,
        spool_bytes=10**12, num_workers=workers,
    )  # fmt: skip


def test_memory_is_checked_where_containers_are_killed() -> None:
    yarn = info(2, 4, master="yarn")
    memory(info(2, 4), 8, 10**6)  # standalone kills no one
    memory(yarn, 2, 100, memoryOverhead="500m")
    with pytest.raises(ClusterError) as caught:
        memory(yarn, 4, 100, memoryOverhead="500m")
    message = str(caught.value)
    assert message.startswith("2 worker(s) per executor need about 1000 MiB outside the JVM")
    assert "50 MiB replica, 100 MiB gradients" in message
    assert "executors grant 500 MiB" in message
    assert message.endswith("set spark.executor.memoryOverhead to at least 1000m")
    memory(yarn, 4, 100, memoryOverhead="1000m")
    memory(yarn, 4, 100, memoryOverhead="500", **{"pyspark.memory": "500m"})
    memory(info(None, None, master="k8s://h"), 2, 100, memoryOverhead="500m")


PODS = {"spark.master": "k8s://h", "spark.kubernetes.memoryOverheadFactor": "0.4"}


@pytest.mark.parametrize(
    ("entries", "mib"),
    [
        ({}, 384),
        ({"memory": "10g"}, 1024),
        ({"memory": "10g", "memoryOverheadFactor": "0.5"}, 5120),
        ({"memory": "10g", **PODS}, 4096),
        ({"memory": "10g", **PODS, "spark.master": "yarn"}, 1024),
        ({"memory": "10g", **PODS, "memoryOverheadFactor": "0.5"}, 5120),
        ({"memoryOverhead": "600"}, 600),
        ({"memoryOverhead": "1g", "pyspark.memory": "2g"}, 3072),
    ],
)
def test_memory_overhead(entries: dict[str, str], mib: int) -> None:
    texts = {
        name if name.startswith("spark.") else f"spark.executor.{name}": text
        for name, text in entries.items()
    }
    assert overhead_bytes(texts.get) == mib * MIB


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512m", 512 * MIB),
        ("2g", 2 * 1024 * MIB),
        ("2GB", 2 * 1024 * MIB),
        (" 3k ", 3 * 1024),
        ("1t", 2**40),
        ("7", 7 * MIB),
        ("1048576b", MIB),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text, unit=MIB) == size


@pytest.mark.parametrize("text", ["", "much", "1.5g", "-1m"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ClusterError, match="cannot read the size"):
        parse_bytes(text, unit=1)


def test_profiles_need_stage_level_scheduling() -> None:
    assert make_profile(info(1, 2, master="local[2]"), None, None) is None
    for master in ("local", "local[2]", "local[*]"):
        with pytest.raises(ClusterError, match="need stage-level scheduling, which local"):
            make_profile(info(1, 2, master=master), 1, None)
    with pytest.raises(ClusterError, match="cpusPerWorker=4 exceeds the 2 cores"):
        make_profile(info(1, 2), 4, None)
    with pytest.raises(ClusterError, match="gpusPerWorker=2 exceeds the 1 gpus"):
        make_profile(info(1, 2, gpus_per_executor=1), None, 2.0)


@pytest.mark.spark
def test_a_real_session(spark: Any) -> None:
    found = inspect_cluster(spark)
    assert (found.master, found.num_executors, found.cores_per_executor) == ("local[2]", 1, 2)
    wait_for_slots(spark, 2, None, Settings())
    with pytest.raises(ClusterError, match=r"only 2 of the 3 slots that numWorkers=3 needs came"):
        wait_for_slots(spark, 3, None, Settings(start_timeout_seconds=0.3))


class Clock:
    """A clock that only `sleep` moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def of_slots(slots: Callable[[], int]) -> Any:
    """As much of a session as `wait_for_slots` asks."""
    scala = SimpleNamespace(
        resourceProfileManager=lambda: SimpleNamespace(defaultResourceProfile=lambda: None),
        maxNumConcurrentTasks=lambda _: slots(),
        getConf=dict,
        isStopped=lambda: slots() < 0,
    )
    return SimpleNamespace(sparkContext=SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: scala)))


@pytest.mark.parametrize(
    ("entry", "excluded", "left"),
    [("true", "1", 4), ("true", "01", 2), ("true", "", 6), (None, "1", 6)],
)
def test_spark_runs_nothing_on_executors_that_it_has_excluded(
    entry: str | None, excluded: str, left: int
) -> None:
    """It counts their slots all the same, and a barrier stage would wait for them."""
    spark = of_slots(lambda: 6)
    names = ["driver", "0", "1", "2"]
    listed = [
        SimpleNamespace(id=lambda name=name: name, isExcluded=lambda name=name: name in excluded)
        for name in names
    ]
    known = SimpleNamespace(size=lambda: len(listed), apply=listed.__getitem__)
    scala = spark.sparkContext._jsc.sc()
    scala.statusStore = lambda: SimpleNamespace(executorList=lambda _: known)
    scala.getConf = lambda: {"spark.excludeOnFailure.enabled": entry} if entry else {}
    assert num_slots(spark) == left


def test_another_node_may_come_late_after_a_loss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(cluster_info, "time", clock)
    spark = of_slots(lambda: 2 if clock.now > 200 else 1)
    assert wait_for_slots(spark, 2, None, Settings(start_timeout_seconds=120), restarts_left=1)
    said = [record.message for record in caplog.records]
    assert len(said) == 4  # at 0, 60, 120 and 180 seconds
    assert "after a loss: 1 of 2 slots are there; 0 of at most 3600 s" in said[0]
    assert "queueTimeout) have passed; restarts left after this one: 1" in said[0]


@pytest.mark.parametrize("when", [0, 100])
def test_nobody_waits_for_a_session_that_has_ended(
    when: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(cluster_info, "time", clock)
    spark = of_slots(lambda: 1 if clock.now < when else -1)
    with pytest.raises(ClusterError, match=r"the Spark session has ended: .* checkpointDir"):
        wait_for_slots(spark, 2, None, Settings(), restarts_left=1)
    assert clock.now == pytest.approx(when, abs=0.2)


def test_no_other_node_comes_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_info, "time", Clock())
    told = r"only 1 of the 2 slots .* within 500 s of a loss; .*spark.sparkdl.queueTimeout"
    with pytest.raises(ClusterError, match=told):
        wait_for_slots(
            of_slots(lambda: 1), 2, None, Settings(queue_timeout_seconds=500), restarts_left=0
        )
