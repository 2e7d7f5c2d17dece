"""In a real kernel: bar, curves and log lines are there while the cell still trains."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from tests.notebooks.kernels import Cell, Kernel

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

WAITING = """
class Wait(Callback):
    def __init__(self, path):
        self.path = path

    def on_epoch_end(self, state, record):
        print(f"epoch {record['epoch']} is over")
        deadline = time.monotonic() + 60
        while record["epoch"] == 2 and not Path(self.path).exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
"""


def has_all(cell: Cell) -> bool:
    """Picture, bar, and a line of each rank."""
    printed = cell.streamed()
    return (
        bool(cell.outputs("image/png"))
        and "<progress" in "".join(cell.outputs("text/html"))
        and all(f"[rank {rank}] epoch 2 is over" in printed for rank in (0, 1))
    )


def test_everything_shows_up_while_the_cell_runs(kernel: Kernel, folder: Path) -> None:
    go = folder / "go"
    kernel.value(WAITING)
    # The fit cannot end before the test has seen it all; the shortest of its phases is shown.
    code = f"""
from sparkdl.report.live import notebook
pause, notebook._PROGRESS_SECONDS = notebook._PROGRESS_SECONDS, 0.0
model = classifier(epochs=3, verbose=2, callbacks=[Wait({str(go)!r})]).fit(df)
notebook._PROGRESS_SECONDS = pause
"""
    cell = kernel.run(code, until=has_all, then=go.touch)
    assert cell.error is None
    assert base64.b64decode(cell.outputs("image/png")[-1]).startswith(b"\x89PNG")
    shown = [message for message in cell.messages if message["msg_type"] == "display_data"]
    assert len(shown) == 2
    last = [plain for plain in cell.outputs("text/plain") if plain.startswith("fit 1: ")][-1]
    assert last.startswith("fit 1: trained · ")
    assert "epoch 3: loss" in last
    before = [plain for plain in cell.outputs("text/plain") if " 0 of " not in plain]
    assert any(plain.startswith("fit 1: writing the rows for the workers") for plain in before)
    assert cell.streamed("stderr") == ""


def test_a_search_shows_one_board(kernel: Kernel) -> None:
    cell = kernel.run("""
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
estimator = classifier(numWorkers=1)
grid = ParamGridBuilder().addGrid(estimator.learningRate, [0.01, 0.1]).build()
evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
search = CrossValidator(
    estimator=estimator, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, parallelism=2
)
best = search.fit(df)
""")
    assert cell.error is None, cell.error
    shown = [message for message in cell.messages if message["msg_type"] == "display_data"]
    assert len(shown) <= 2
    # Four fits, and the best values once more on all rows.
    plain = [text for text in cell.outputs("text/plain") if text.startswith("fit 1: ")][-1]
    lines = plain.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"fit {number}" for number in range(1, 6)]
    assert all(": trained" in line for line in lines)


def test_a_function_shows_what_it_reports(kernel: Kernel) -> None:
    cell = kernel.run("""
import sparkdl
from sparkdl import TorchRunner

def train():
    context = sparkdl.context()
    for number in range(3):
        print(f"number {number}")
        context.report({"square": number**2})

TorchRunner(num_workers=2, verbose=2).run(train)
""")
    assert cell.error is None, cell.error
    assert any("run 1: ended · report 3: square 4" in one for one in cell.outputs("text/plain"))
    assert "[rank 1] number 2" in cell.streamed()
    assert cell.outputs("image/png")


def test_silence_is_kept(kernel: Kernel) -> None:
    cell = kernel.run("model = classifier(verbose=0).fit(df)")
    assert cell.error is None
    assert not cell.outputs("text/plain")


def test_without_ipywidgets_and_matplotlib_it_works_as_well(kernel: Kernel) -> None:
    hidden = """
import sys
before = {name: sys.modules.get(name) for name in ("ipywidgets", "matplotlib.figure")}
sys.modules.update(dict.fromkeys(before))
try:
    model = classifier().fit(df)
finally:
    for name, module in before.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module
"""
    cell = kernel.run(hidden)
    assert cell.error is None, cell.error
    assert not cell.outputs("image/png")
    assert any("val_" not in one and "loss  " in one for one in cell.outputs("text/plain"))
    assert "pip install matplotlib" in cell.streamed()
    assert cell.streamed("stderr") == ""


def test_a_front_end_that_shows_nothing_ends_no_fit(kernel: Kernel) -> None:
    cell = kernel.run("""
import IPython.display
display = IPython.display.display
def broken(*arguments, **options):
    raise OSError("the front end is gone")
IPython.display.display = broken
try:
    model = classifier().fit(df)
finally:
    IPython.display.display = display
""")
    assert cell.error is None, cell.error
    warning = "nothing more is shown of this run, which goes on: OSError: the front end is gone"
    assert cell.streamed("stderr").count(warning) == 1
