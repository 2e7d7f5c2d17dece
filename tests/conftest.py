"""What all tests share: settings made before torch or Spark is imported, markers, fixtures."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import jvm, s3
from tests.gang import Gang, Gangs
from tests.on_connect import AGAIN
from tests.promises import PROMISES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Ranks of one test share few cores; with more threads they would only wait for each other.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
# Otherwise Spark's workers run the first python3 of the PATH.
os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
# Spark's workers import the classes that tests define by the tests' own module names.
ROOT = str(Path(__file__).parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))

# Before Spark starts, whose workers read this as well.
os.environ.update(s3.ENVIRONMENT)

jvm.prepare()

# Tests press Ctrl-C, which a shell's background jobs and nohup would have Python ignore.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A process has one Spark context: these directories bring their own, so each is named on a command
# line of its own, as the parts of the Makefile do. So are those that install the package.
_OWN_CONTEXT = [
    *("cluster", "cluster_gpu", "faults", "hdfs", "notebooks", "packaging", "standalone"),
    *("competing", "versions"),
]
collect_ignore = [
    name for name in _OWN_CONTEXT if not any(f"tests/{name}" in word for word in sys.argv)
]

ON_CONNECT = os.environ.get("SPARKDL_TEST_SPARK") == "connect"
# Who asks for one of these fixtures needs a JVM, or several processes, and need not say so.
_MARKS = {
    "spark": {"spark", "cluster", "gpu_cluster", "kernel", "topology"},
    "gang": {"gangs"},
}
_PROOFS = {proof: promise for promise, proof in PROMISES.items()}
_SLOW_SECONDS = 2.0


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by what they need and prove; leave out those of the other kind of session."""
    other = "classic" if ON_CONNECT else "connect"
    left_out = [item for item in items if item.get_closest_marker(other)]
    for item in items:
        cases = getattr(item, "callspec", None)  # their arguments are no fixtures
        needs = set(getattr(item, "fixturenames", ())) - set(cases.params if cases else ())
        for mark, fixtures in _MARKS.items():
            if needs & fixtures:
                item.add_marker(mark)
        if ON_CONNECT and not item.get_closest_marker("connect"):
            if item.nodeid.partition("[")[0] in AGAIN:
                item.add_marker("slow")  # it is a second time
            else:
                left_out.append(item)
        elif item.nodeid in _PROOFS:
            item.add_marker(pytest.mark.promise(_PROOFS[item.nodeid]))
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the tests that take long and do not say so, which `make test` would not leave out."""
    long = [
        report
        for report in terminalreporter.stats.get("passed", [])
        if report.duration > _SLOW_SECONDS and not {"slow", "promise"} & set(report.keywords)
    ]
    if long:
        terminalreporter.section(f"over {_SLOW_SECONDS:g} s and not marked slow")
    for report in sorted(long, key=lambda report: -report.duration):
        terminalreporter.line(f"{report.duration:6.1f} s  {report.nodeid}")


@pytest.fixture(autouse=True)
def package_logger() -> Iterator[None]:
    """The package's logger is afterwards as it was: the command line adds a handler."""
    logger = logging.getLogger("sparkdl")
    before = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session with two slots: classic, or Spark Connect if ``SPARKDL_TEST_SPARK=connect``."""
    from pyspark.sql import SparkSession

    if ON_CONNECT:
        # The client may not set the entries; its server reads this.
        os.environ["PYSPARK_SUBMIT_ARGS"] = jvm.SUBMIT_ARGS
        session = SparkSession.builder.remote("local[2]").getOrCreate()
    else:
        session = (
            SparkSession.builder.master("local[2]")
            .appName("sparkdl tests")
            .config("spark.ui.enabled", "false")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config(map=jvm.ENTRIES)
            .getOrCreate()
        )
        session.sparkContext.setLogLevel("ERROR")
    with jvm.killing_soon():
        yield session
    session.stop()


@pytest.fixture(scope="session")
def gangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Gang]]:
    """Gangs by how many ranks they have; each is started once, and after a test that broke it."""
    started: dict[int, Gangs] = {}

    def get(world_size: int) -> Gang:
        if world_size not in started:
            started[world_size] = Gangs(lambda: tmp_path_factory.mktemp("gang"), world_size)
        return started[world_size].get()

    yield get
    for kept in started.values():
        kept.close()


@pytest.fixture
def gang(gangs: Callable[[int], Gang]) -> Gang:
    """Two ranks."""
    return gangs(2)


@pytest.fixture
def gang3(gangs: Callable[[int], Gang]) -> Gang:
    """Three ranks, for what two cannot show."""
    return gangs(3)


@pytest.fixture
def gang4(gangs: Callable[[int], Gang]) -> Gang:
    """Four ranks, for pairs of pairs, and two nodes of two."""
    return gangs(4)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    """What `s3.ENVIRONMENT` points to, with the bucket `s3.BUCKET`."""
    pytest.importorskip("moto", reason="petastorm's environment has no S3")
    with s3.started_server(tmp_path_factory.mktemp("s3") / "log") as server:
        yield server


@pytest.fixture
def s3_url(s3_server: subprocess.Popen[bytes]) -> str:
    """A folder of the bucket that no other test uses."""
    return f"s3://{s3.BUCKET}/{uuid.uuid4().hex}"
