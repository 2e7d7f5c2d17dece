"""Two fits at once that share a folder, or want the same port, keep out of each other's way."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.config import CheckpointConfig
from sparkdl.errors import ClusterError
from sparkdl.report.record.run_folder import RunReader
from sparkdl.storage.storage import open_storage
from tests.cluster.faults import Slow
from tests.cluster.test_recovery import digest
from tests.faults.cluster import Cluster
from tests.faults.oracle import fit_request

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.spark.run.run import FitResult

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow, pytest.mark.timeout(300)]


def fitted(df: DataFrame, *changes: dict[str, Any]) -> list[FitResult]:
    """Fits of one worker each, all at the same time."""
    from sparkdl.spark.fit.fit import fit

    requests = [fit_request(Slow(0.05), **{"num_workers": 1, **each}) for each in changes]
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: fit(df, request), requests))


@pytest.mark.xfail(reason="defect 3: fits remove each other's checkpoints", strict=False)
def test_they_share_a_folder_of_checkpoints(df: DataFrame, tmp_path: Path) -> None:
    shared = CheckpointConfig(directory=str(tmp_path / "shared"), interval=2)
    alone = CheckpointConfig(directory=str(tmp_path / "alone"), interval=2)
    (undisturbed,) = fitted(df, {"checkpoint": alone})
    results = fitted(df, {"checkpoint": shared}, {"checkpoint": shared})
    assert {digest(result) for result in results} == {digest(undisturbed)}
    assert [result.summary.restarts for result in results] == [0, 0]


def test_they_share_a_folder_of_reports(df: DataFrame, tmp_path: Path) -> None:
    directory = str(tmp_path / "reports")
    fitted(df, {"report_dir": directory}, {"report_dir": directory})
    runs = RunReader(open_storage(directory))
    reports = [runs.read(name) for name in runs.names()]
    assert [report.status for report in reports if report is not None] == 2 * ["succeeded"]


def test_a_port_that_is_taken_is_told(df: DataFrame, spark: SparkSession, cluster: Cluster) -> None:
    entry = "spark.sparkdl.channel.port"
    with socket.create_server((cluster.driver.address, 0)) as server:
        spark.conf.set(entry, str(server.getsockname()[1]))
        try:
            with pytest.raises(ClusterError, match=entry):
                fitted(df, {})
        finally:
            spark.conf.unset(entry)
