"""How the JVMs of tests are started: most of them end soon, so what they cost is their beginning.

``python -m tests.jvm`` keeps the classes that a fit needs in an archive, as the JVM has parsed
them. A JVM that has the archive takes half the CPU time for a first small fit. The class path must
begin with the one that the archive was made with, and have no folder with files in this part, or
else the JVM goes on without it. So an option names the settings of the log, not SPARK_CONF_DIR.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent
ARCHIVE = _ROOT / "build" / "spark.jsa"
# The JVM's second compiler would take as much CPU time as it spares later.
_ALWAYS = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData -XX:+UnlockDiagnosticVMOptions"
    " -XX:-BytecodeVerificationRemote -Xlog:disable"
)
OPTIONS = f"{_ALWAYS} -XX:SharedArchiveFile={ARCHIVE}"
"""Of every JVM; one that cannot use the archive says nothing of it."""
ENTRIES = {
    # Spark ends workers that idle for a minute; the next have torch in memory already.
    "spark.python.daemon.module": "sparkdl.spark.daemon",
    # Else Spark lets each task of Python's that it has cancelled go on for two seconds.
    "spark.python.task.killTimeout": "200ms",
}
"""Of the sessions of tests."""
SUBMIT_ARGS = " ".join(
    [*(f"--conf {key}={value}" for key, value in ENTRIES.items()), "pyspark-shell"]
)
"""The same for PYSPARK_SUBMIT_ARGS, which the server of Spark Connect reads."""
KILL_SECONDS = 1.2
"""After which a cancelled task has ended, with the second of leave that sparkdl gives it."""
_LOG = f"-Dlog4j2.configurationFile={_ROOT / 'conf' / 'log4j2.properties'}"


def prepare(options: str = OPTIONS) -> None:
    """Before Spark starts: sessions of this process and of its children have these options."""
    os.environ.setdefault("SPARK_SUBMIT_OPTS", f"{options} {_LOG}")
    os.environ.pop("SPARK_CONF_DIR", None)


@contextmanager
def killing_soon() -> Iterator[None]:
    """Where sessions have `ENTRIES`, sparkdl waits less for what Spark has given up, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparkdl.spark.frames.shard_table._KILL_SECONDS", KILL_SECONDS)
        yield


def main() -> None:
    """Fit once, and keep the classes that this has needed."""
    new = ARCHIVE.with_suffix(".new")
    new.unlink(missing_ok=True)
    os.environ.pop("SPARK_SUBMIT_OPTS", None)
    prepare(f"{_ALWAYS} -XX:ArchiveClassesAtExit={new}")

    from pyspark import SparkContext
    from pyspark.sql import SparkSession
    from torch import nn

    from sparkdl import TorchRegressor

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .getOrCreate()
    )
    rows = [([float(number)], number % 2) for number in range(8)]
    df = spark.createDataFrame(rows, "features array<float>, label bigint").repartition(2)
    model = TorchRegressor(module=nn.Linear(1, 1), epochs=1, verbose=0).fit(df)
    model.transform(df).groupBy("label").count().collect()
    gateway = SparkContext._gateway
    spark.stop()
    assert gateway is not None
    gateway.shutdown()
    gateway.proc.stdin.close()  # then the JVM ends, and writes
    gateway.proc.wait(120)
    new.replace(ARCHIVE)


if __name__ == "__main__":
    main()
