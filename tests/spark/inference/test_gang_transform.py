"""A model is divided where no Python worker has room for it; what cannot run is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkdl.errors import ClusterError, StorageError
from sparkdl.mesh import Mesh
from sparkdl.serialization.stored_module import StoredModule
from sparkdl.spark.cluster.cluster_info import ClusterInfo
from sparkdl.spark.inference import gang_transform
from tests.serialization.test_stored_module import recurrent, store, trained
from tests.worker.test_predicting import task_of

MESH = Mesh(shard=2)


@pytest.fixture
def stored(tmp_path: Path) -> StoredModule:
    return store(trained(recurrent), tmp_path)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Entries of the configuration, and fields of `ClusterInfo`, of a session that is none."""
    found: dict[str, Any] = {"entries": {}, "fields": {}}
    info = ClusterInfo(master="yarn", num_executors=1, cores_per_executor=2)
    monkeypatch.setattr(gang_transform, "conf", lambda _, key: found["entries"].get(key))

    def inspect(*_: object) -> ClusterInfo:
        return replace(info, **found["fields"])

    monkeypatch.setattr(gang_transform, "inspect_cluster", inspect)
    monkeypatch.setattr(gang_transform, "await_executors", inspect)
    monkeypatch.setattr(gang_transform, "session_settings", lambda _: Settings())
    return found


class Settings:
    allow_unencrypted = False


def test_it_is_divided_where_a_python_worker_has_no_room(
    stored: StoredModule, cluster: dict[str, Any]
) -> None:
    def chosen(**entries: str) -> Mesh | None:
        cluster["entries"] = {f"spark.executor.{key}": value for key, value in entries.items()}
        cluster["entries"]["spark.executor.pyspark.memory"] = entries.get("memory")
        return gang_transform.chosen_mesh(spark, stored)

    spark: Any = None
    num_bytes = stored.weights.num_bytes
    assert chosen() is None
    assert chosen(memory=f"{num_bytes}b") is None
    assert chosen(memory=f"{num_bytes - 1}b") == MESH
    assert chosen(memory=f"{2 * num_bytes}b", cores="2") is None
    assert chosen(memory=f"{2 * num_bytes - 1}b", cores="2") == MESH
    cluster["fields"] = {"master": "local[2]"}
    assert chosen(memory="1b") is None


@pytest.mark.parametrize(
    ("fields", "entries", "message"),
    [
        ({"dynamic_allocation": True}, {}, "dynamicAllocation.enabled=false"),
        ({"num_executors": 1, "cores_per_executor": 1}, {}, "has 1 slot"),
        ({}, {"spark.network.crypto.enabled": "true"}, "allowUnencrypted"),
    ],
)
def test_a_cluster_that_cannot_run_it(
    stored: StoredModule,
    cluster: dict[str, Any],
    fields: dict[str, Any],
    entries: dict[str, str],
    message: str,
) -> None:
    spark: Any = None
    gang_transform.check_mesh(spark, stored, MESH, task_of(stored))
    cluster["fields"], cluster["entries"] = fields, entries
    with pytest.raises(ClusterError, match=message):
        gang_transform.check_mesh(spark, stored, MESH, task_of(stored))


def test_weights_that_are_gone_are_told_before_any_job(
    stored: StoredModule, cluster: dict[str, Any]
) -> None:
    spark: Any = None
    (Path(stored.at.url) / stored.at.path / stored.weights.files[0]).unlink()
    with pytest.raises(StorageError, match=r"cannot be read from .*model.save\(path\) copies them"):
        gang_transform.check_mesh(spark, stored, MESH, task_of(stored))
