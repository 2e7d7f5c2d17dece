"""The configurations of clusters hold together."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from tests.conf.settings import FILES, FOLDER, active, lines

APPLICATIONS = ["local", "standalone", "yarn", "kubernetes"]
WITH_GPUS = ["standalone", "yarn", "kubernetes", "worker"]
GPU_KEYS = {
    "standalone": {"spark.executor.resource.gpu.amount"},
    "worker": {"spark.worker.resource.gpu.amount", "spark.worker.resource.gpu.discoveryScript"},
    "yarn": {"spark.executor.resource.gpu.amount", "spark.executor.resource.gpu.discoveryScript"},
    "kubernetes": {
        "spark.executor.resource.gpu.amount", "spark.executor.resource.gpu.discoveryScript",
        "spark.executor.resource.gpu.vendor",
    },
}  # fmt: skip


def test_every_kind_of_cluster_has_its_file() -> None:
    expected = {*APPLICATIONS, "worker", "history", *(f"{name}-gpu" for name in WITH_GPUS)}
    assert {path.stem for path in FILES} == expected


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_line_is_a_setting_or_a_comment(path: Path) -> None:
    settings = lines(path)
    assert settings
    for line in path.read_text().splitlines():
        assert not line or line.startswith(("#", "spark.")), line
        assert "\t" not in line and len(line) <= 100, line
    keys = [key for key, _, _ in settings]
    assert len(keys) == len(set(keys)), "a key stands twice"
    for _, value, is_on in settings:
        # Spark takes the rest of the line, a comment too.
        assert not is_on or "#" not in value


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_shows_how_it_is_used(path: Path) -> None:
    comment = path.read_text().split("\n\n")[0]
    assert f"--properties-file conf/clusters/{path.name}" in comment.replace("\\\n#    ", "")


@pytest.mark.parametrize("name", WITH_GPUS)
def test_gpus_add_settings_and_change_none_but_images_and_templates(name: str) -> None:
    plain, gpu = active(name), active(f"{name}-gpu")
    changed = {key for key, value in plain.items() if gpu[key] != value}
    images = {"spark.kubernetes.container.image", "spark.kubernetes.executor.podTemplateFile"}
    assert changed == (images if name == "kubernetes" else set())
    added = set(gpu) - set(plain)
    assert added >= GPU_KEYS[name]
    if name != "worker":
        assert gpu["spark.executorEnv.CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        # Tasks of an executor share its GPUs evenly: none of its cores waits for one.
        share = float(gpu["spark.task.resource.gpu.amount"])
        assert 0 < share <= 0.5 and (1 / share).is_integer()
        if cores := gpu.get("spark.executor.cores"):
            assert float(gpu["spark.executor.resource.gpu.amount"]) / share == int(cores)


@pytest.mark.parametrize("name", APPLICATIONS)
def test_workers_are_forked_from_a_daemon_that_exists(name: str) -> None:
    import importlib.util

    module = active(name)["spark.python.daemon.module"]
    assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("name", APPLICATIONS[1:])
def test_gangs_are_possible(name: str) -> None:
    from sparkdl.spark.cluster.cluster_info import (
        from_conf,
        require_gang_support,
        slots_per_executor,
    )
    from sparkdl.spark.session.settings import read_settings

    for variant in (name, f"{name}-gpu"):
        conf = {"spark.master": {"yarn": "yarn", "kubernetes": "k8s://x"}.get(name, "spark://x:1")}
        conf |= active(variant)
        info = from_conf(conf.get)
        require_gang_support(info, conf.get, read_settings(conf.get))
        if info.cores_per_executor is not None:
            assert info.num_executors == int(conf["spark.executor.instances"])
            whole = 1.0 if "gpu" in variant else None
            assert slots_per_executor(info, None, None) == info.cores_per_executor
            assert slots_per_executor(info, info.cores_per_executor, whole) == 1


def test_settings_of_sparkdl_are_known_and_have_good_values() -> None:
    from sparkdl.spark.session.settings import Settings, read_settings

    known = {field.metadata["entry"] for field in fields(Settings)}
    for path in FILES:
        given = {key: value for key, value, _ in lines(path) if key.startswith("spark.sparkdl.")}
        assert set(given) <= known
        read_settings(given.get)


def test_history_is_read_where_it_is_written() -> None:
    folder = active("history")["spark.history.fs.logDirectory"]
    for name in ("standalone", "standalone-gpu", "yarn", "yarn-gpu"):
        assert active(name)["spark.eventLog.dir"] == folder


def test_files_that_are_named_exist() -> None:
    root = FOLDER.parent.parent
    for path in FILES:
        for key, value, is_on in lines(path):
            if value.startswith("conf/"):
                assert (root / value).is_file(), f"{key} {value}"
            if value.startswith("/opt/sparkdl/conf/") and is_on:
                assert (root / value.removeprefix("/opt/sparkdl/")).is_file(), f"{key} {value}"


def test_the_driver_on_kubernetes_may_do_what_spark_asks_for() -> None:
    documents = list(yaml.safe_load_all((FOLDER / "kubernetes" / "account.yaml").read_text()))
    kinds = {document["kind"]: document for document in documents}
    assert set(kinds) == {"Namespace", "ServiceAccount", "Role", "RoleBinding"}
    conf = active("kubernetes")
    namespace = conf["spark.kubernetes.namespace"]
    assert kinds["Namespace"]["metadata"]["name"] == namespace
    account = kinds["ServiceAccount"]["metadata"]
    assert account["name"] == conf["spark.kubernetes.authenticate.driver.serviceAccountName"]
    for kind in ("ServiceAccount", "Role", "RoleBinding"):
        assert kinds[kind]["metadata"]["namespace"] == namespace
    (subject,) = kinds["RoleBinding"]["subjects"]
    assert (subject["name"], subject["namespace"]) == (account["name"], namespace)
    assert kinds["RoleBinding"]["roleRef"]["name"] == kinds["Role"]["metadata"]["name"]
    (rule,) = kinds["Role"]["rules"]
    assert {"pods", "services", "configmaps", "persistentvolumeclaims"} <= set(rule["resources"])
