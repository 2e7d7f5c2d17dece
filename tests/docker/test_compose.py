"""The compose file describes a cluster that can start."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from tests.docker.context import ROOT
from tests.docker.test_images import arguments, stages

FOLDER = ROOT / "docker"
FILES = ("compose.yaml", "compose.gpu.yaml")
PARTS = {"master", "worker", "history", "folders"}


def load(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / name).read_text()))


SERVICES: dict[str, dict[str, Any]] = load("compose.yaml")["services"]


def test_the_files_keep_to_the_compose_specification() -> None:
    command = [sys.executable, "-m", "check_jsonschema"]
    command += ["--builtin-schema", "vendor.compose-spec", *(str(FOLDER / name) for name in FILES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def has_compose() -> bool:
    """Whether this machine's docker has its compose plugin; no daemon is needed."""
    docker = shutil.which("docker")
    if docker is None:
        return False
    done = subprocess.run([docker, "compose", "version"], capture_output=True, timeout=30)
    return done.returncode == 0


@pytest.mark.parametrize("files", [FILES[:1], FILES])
def test_docker_itself_accepts_them(files: tuple[str, ...]) -> None:
    if not has_compose():
        pytest.skip("there is no docker compose here")
    command = ["docker", "compose", "--project-directory", str(FOLDER)]
    for name in files:
        command += ["--file", str(FOLDER / name)]
    done = subprocess.run(
        [*command, "config", "--format", "json"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["services"]) == set(SERVICES)


def test_the_cluster_is_whole() -> None:
    assert set(SERVICES) == {
        "namenode", "datanode", "folders", "master", "worker", "history", "notebook"
    }  # fmt: skip
    assert SERVICES["datanode"]["deploy"]["replicas"] == 2
    assert SERVICES["worker"]["deploy"]["replicas"] == 2


@pytest.mark.parametrize("file", FILES)
def test_images_are_built_from_stages_that_exist(file: str) -> None:
    for service in load(file)["services"].values():
        build = service.get("build")
        if build is None:
            assert service["image"].startswith("apache/hadoop:3.")
            continue
        assert build["target"] in stages()
        assert service["image"] == f"sparkdl:{build['target']}"
        assert set(build.get("args", {})) <= set(arguments())
        if "dockerfile" in build:
            assert (FOLDER / build["context"] / build["dockerfile"]).resolve().is_file()


@pytest.mark.parametrize("file", FILES)
def test_commands_are_parts_of_the_entrypoint(file: str) -> None:
    entrypoint = (FOLDER / "entrypoint.sh").read_text()
    for name, service in load(file)["services"].items():
        if service.get("image", "").startswith("sparkdl:") and "command" in service:
            part = service["command"][0]
            assert part == name and part in PARTS
            assert re.search(rf"^{part}\)", entrypoint, re.MULTILINE)


@pytest.mark.parametrize("file", FILES)
def test_files_of_commands_and_volumes_exist(file: str) -> None:
    for service in load(file)["services"].values():
        for word in map(str, service.get("command", [])):
            if word.startswith("/opt/sparkdl/"):
                assert (ROOT / word.removeprefix("/opt/sparkdl/")).is_file(), word
        for volume in service.get("volumes", []):
            source, _, target = volume.partition(":")
            if target:
                assert (FOLDER / source).exists(), volume


def test_names_and_ports_agree() -> None:
    master = SERVICES["master"]
    host, port = (
        master["command"][master["command"].index(option) + 1] for option in ("--host", "--port")
    )
    assert master["hostname"] == host == "master"
    url = f"spark://{host}:{port}"
    assert SERVICES["worker"]["command"][-1] == url
    assert SERVICES["notebook"]["environment"]["SPARK_MASTER"] == url
    assert load("compose.gpu.yaml")["services"]["worker"]["command"][-1] == url
    site = ElementTree.parse(FOLDER / "hadoop" / "core-site.xml")
    values = {
        str(entry.findtext("name")): entry.findtext("value") for entry in site.iter("property")
    }
    name_node = SERVICES["namenode"]
    assert values["fs.defaultFS"] == f"hdfs://{name_node['hostname']}:8020"
    # The image formats the name node where this folder is missing; another one would be formatted
    # anew at every start.
    assert name_node["environment"]["ENSURE_NAMENODE_DIR"] == f"{values['hadoop.tmp.dir']}/dfs/name"


def test_replication_is_what_the_data_nodes_can_keep() -> None:
    site = ElementTree.parse(FOLDER / "hadoop" / "hdfs-site.xml")
    values = {
        str(entry.findtext("name")): entry.findtext("value") for entry in site.iter("property")
    }
    assert int(str(values["dfs.replication"])) == SERVICES["datanode"]["deploy"]["replicas"]


def test_ports_are_published_on_the_loopback_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == len(set(ports)) > 4
    assert all(re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port) for port in ports)


def test_folders_are_those_that_the_configuration_names() -> None:
    made = set(SERVICES["folders"]["command"][1:])
    for name, key in (
        ("standalone", "spark.eventLog.dir"),
        ("history", "spark.history.fs.logDirectory"),
    ):
        text = (ROOT / "conf" / "clusters" / f"{name}.conf").read_text()
        (folder,) = re.findall(rf"^{re.escape(key)}\s+(\S+)$", text, re.MULTILINE)
        assert folder in made


def test_services_wait_for_what_they_need() -> None:
    for service in SERVICES.values():
        assert set(service.get("depends_on", [])) <= set(SERVICES)
    assert SERVICES["folders"]["restart"] == "no"
    assert SERVICES["history"]["depends_on"]["folders"] == {
        "condition": "service_completed_successfully"
    }
    assert "healthcheck" in SERVICES["namenode"]
    assert SERVICES["folders"]["depends_on"]["namenode"] == {"condition": "service_healthy"}


def test_gpu_workers_are_one_per_machine() -> None:
    """Several would count the same GPUs."""
    worker = load("compose.gpu.yaml")["services"]["worker"]
    assert worker["deploy"]["replicas"] == 1
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert Path(str(worker["command"][-2])).name == "worker-gpu.conf"
