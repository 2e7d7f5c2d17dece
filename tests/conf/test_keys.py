"""Spark knows every key of conf/clusters/ and takes every value, also of those that are off.

Spark ignores a key that it does not know, so a misspelt one would never be noticed. Its keys
register themselves as the objects that hold them are loaded.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import IllegalArgumentException

from tests.conf.settings import FILES, lines

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.classic]

REGISTRIES = [
    *(f"org.apache.spark.internal.config.{name}$"
      for name in ("package", "Deploy", "History", "Network", "Python", "Status", "UI", "Worker")),
    "org.apache.spark.deploy.k8s.Config$",
    "org.apache.spark.deploy.yarn.config.package$",
    "org.apache.spark.sql.internal.SQLConf$",
    "org.apache.spark.sql.internal.StaticSQLConf$",
]  # fmt: skip
# Families of keys that end in a name of the user's; Spark finds them by their beginnings.
FAMILIES = [
    r"spark\.(executorEnv|yarn\.appMasterEnv)\.[A-Z_]+",
    r"spark\.(executor|task|worker)\.resource\.gpu\.amount",
    r"spark\.(executor|worker)\.resource\.gpu\.discoveryScript",
    r"spark\.executor\.resource\.gpu\.vendor",
    r"spark\.kubernetes\.executor\.volumes\.emptyDir\.spark-local-dir-1\.mount\.path",
    r"spark\.kubernetes\.executor\.volumes\.emptyDir\.spark-local-dir-1\.options\.sizeLimit",
]
# Read by their names alone, without an entry.
OTHERS = {"spark.master", "spark.local.dir", "spark.port.maxRetries"}
Find = Callable[[str], Any]


@pytest.fixture(scope="module")
def find(spark: SparkSession) -> Find:
    """Spark's entry for a key, or None."""
    jvm: Any = spark._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    for name in REGISTRIES:
        jvm.java.lang.Class.forName(name, True, loader)
    entry: Find = jvm.org.apache.spark.internal.config.ConfigEntry.findEntry
    return entry


def of_a_family(key: str) -> bool:
    return any(re.fullmatch(pattern, key) for pattern in FAMILIES)


def test_a_misspelt_key_is_found_out(find: Find) -> None:
    assert find("spark.executor.memory") is not None
    assert find("spark.executer.memory") is None
    assert not of_a_family("spark.executor.resource.gpu.amounts")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_spark_knows_the_keys_and_takes_the_values(
    path: Path, find: Find, spark: SparkSession
) -> None:
    jvm: Any = spark._jvm
    option = jvm.scala.Option
    unknown, wrong = [], []
    for key, value, _ in lines(path):
        if key.startswith("spark.sparkdl.") or of_a_family(key) or key in OTHERS:
            continue
        entry = find(key)
        if entry is None:
            unknown.append(key)
            continue
        try:
            option.apply(value).map(entry.valueConverter())  # py4j cannot carry every type
        except IllegalArgumentException as error:
            wrong.append(f"{key} {value}: {error}")
    assert unknown == [] and wrong == []


def test_a_wrong_value_is_found_out(find: Find, spark: SparkSession) -> None:
    jvm: Any = spark._jvm
    with pytest.raises(IllegalArgumentException, match="sometimes"):
        jvm.scala.Option.apply("sometimes").map(find("spark.eventLog.enabled").valueConverter())


def test_keys_without_an_entry_stand_in_sparks_code() -> None:
    import pyspark

    (core,) = (Path(pyspark.__file__).parent / "jars").glob("spark-core_*.jar")
    missing = {key.encode() for key in OTHERS}
    with zipfile.ZipFile(core) as jar:
        for name in jar.namelist():
            if name.startswith("org/apache/spark/") and name.endswith(".class") and missing:
                content = jar.read(name)
                missing -= {key for key in missing if key in content}
    assert missing == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_key_is_out_of_date(path: Path, spark: SparkSession) -> None:
    jvm: Any = spark._jvm
    companion = jvm.java.lang.Class.forName("org.apache.spark.SparkConf$")
    deprecated = companion.getDeclaredField("deprecatedConfigs")
    deprecated.setAccessible(True)
    outdated = deprecated.get(companion.getField("MODULE$").get(None))
    assert outdated.contains("spark.rpc")
    conf = jvm.org.apache.spark.SparkConf(False)
    for key, value, _ in lines(path):
        conf.set(key, value)
        assert not outdated.contains(key), key
    conf.validateSettings()  # raises for keys that were removed, and for settings at odds
