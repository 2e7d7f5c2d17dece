"""Whatever is lost, at whichever moment, training ends with the same bits and the same history.

A fit of 12 steps, with validation, early stopping and checkpoints, is run once for each moment that
its workers meet (`daemon`) and for each way to lose one: the worker killed, its executor killed,
the worker stopped. `make every-step` runs all cases and prints a table; `make test-all` has a tenth
of the moments, each with one way, which the commit chooses.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.config import CheckpointConfig, EarlyStopping
from sparkdl.mesh import Mesh
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from tests.cluster.daemon import MET, RECORD, STRIKES
from tests.cluster.every_step_table import MEASURED
from tests.cluster.processes import descendants, state_of
from tests.cluster.test_recovery import digest, nothing_is_left, request

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.spark.run.run import FitRequest, FitResult

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow]

__all__ = ["nothing_is_left"]  # a fixture for every test here

ALL = os.environ.get("EVERY_STEP") == "1"
SHARE = 10
"""One of so many moments is met where not all are."""
NUM_ROWS, EPOCHS, STEPS = 300, 3, 12
_CASE_SECONDS = 90.0


def asked(**changes: Any) -> FitRequest:
    """Four steps an epoch, of which the last evaluates and the second writes a checkpoint."""
    wanted = request(
        checkpoint=CheckpointConfig(interval=2), validation_fraction=0.1, max_restarts=6
    )
    config = replace(
        wanted.config,
        epochs=EPOCHS,
        early_stopping=EarlyStopping(patience=2),
        **{"batch_size": 40, **changes},
    )
    return replace(wanted, config=config)


def in_gang() -> FitRequest:
    return asked()


def in_rounds() -> FitRequest:
    return asked(sync_strategy=ParameterAveraging(averaging_period=2))


def along_mesh() -> FitRequest:
    return asked(parallelism=Mesh(shard=2, smallest_unit=1))


def with_equal_bits() -> FitRequest:
    """Workers come and go: one is enough."""
    return replace(asked(elasticity="bits", batch_size=27), num_shards=3, min_workers=1)


MODES: dict[str, Callable[[], FitRequest]] = {
    "gang": in_gang, "rounds": in_rounds, "mesh": along_mesh, "elastic": with_equal_bits,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One loss, and how the fit ended."""

    mode: str
    kind: str
    moment: str
    seconds: float
    restarts: int
    problem: str = ""


def traces(result: FitResult) -> str:
    """The weights and the history, in one hash."""
    history = [{**record, "seconds": 0.0} for record in result.summary.history]
    return digest(result) + hashlib.sha256(json.dumps(history).encode()).hexdigest()


def chosen(mode: str, met: list[str]) -> list[tuple[str, str]]:
    """Ways to lose a worker at moments, of one rank each: all, or those that the commit chooses."""
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    seed = os.environ.get("EVERY_STEP_SEED", found.stdout.strip())
    ranks: dict[tuple[str, str], list[str]] = {}
    for moment in met:
        what, _, step = moment.split(", ")
        ranks.setdefault((what, step), []).append(moment)

    def number(place: tuple[str, str]) -> int:
        text = "/".join((seed, mode, *place))
        return int(hashlib.sha256(text.encode()).hexdigest(), 16)

    places = sorted(ranks, key=number)
    kinds, cases = list(STRIKES), list[tuple[str, str]]()
    for place in places if ALL else places[: -(-len(places) // SHARE)]:
        first, same = number(place), ranks[place]
        wanted = kinds if ALL else [kinds[first % len(kinds)]]
        cases += [(kind, same[(first + n) % len(same)]) for n, kind in enumerate(wanted)]
    return cases


@pytest.fixture(scope="module")
def df(cluster: SparkSession) -> Iterator[DataFrame]:
    cluster.conf.set("spark.sparkdl.elasticWait", "1")
    cluster.conf.set("spark.sparkdl.heartbeatTimeout", "4")
    yield rows_for(cluster)
    cluster.conf.unset("spark.sparkdl.elasticWait")
    cluster.conf.set("spark.sparkdl.heartbeatTimeout", "5")


def rows_for(spark: SparkSession) -> DataFrame:
    """All different, so that shards are about equal, and an epoch has four steps."""
    from pyspark.sql import functions as F

    features = [(F.col("id") * k % 101 / 50 - 1).cast("float") for k in (1, 7)]
    features.append((F.col("id") / NUM_ROWS).cast("float"))
    return spark.range(0, NUM_ROWS, 1, 3).select(
        F.array(*features).alias("features"), (F.col("id") % 3).alias("label")
    )


def fitted(df: DataFrame, mode: str) -> FitResult:
    from sparkdl.spark.fit.fit import fit

    return fit(df, MODES[mode]())


@contextlib.contextmanager
def recorded(folder: Path) -> Iterator[list[str]]:
    """The moments that are met in the block."""
    (folder / MET).mkdir(exist_ok=True)
    for path in (folder / MET).iterdir():
        path.unlink()
    (folder / RECORD).touch()
    found: list[str] = []
    try:
        yield found
    finally:
        (folder / RECORD).unlink()
    found += sorted(path.name for path in (folder / MET).iterdir())


def struck(df: DataFrame, folder: Path, mode: str, kind: str, moment: str, wanted: str) -> Case:
    """Run one case."""
    order = folder / f"{moment}.{kind}"
    order.touch()
    began = time.monotonic()
    problem, restarts = "", 0
    try:
        result = fitted(df, mode)
        restarts = result.summary.restarts
        if traces(result) != wanted:
            problem = "other bits"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    if not problem and seconds > _CASE_SECONDS:
        problem = "too slow"
    if order.exists():
        order.unlink()
        problem = problem or "was not met"
    (folder / f"{moment}.struck").unlink(missing_ok=True)
    for pid in descendants(os.getpid()):
        if state_of(pid) == "T":
            os.kill(pid, signal.SIGKILL)
    case = Case(
        mode=mode, kind=kind, moment=moment, seconds=seconds, restarts=restarts, problem=problem
    )
    MEASURED.parent.mkdir(exist_ok=True)
    with MEASURED.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(case)) + "\n")
    return case


@pytest.mark.timeout(5400 if ALL else 600)
@pytest.mark.parametrize("mode", MODES)
def test_a_loss_at_any_moment_changes_no_bit(df: DataFrame, moments: Path, mode: str) -> None:
    with recorded(moments) as met:
        undisturbed = fitted(df, mode)
    assert undisturbed.summary.steps == STEPS
    assert undisturbed.summary.restarts == 0
    steps = {moment.rpartition(" ")[2] for moment in met if moment.startswith("step")}
    assert steps == {str(step) for step in range(1, STEPS + 1)}
    wanted = traces(undisturbed)
    cases = [struck(df, moments, mode, kind, moment, wanted) for kind, moment in chosen(mode, met)]
    assert cases
    assert [case for case in cases if case.problem] == []
