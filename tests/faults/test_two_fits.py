"""Two fits at once that share a folder, or want the same port, keep out of each other's way."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sparkdl.errors import ClusterError
from tests.cluster.faults import Slow
from tests.faults.cluster import DEFAULT_PATIENCE, Cluster, marks
from tests.faults.oracle import fit_request

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.spark.run.run import FitResult

pytestmark = marks(300)
ENTRIES = DEFAULT_PATIENCE

T = TypeVar("T")


def at_once(*calls: Callable[[], T]) -> list[Future[T]]:
    """All of them in threads of their own, which have ended."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [pool.submit(call) for call in calls]


def train(df: DataFrame, **changes: Any) -> FitResult:
    """A fit of one worker, so that another has room beside it."""
    from sparkdl.spark.fit.fit import fit

    return fit(df, fit_request(Slow(0.05), num_workers=1, **changes))


def test_of_two_fits_that_want_one_port_one_says_so(
    df: DataFrame, spark: SparkSession, cluster: Cluster
) -> None:
    entry = "spark.sparkdl.channel.port"
    with socket.create_server((cluster.driver.address, 0)) as server:
        port = server.getsockname()[1]
    spark.conf.set(entry, str(port))
    try:
        ended = at_once(lambda: train(df), lambda: train(df))
    finally:
        spark.conf.unset(entry)
    (error,) = [each.exception() for each in ended if each.exception() is not None]
    assert isinstance(error, ClusterError)
    assert entry in str(error) and "two fits at a time need two" in str(error)


def count(name: str, marker: str | None) -> tuple[str, int, int]:
    """Counts to four, with a checkpoint each; is killed at three if there is no marker yet."""
    import time

    import sparkdl

    place = sparkdl.context()
    found = place.checkpoint or {"name": name, "count": 0}
    for number in range(int(found["count"]) + 1, 5):
        place.report({"count": number}, checkpoint={"name": found["name"], "count": number})
        time.sleep(1)
        if marker is not None and number == 3:
            try:
                Path(marker).touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)
    return str(found["name"]), int(found["count"]), place.num_restarts


def test_two_functions_that_share_a_folder_go_on_from_their_own_checkpoints(
    spark: SparkSession, tmp_path: Path
) -> None:
    from sparkdl import TorchRunner

    directory, marker = str(tmp_path / "checkpoints"), str(tmp_path / "struck")

    def run(name: str, marker: str | None) -> Any:
        return TorchRunner(num_workers=1, verbose=0, checkpoint_dir=directory).run(
            count, name, marker
        )

    ended = at_once(lambda: run("one", marker), lambda: run("other", None))
    killed, other = [each.result() for each in ended]
    assert Path(marker).exists()
    assert killed[0] == "one" and killed[1] in (2, 3) and killed[2] == 1
    assert other == ("other", 0, 0)
