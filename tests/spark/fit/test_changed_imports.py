"""What a program has changed of a module that executors import from its file is sent to them."""

from __future__ import annotations

import ast
import importlib
import math
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from sparkdl import ParameterAveraging, TorchRegressor
from sparkdl.serialization.program import packed_values
from sparkdl.serialization.program.imported_values import (
    ProgramValues,
    differing,
    imported_values,
    program_code,
    values_to_send,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LIBRARY = """
import itertools
import os
from torch import nn
import of_the_library

SIZE = 2
OPTIONS = {"factor": 1.0}
CACHE = {}
CALLS = 0
IDS = itertools.count()
PROCESS = os.getpid()
UNUSED = 1

def scaled(x):
    return x * OPTIONS["factor"] * of_the_library.SHIFT

class Base(nn.Module):
    hidden = 4

class Net(Base):
    def __init__(self):
        global CALLS
        super().__init__()
        CALLS += 1
        self.number = next(IDS)
        self.layer = nn.Linear(SIZE, 1)

    def forward(self, x):
        CACHE.setdefault("seen", PROCESS)
        return scaled(self.layer(x)) + self.hidden
"""


MAKER = """
import torch
from torch import nn
import of_the_library

FACTOR = 1.0

def make():
    class Net(nn.Linear):
        shift = 2

        def forward(self, x):
            return super().forward(x) * FACTOR + of_the_library.SHIFT

    return Net(2, 1)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "a_library.py").write_text(LIBRARY, encoding="utf-8")
    (tmp_path / "of_the_library.py").write_text("SHIFT = 1.0\nOTHER = 2\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield imported_anew()
    for name in ("a_library", "of_the_library"):
        sys.modules.pop(name, None)


def imported_anew() -> Any:
    for name in ("a_library", "of_the_library"):
        sys.modules.pop(name, None)
    return importlib.import_module("a_library")


def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = self.layer(x)
    return out


def set_shift(library: Any) -> None:
    library.of_the_library.SHIFT = 2.0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a_library.SIZE": lambda library: setattr(library, "SIZE", 3),
    "a_library.OPTIONS": lambda library: library.OPTIONS.update(factor=2.0),
    "a_library.Base.hidden": lambda library: setattr(library.Base, "hidden", 7),
    "a_library.Net.forward": lambda library: setattr(library.Net, "forward", forward),
    "a_library.scaled": lambda library: setattr(library, "scaled", torch.sin),
    "of_the_library.SHIFT": set_shift,
}


def sent_from(library: Any) -> ProgramValues:
    """What is sent where an executor has imported the files anew."""
    expected = imported_values([library.Net, library.Net.forward])
    kept = {name: sys.modules.pop(name) for name in ("a_library", "of_the_library")}
    there = differing(expected)  # imports them anew, as an executor does
    sys.modules.update(kept)
    return values_to_send(expected, there)


LOOK = """
import pickle, sys
sys.path[:], programs = pickle.load(sys.stdin.buffer)
from sparkdl.serialization.program.imported_values import give_back
def look():
    import a_library, of_the_library, torch
    net = a_library.Net.__new__(a_library.Net)
    torch.nn.Module.__init__(net)
    net.layer = torch.nn.Identity()
    said = net.forward(torch.ones(1)).item()
    return [a_library.SIZE, a_library.OPTIONS, a_library.Base.hidden, a_library.CALLS, said]
def looks(sent):
    yield look()
    pickle.loads(sent)
    yield look()
    pickle.loads(pickle.dumps(pickle.loads(sent)))  # once more changes nothing
    yield look()
    give_back()
    yield look()
print([list(looks(sent)) for sent in programs])
"""


def seen_by_another(programs: list[bytes]) -> list[list[list[Any]]]:
    """What another process sees before, with, again with, and without what each program sends."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK], input=pickle.dumps((sys.path, programs)),
        capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    found: list[list[list[Any]]] = ast.literal_eval(done.stdout.decode())
    return found


AS_IN_THE_FILE = [2, {"factor": 1.0}, 4, 0, 5.0]
CHANGED: dict[str, list[Any]] = {
    "a_library.SIZE": [3, {"factor": 1.0}, 4, 1, 5.0],
    "a_library.OPTIONS": [2, {"factor": 2.0}, 4, 1, 6.0],
    "a_library.Base.hidden": [2, {"factor": 1.0}, 7, 1, 8.0],
    "a_library.Net.forward": [2, {"factor": 1.0}, 4, 1, 1.0],
    "a_library.scaled": [2, {"factor": 1.0}, 4, 1, torch.ones(1).sin().item() + 4],
    "of_the_library.SHIFT": [2, {"factor": 1.0}, 4, 1, 6.0],
}


@pytest.mark.slow
@pytest.mark.usefixtures("library")
def test_what_the_program_has_changed_is_there_too() -> None:
    programs = []
    for change in CHANGES.values():
        library = imported_anew()
        library.UNUSED = library.of_the_library.OTHER = 9
        library.Net()(torch.ones(library.SIZE))  # which counts, and fills a cache
        change(library)
        programs.append(pickle.dumps(sent_from(library)))
    for name, seen in zip(CHANGES, seen_by_another(programs), strict=True):
        before, there, again, after = seen
        assert before == after == AS_IN_THE_FILE, name
        assert there == again, name
        assert there[:4] == CHANGED[name][:4], name
        assert there[4] == pytest.approx(CHANGED[name][4]), name


def test_nothing_is_sent_that_nobody_has_changed(library: Any) -> None:
    assert sent_from(library).values == {}


def test_the_program_keeps_its_own_values(library: Any) -> None:
    options = library.OPTIONS
    values = {("a_library", "OPTIONS"): pickle.dumps({"factor": 5.0})}
    pickle.loads(pickle.dumps(ProgramValues(values)))
    assert library.OPTIONS is options
    pickle.loads(pickle.dumps(ProgramValues(values, ("elsewhere", 1))))
    assert library.OPTIONS == {"factor": 5.0}
    pickle.loads(pickle.dumps(ProgramValues({}, ("elsewhere", 1))))
    assert library.OPTIONS is options


def test_what_a_worker_cannot_take_is_told_by_name(
    library: Any, caplog: pytest.LogCaptureFixture
) -> None:
    values = {("a_library", "Gone.size"): pickle.dumps(5), ("a_library", "SIZE"): pickle.dumps(6)}
    try:
        pickle.loads(pickle.dumps(ProgramValues(values, ("elsewhere", 1))))
        assert library.SIZE == 6
    finally:
        pickle.loads(pickle.dumps(ProgramValues({}, ("elsewhere", 1))))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "a_library.Gone.size is not what it is on the driver" in record.getMessage()


def test_values_are_told_that_no_fresh_process_can_judge(
    library: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")
    library.SIZE = 4
    assert sent_from(library).values == {}
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "no fresh process says what files have" in record.getMessage()
    assert "a_library.SIZE" in record.getMessage()


def test_what_cannot_be_sent_is_told_once(library: Any, caplog: pytest.LogCaptureFixture) -> None:
    packed_values.told.clear()
    library.OPTIONS["lock"] = threading.Lock()
    library.CACHE["large"] = b"0" * (2 << 20)
    for _ in range(2):
        sent = sent_from(library)
        assert set(sent.values) <= {("a_library", name) for name in ("CALLS", "IDS", "PROCESS")}
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 2
    assert any("a_library.OPTIONS, which cannot be sent" in text for text in told)
    assert any("a_library.CACHE" in text and "more than 1024 KiB" in text for text in told)


def test_names_of_attributes_are_no_globals(library: Any) -> None:
    """A module's ``self.scale`` says nothing of a function ``scale`` of the program."""
    code = "import of_the_library\ndef scale(): return of_the_library.SHIFT\n"
    code += "class Own:\n    def forward(self): return self.scale\n"
    space: dict[str, Any] = {"__name__": "a_program"}
    exec(code, space)
    assert imported_values([space["Own"]]) == {}
    assert set(imported_values([space["scale"]])) == {("of_the_library", "SHIFT")}


EDITED = LIBRARY.replace("SIZE = 2", "SIZE = 5").replace(
    "* of_the_library.SHIFT", "* of_the_library.SHIFT + added()"
).replace("class Base(nn.Module):\n    hidden = 4", """
def added():
    return 100.0

class Below(nn.Module):
    hidden = 20

    def __init__(self):
        super().__init__()

class Base(Below):
    pass
""")  # fmt: skip

LOOK_AGAIN = """
import pickle, sys, torch
sys.path[:], was_there, sent = pickle.load(sys.stdin.buffer)
def look():
    import a_library, of_the_library
    net = a_library.Net()
    net.layer = torch.nn.Identity()
    said = net(torch.ones(1)).item()
    return [a_library.SIZE, type(net).__mro__[2].__name__, said]
found = [look()] if was_there else []
if was_there:  # as a worker that has served an earlier fit
    from pathlib import Path
    path = Path(sys.modules["a_library"].__file__)
    path.write_text(sys.argv[1], encoding="utf-8")
pickle.loads(sent)
found.append(look())
from sparkdl.serialization.program.imported_values import give_back
give_back()
found.append(look())
print(found)
"""
OLD, NEW = [2, "Module", 5.0], [5, "Below", 121.0]


def seen_after_an_edit(
    sent: ProgramValues, *, was_there: bool, text: str = EDITED
) -> list[list[Any]]:
    """What another process sees with and without what was sent, and before if it ``was_there``."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", LOOK_AGAIN, text],
        input=pickle.dumps((sys.path, was_there, pickle.dumps(sent))),
        capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    assert b"is not what it is on the driver" not in done.stderr
    found: list[list[Any]] = ast.literal_eval(done.stdout.decode())
    return found


def code_from(library: Any) -> ProgramValues:
    return ProgramValues(code=program_code([library.Net]))


@pytest.mark.slow
def test_workers_that_have_imported_a_file_get_what_the_program_has_reloaded(library: Any) -> None:
    path = Path(library.__file__)
    path.write_text(EDITED, encoding="utf-8")
    importlib.reload(library)
    sent = code_from(library)
    path.write_text(LIBRARY, encoding="utf-8")
    assert seen_after_an_edit(sent, was_there=True) == [OLD, NEW, OLD]


@pytest.mark.slow
def test_workers_that_import_an_edited_file_get_what_the_program_runs(library: Any) -> None:
    Path(library.__file__).write_text(EDITED, encoding="utf-8")
    assert seen_after_an_edit(code_from(library), was_there=False) == [OLD, NEW]


@pytest.mark.slow
def test_a_file_that_is_edited_while_training_runs_is_not_what_workers_run(library: Any) -> None:
    """Restarts and rounds may have new workers."""
    path = Path(library.__file__)
    for file in (path, path.with_name("of_the_library.py")):
        os.utime(file, (1, 1))  # older than this program
    sent = code_from(library)
    assert None not in sent.code.sources.values()
    assert not sent.code.is_needed()
    path.write_text(EDITED, encoding="utf-8")
    assert sent.code.is_needed()
    assert seen_after_an_edit(sent, was_there=False) == [OLD, NEW]


@pytest.mark.spark
@pytest.mark.slow
def test_fits_train_with_what_the_program_has(library: Any, spark: SparkSession) -> None:
    path = str(Path(library.__file__).parent)
    spark.sparkContext.addPyFile(f"{path}/a_library.py")
    spark.sparkContext.addPyFile(f"{path}/of_the_library.py")
    df = spark.createDataFrame([([0.0, 0.0], 0.0)] * 4, "features array<float>, label float")

    models = []

    def loss(**options: Any) -> float:
        """Of rows of zeros: the square of what forward adds, before any step."""
        fitted = TorchRegressor(
            module=Zero(library), numWorkers=1, verbose=0, device="cpu", learningRate=1e-9,
            **options,
        ).fit(df)  # fmt: skip
        models.append(fitted)
        return float(fitted.summary.history[0]["loss"])

    def assert_gives(value: float) -> None:
        """What the first model gives for rows of zeros, and its loss."""
        rows = models[0].transform(df).collect()
        assert [row["prediction"] for row in rows] == pytest.approx([value] * 4)
        assert models[0].evaluate(df).loss == pytest.approx(value**2)

    rounds = {"syncStrategy": ParameterAveraging(averaging_period=1)}
    assert loss() == pytest.approx(16.0)
    library.Net.hidden = 7
    assert loss() == pytest.approx(49.0)
    assert loss(**rounds) == pytest.approx(49.0)
    assert_gives(7.0)
    library.OPTIONS["factor"] = math.nan  # of zeros
    assert all(math.isnan(row["prediction"]) for row in models[0].transform(df).collect())
    library.OPTIONS["factor"] = 1.0
    del library.Net.hidden
    assert_gives(4.0)
    assert loss() == pytest.approx(16.0)
    assert loss(**rounds) == pytest.approx(16.0)
    edited = EDITED.replace("SIZE = 5", "SIZE = 2")
    Path(library.__file__).write_text(edited, encoding="utf-8")
    assert loss() == pytest.approx(16.0)  # as the program has not reloaded it
    importlib.reload(library)
    assert loss() == pytest.approx(14400.0)
    assert loss(**rounds) == pytest.approx(14400.0)


class Zero:
    """Makes a net whose layer gives zeros."""

    def __init__(self, library: Any) -> None:
        self.kind = library.Net

    def __call__(self) -> nn.Module:
        net: nn.Module = self.kind()
        for parameter in net.parameters():
            nn.init.zeros_(parameter)
        return net


def test_classes_that_a_function_makes_travel_with_all_that_they_name(
    library: Any, tmp_path: Path
) -> None:
    """Their own globals are sent along, so only those of other modules could be others there."""
    (tmp_path / "a_maker.py").write_text(MAKER, encoding="utf-8")
    maker = importlib.import_module("a_maker")
    try:
        found = imported_values([type(maker.make())])
        assert set(found) == {("of_the_library", "SHIFT")}
        assert set(imported_values([maker.make])) > {("of_the_library", "SHIFT")}
    finally:
        del sys.modules["a_maker"]
