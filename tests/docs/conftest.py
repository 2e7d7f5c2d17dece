"""The folder in which the pages' blocks run; it looks like a fresh clone after `make train`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.docs.blocks import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``data/digits`` of the examples."""
    folder = tmp_path_factory.mktemp("docs-data") / "digits"
    command = [sys.executable, str(ROOT / "jobs" / "digits.py"), "--output", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    return folder


@pytest.fixture
def clone(tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: what is written there is the test's own."""
    for name in ("conf", "jobs", "requirements-petastorm.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "digits").symlink_to(digits)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.contextmanager
def working_in(folder: Path, spark: SparkSession) -> Iterator[None]:
    """The working folder of this process is that of the JVM as well, which does not follow it."""
    jvm: Any = spark._jvm
    context: Any = spark.sparkContext
    local = jvm.org.apache.hadoop.fs.FileSystem.getLocal(context._jsc.hadoopConfiguration())
    before = local.getWorkingDirectory()
    local.setWorkingDirectory(jvm.org.apache.hadoop.fs.Path(str(folder)))
    with contextlib.chdir(folder):
        yield
    local.setWorkingDirectory(before)


@pytest.fixture
def clone_of_the_jvm(spark: SparkSession, clone: Path) -> Iterator[None]:
    """`clone` for Spark as well."""
    with working_in(clone, spark):
        yield
