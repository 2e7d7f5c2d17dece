"""In a real kernel: the stop button ends a fit, whatever it does, and the next fit works."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.notebooks.kernels import Cell, Kernel

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(400)]

LINGER = """
class Linger(Callback):
    def __init__(self, path):
        self.path = path

    def on_step_end(self, state):
        Path(self.path).touch()
        time.sleep(30)

def slow(path):
    def touch(batches):
        for batch in batches:
            Path(path).touch()
            time.sleep(30)
            yield batch
    return df.mapInArrow(touch, df.schema)

import sparkdl
from sparkdl import TorchRunner

def wait(path):
    Path(path).touch()
    time.sleep(30)

def in_rounds(path):
    strategy = ParameterAveraging(averaging_period=2)
    return classifier(callbacks=[], syncStrategy=strategy, epochs=10**4, executionMode="rounds")

from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

def search(path):
    estimator = classifier(numWorkers=1, callbacks=[Linger(path)])
    return CrossValidator(
        estimator=estimator,
        estimatorParamMaps=ParamGridBuilder().addGrid(estimator.epochs, [1, 2, 3, 4]).build(),
        evaluator=MulticlassClassificationEvaluator(metricName="accuracy"),
        numFolds=2,
        parallelism=2,
    )
"""

GANG = "classifier(callbacks=[Linger({marker!r})]).fit(df)"
ROUNDS = "in_rounds({marker!r}).fit(df)"
SPOOLING = "classifier().fit(slow({marker!r}))"
FUNCTION = "TorchRunner(num_workers=2, data=df).run(wait, {marker!r})"
SEARCH = "search({marker!r}).fit(df)"
EVALUATION = "model.evaluate(slow({marker!r}))"

NOTHING_LEFT = """
import glob, tempfile, threading
deadline = time.monotonic() + 60
def left():
    files = [str(p) for p in Path("local").rglob("sparkdl-*") if p.exists()]
    files += glob.glob(f"{tempfile.gettempdir()}/sparkdl-*")
    jobs = list(spark.sparkContext.statusTracker().getActiveJobsIds())
    cached = spark.sparkContext._jsc.getPersistentRDDs().size()
    threads = [t.name for t in threading.enumerate() if t.name.startswith("sparkdl-")]
    return files + [f"job {job}" for job in jobs] + [f"cached {cached}"] * bool(cached) + threads
while left() and time.monotonic() < deadline:
    time.sleep(0.2)
print(left())
"""


@pytest.fixture(scope="module")
def expected(kernel: Kernel) -> str:
    """Weights of a fit that nobody has interrupted."""
    kernel.value(LINGER)
    kernel.value("model = classifier().fit(df)")
    return kernel.value("print(digest(model))")


def is_begun(marker: Path, cell: Cell) -> bool:
    """Whether there is something to interrupt: a file, or a shown step of a run in rounds."""
    return marker.exists() or any("· loss" in one for one in cell.outputs("text/plain"))


@pytest.mark.parametrize(
    "code",
    [GANG, ROUNDS, SPOOLING, FUNCTION, SEARCH, EVALUATION],
    ids=["gang", "rounds", "spooling", "function", "search", "evaluation"],
)
def test_the_stop_button(kernel: Kernel, tmp_path: Path, expected: str, code: str) -> None:
    marker = tmp_path / "marker"
    pressed: list[float] = []

    def press() -> None:
        time.sleep(0.3)
        pressed.append(time.monotonic())
        kernel.interrupt()

    cell = kernel.run(
        code.format(marker=str(marker)), until=lambda cell: is_begun(marker, cell), then=press
    )
    assert time.monotonic() - pressed[0] < 60  # each of these would take minutes
    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt", "\n".join(cell.error["traceback"])
    traceback = "\n".join(cell.error["traceback"])
    assert "py4j" not in traceback.lower()
    if code != SEARCH:  # where pyspark's own waiting is torn off, in the main thread
        assert "its Spark jobs were cancelled" in cell.error["evalue"]
        assert len(traceback.splitlines()) < 80
    assert kernel.value(NOTHING_LEFT) == "[]"
    kernel.value("again = classifier().fit(df)")
    assert kernel.value("print(digest(again))") == expected


def test_any_moment_is_a_good_one(kernel: Kernel, expected: str) -> None:
    """Also those in which py4j waits for short answers."""
    for tenths in (1, 6, 12, 20):
        cell, name = kernel.begin("model = classifier().fit(df)")
        time.sleep(tenths / 10)
        kernel.interrupt()
        kernel.follow(cell, name, lambda _: False, 120)
        if cell.error is not None:
            assert cell.error["ename"] == "KeyboardInterrupt", "\n".join(cell.error["traceback"])
        # py4j would now give the answers of earlier calls, had one been torn.
        assert kernel.value("print(spark.range(5).count(), spark.range(7).count())") == "5 7"
    assert kernel.value(NOTHING_LEFT) == "[]"
    assert kernel.value("print(digest(classifier().fit(df)))") == expected


def test_pressing_again_does_not_disturb_cleaning_up(
    kernel: Kernel, tmp_path: Path, expected: str
) -> None:
    """Three more would: then the user is in a hurry."""
    marker = tmp_path / "marker"

    def press() -> None:
        for _ in range(3):
            kernel.interrupt()
            time.sleep(0.2)

    code = GANG.format(marker=str(marker))
    cell = kernel.run(code, until=lambda _: marker.exists(), then=press)
    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert kernel.value(NOTHING_LEFT) == "[]"
    assert kernel.value("print(digest(classifier().fit(df)))") == expected


def test_the_cell_that_has_made_the_session(kernel: Kernel, tmp_path: Path, expected: str) -> None:
    """There pyspark's own handler is in place, which would cancel whatever runs."""
    marker = tmp_path / "marker"
    from tests.notebooks.conftest import PREPARE
    from tests.notebooks.kernels import SESSION

    begin = f"spark.stop()\n{SESSION}\n{PREPARE}\n{LINGER}\n"
    code = begin + GANG.format(marker=str(marker))
    cell = kernel.run(code, until=lambda _: marker.exists(), then=kernel.interrupt)
    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert kernel.value(NOTHING_LEFT) == "[]"
    assert kernel.value("print(digest(classifier().fit(df)))") == expected
