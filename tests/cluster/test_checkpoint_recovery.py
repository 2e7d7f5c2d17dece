"""A place for checkpoints that fails, or that two fits share, changes no bit."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.config import CheckpointConfig
from sparkdl.report.record.run_folder import RunReader
from sparkdl.storage.checkpoint_format import folders
from sparkdl.storage.storage import open_storage
from sparkdl.train.callbacks import Callback, CallbackState
from tests.cluster import faults
from tests.cluster.test_recovery import digest, request, training_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.spark.run.run import FitResult

pytestmark = [
    pytest.mark.spark,
    pytest.mark.gang,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def df(cluster: SparkSession) -> DataFrame:
    return training_rows(cluster)


@dataclass
class Unmounted(Callback):
    """A folder, reached by a link, is away for some steps, and a file is in its place."""

    folder: str
    first: int
    last: int

    def on_step_end(self, state: CallbackState) -> None:
        if state.rank == 0 and state.step in (self.first, self.last):
            is_there = state.step == self.last
            spare = Path(f"{self.folder}-spare")
            spare.symlink_to(f"{self.folder}-real" if is_there else __file__)
            spare.replace(self.folder)  # at once, while the leases and checkpoints go on writing


def test_training_outlives_a_place_that_is_away_for_a_while(
    df: DataFrame, undisturbed: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from sparkdl.spark.fit.fit import fit

    directory = str(tmp_path / "c")
    Path(f"{directory}-real").mkdir()
    Path(directory).symlink_to(f"{directory}-real")
    checkpoint = CheckpointConfig(directory=directory, interval=2)
    away = Unmounted(directory, first=7, last=13)
    strike = faults.KillWorker(marker=str(tmp_path / "struck"), rank=1, step=25)
    with caplog.at_level(logging.INFO, "sparkdl"):
        result = fit(df, request(away, strike, faults.Slow(0.1), checkpoint=checkpoint))
    assert result.summary.restarts == 1
    assert digest(result) == undisturbed
    lines = [line for line in caplog.text.splitlines() if "going on from the checkpoint" in line]
    assert len(lines) == 1 and int(lines[0].split("of step ")[1].split()[0]) >= 14
    storage = open_storage(directory)
    (key,) = storage.list("")
    assert len(folders(storage, key)) == checkpoint.keep  # what failed is gone, and the lease too
    assert not any(name.startswith("lease") for name in storage.list(key))


def test_two_fits_of_one_key_train_at_once_in_one_folder(
    df: DataFrame, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from sparkdl.spark.fit.fit import fit

    undisturbed = digest(fit(df, request(num_workers=1)))
    checkpoint = CheckpointConfig(directory=str(tmp_path / "c"), interval=1)

    def train(number: int) -> FitResult:
        marker = str(tmp_path / f"struck-{number}")
        strike = faults.KillWorker(marker=marker, rank=0, step=10 + 7 * number)
        places: dict[str, Any] = {"checkpoint": checkpoint, "report_dir": str(tmp_path / "reports")}
        # Else one could begin late, with a checkpoint of the other's beyond its own strike.
        meets = faults.Meets(*(str(tmp_path / f"began-{one}") for one in (number, 1 - number)))
        return fit(df, request(meets, strike, faults.Slow(0.05), num_workers=1, **places))

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(train, range(2)))
    assert [result.summary.restarts for result in results] == [1, 1]
    assert {digest(result) for result in results} == {undisturbed}
    runs = RunReader(open_storage(str(tmp_path / "reports")))
    reports = [runs.read(name) for name in runs.names()]
    assert [report and report.status for report in reports] == 2 * ["succeeded"]
    assert "there is no checkpoint" not in caplog.text
    assert "could not be" not in caplog.text
    assert not list(tmp_path.glob("c/*/lease-*"))
