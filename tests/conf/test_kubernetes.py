"""The pods that Spark makes of the settings for Kubernetes. No cluster is asked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from py4j.java_collections import JavaMap

from tests.conf.settings import FOLDER, active
from tests.docker.test_entrypoint import POD

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.classic]

ROOT = FOLDER.parent.parent
NAMES = ["kubernetes", "kubernetes-gpu"]


@pytest.fixture(scope="module")
def client(spark: SparkSession) -> Iterator[Any]:
    """A client of a cluster that does not exist."""
    jvm: Any = spark._jvm
    api = jvm.io.fabric8.kubernetes.client
    config = api.ConfigBuilder(api.Config.empty()).withMasterUrl("https://127.0.0.1:1").build()
    opened = api.KubernetesClientBuilder().withConfig(config).build()
    yield opened
    opened.close()


def configuration(spark: SparkSession, name: str) -> Any:
    """The settings as spark-submit hands them on; paths are found from the repository's root."""
    jvm: Any = spark._jvm
    conf = jvm.org.apache.spark.SparkConf(False).set("spark.master", "k8s://https://127.0.0.1:1")
    conf.set("spark.app.name", "digits").set("spark.app.id", "spark-digits")
    for key, value in active(name).items():
        conf.set(key, str(ROOT / value) if value.startswith("conf/") else value)
    return conf


def as_dict(spark: SparkSession, built: Any) -> dict[str, Any]:
    """A pod and its container, as Spark has built them."""
    jvm: Any = spark._jvm
    to_json = jvm.io.fabric8.kubernetes.client.utils.Serialization.asJson
    pod, container = (
        json.loads(to_json(part)) for part in (built.pod().pod(), built.pod().container())
    )
    return {**pod["spec"], "container": container, "metadata": pod["metadata"]}


@contextmanager
def default_profile(spark: SparkSession, conf: Any) -> Iterator[Any]:
    """The resources that ``conf`` gives executors; Spark keeps one such profile in each JVM."""
    jvm: Any = spark._jvm
    profiles = getattr(getattr(jvm.org.apache.spark.resource, "ResourceProfile$"), "MODULE$")
    context: Any = spark.sparkContext
    try:
        yield profiles.reInitDefaultProfile(conf)
    finally:
        profiles.reInitDefaultProfile(context._jsc.sc().conf())


@pytest.fixture(scope="module", params=NAMES)
def executor(request: pytest.FixtureRequest, spark: SparkSession, client: Any) -> dict[str, Any]:
    jvm: Any = spark._jvm
    conf = configuration(spark, request.param)
    conf.set("spark.driver.host", "driver").set("spark.driver.port", "7078")
    conf.set("spark.executor.extraClassPath", "/extra.jar")
    nothing = jvm.scala.Option.empty()
    conf_of_executor = jvm.org.apache.spark.deploy.k8s.KubernetesConf.createExecutorConf(
        conf, "1", "spark-digits", nothing, 0
    )
    secret = jvm.org.apache.spark.internal.config.ConfigEntry.findEntry(
        "spark.authenticate.secret.file"
    )
    security = jvm.org.apache.spark.SecurityManager(conf, nothing, secret)
    builder = jvm.org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBuilder()
    with default_profile(spark, conf) as profile:
        built = builder.buildFromFeatures(conf_of_executor, security, client, profile)
    return {"name": request.param, **as_dict(spark, built)}


def variables(pod: dict[str, Any]) -> set[str]:
    return {entry["name"] for entry in pod["container"]["env"]}


def test_executors_get_what_the_entrypoint_reads(executor: dict[str, Any]) -> None:
    assert executor["container"]["args"] == ["executor"]
    entrypoint = (ROOT / "docker" / "entrypoint.sh").read_text()
    body = entrypoint[entrypoint.index("executor() {") : entrypoint.index("part=")]
    read = set(re.findall(r'"?\$(SPARK_[A-Z_]+)', body)) - {"SPARK_HOME"}
    assert read == {name for name in POD if "JAVA_OPT" not in name}
    assert read <= variables(executor)
    assert {"CUDA_DEVICE_ORDER"} & variables(executor) == (
        {"CUDA_DEVICE_ORDER"} if "gpu" in executor["name"] else set()
    )


def test_executors_have_cores_and_memory(executor: dict[str, Any]) -> None:
    conf = active(executor["name"])
    resources = executor["container"]["resources"]
    assert resources["requests"]["cpu"] == conf["spark.executor.cores"]
    mib = sum(
        int(conf[key].removesuffix("g")) << 10
        for key in ("spark.executor.memory", "spark.executor.memoryOverhead")
    )
    assert resources["limits"]["memory"] == f"{mib}Mi"


def test_executors_with_gpus_ask_for_them(executor: dict[str, Any]) -> None:
    limits = executor["container"]["resources"]["limits"]
    mounts = {one["mountPath"] for one in executor["container"]["volumeMounts"]}
    if executor["name"] == "kubernetes":
        assert "nvidia.com/gpu" not in limits and "/dev/shm" not in mounts
        return
    assert limits["nvidia.com/gpu"] == "1"
    assert "/dev/shm" in mounts
    (memory,) = [one for one in executor["volumes"] if one["name"] == "shared-memory"]
    assert memory["emptyDir"]["medium"] == "Memory"
    assert executor["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_spools_lie_on_a_volume(executor: dict[str, Any]) -> None:
    (mount,) = [
        one for one in executor["container"]["volumeMounts"]
        if one["name"].startswith("spark-local-dir-")
    ]  # fmt: skip
    (directories,) = [
        one["value"] for one in executor["container"]["env"] if one["name"] == "SPARK_LOCAL_DIRS"
    ]
    assert mount["mountPath"] == directories == "/opt/sparkdl/local"


def test_executors_spread_over_nodes_as_no_root(executor: dict[str, Any]) -> None:
    assert executor["securityContext"]["runAsUser"] == 185
    (constraint,) = executor["topologySpreadConstraints"]
    labels = constraint["labelSelector"]["matchLabels"].items()
    assert labels <= executor["metadata"]["labels"].items()


@pytest.mark.parametrize("name", NAMES)
def test_the_driver_is_submitted_by_the_entrypoint(
    name: str, spark: SparkSession, client: Any
) -> None:
    jvm: Any = spark._jvm
    submit = jvm.org.apache.spark.deploy.k8s.submit
    words = spark.sparkContext._gateway.new_array(jvm.java.lang.String, 2)  # type: ignore[union-attr]
    words[0], words[1] = "--config", "/opt/sparkdl/conf/digits.toml"
    conf = jvm.org.apache.spark.deploy.k8s.KubernetesConf.createDriverConf(
        configuration(spark, name), "spark-digits",
        submit.PythonMainAppResource("local:///opt/sparkdl/jobs/train.py"),
        "org.apache.spark.deploy.PythonRunner", words, jvm.scala.Option.empty(),
    )  # fmt: skip
    built = submit.KubernetesDriverBuilder().buildFromFeatures(conf, client)
    driver = as_dict(spark, built)
    arguments = driver["container"]["args"]
    assert arguments[0] == "driver"
    assert arguments[-3:] == ["local:///opt/sparkdl/jobs/train.py", *words]
    assert "SPARK_DRIVER_BIND_ADDRESS" in variables(driver)
    assert driver["serviceAccountName"] == "sparkdl"
    assert driver["securityContext"]["runAsUser"] == 185
    image = driver["container"]["image"]
    assert image.endswith("sparkdl:gpu" if "gpu" in name else "sparkdl:cpu")


def check_fields(written: Any, read: Any, where: str) -> None:
    """Every field of a template is one of Kubernetes: Spark's client keeps others silently."""
    if isinstance(written, list):
        assert len(written) == read.size()
        for at, item in enumerate(written):
            check_fields(item, read.get(at), f"{where}[{at}]")
    elif isinstance(written, dict):
        if isinstance(read, JavaMap):  # of names to values, such as labels
            assert {key: str(value) for key, value in read.items()} == written
            return
        assert read.getAdditionalProperties().isEmpty(), (
            f"{where}: {read.getAdditionalProperties()}"
        )
        for key, value in written.items():
            check_fields(value, getattr(read, f"get{key[0].upper()}{key[1:]}")(), f"{where}.{key}")


@pytest.mark.parametrize("name", ["driver", "executor", "executor-gpu"])
def test_templates_have_only_fields_of_kubernetes(
    name: str, spark: SparkSession, client: Any
) -> None:
    jvm: Any = spark._jvm
    path = FOLDER / "kubernetes" / f"{name}.yaml"
    pod = client.pods().load(jvm.java.io.File(str(path))).item()
    check_fields(yaml.safe_load(path.read_text()), pod, name)


def test_a_misspelt_field_is_found_out(spark: SparkSession, client: Any, tmp_path: Any) -> None:
    jvm: Any = spark._jvm
    path = tmp_path / "pod.yaml"
    path.write_text("apiVersion: v1\nkind: Pod\nspec:\n  tolerations:\n    - keys: x\n")
    pod = client.pods().load(jvm.java.io.File(str(path))).item()
    with pytest.raises(AssertionError, match="keys"):
        check_fields(yaml.safe_load(path.read_text()), pod, "pod")
