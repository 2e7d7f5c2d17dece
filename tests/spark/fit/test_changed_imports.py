"""What a program has changed of a module that executors import from its file is refused."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
import torch
from torch import nn

from sparkdl import TorchRegressor
from sparkdl.errors import ConfigError
from sparkdl.serialization.imported_values import changed_by_program, differing, imported_values

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
    yield importlib.import_module("a_library")
    for name in ("a_library", "of_the_library"):
        sys.modules.pop(name, None)


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


def found_by(library: Any) -> tuple[list[str], list[str]]:
    """What is refused, and what is only told, where an executor has imported the files anew."""
    expected = imported_values([library.Net, library.Net.forward])
    kept = {name: sys.modules.pop(name) for name in ("a_library", "of_the_library")}
    there = differing(expected)  # imports them anew, as an executor does
    sys.modules.update(kept)
    changed, unknown = changed_by_program(there)
    return [".".join(place) for place in changed], [".".join(place) for place in unknown]


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_what_the_program_has_changed_is_found(library: Any, name: str) -> None:
    CHANGES[name](library)
    library.Net()(torch.ones(library.SIZE))  # which counts, and fills a cache
    library.UNUSED = library.of_the_library.OTHER = 9
    changed, unknown = found_by(library)
    assert changed == [name]
    assert set(unknown) <= {f"a_library.{one}" for one in ("CACHE", "CALLS", "IDS", "PROCESS")}
    assert "a_library.CALLS" in unknown


def test_what_nobody_has_changed_is_as_it_is_elsewhere(library: Any) -> None:
    assert found_by(library) == ([], [])


@pytest.mark.spark
@pytest.mark.slow
def test_a_fit_refuses_it_and_takes_what_is_sent_along(library: Any, spark: SparkSession) -> None:
    path = str(Path(library.__file__).parent)
    spark.sparkContext.addPyFile(f"{path}/a_library.py")
    spark.sparkContext.addPyFile(f"{path}/of_the_library.py")
    df = spark.createDataFrame([([1.0, 2.0], 1.0)] * 4, "features array<float>, label float")

    def fit(module: Any) -> nn.Module:
        fitted: nn.Module = TorchRegressor(
            module=module, numWorkers=1, verbose=0, device="cpu", learningRate=1e-9
        ).fit(df).module  # fmt: skip
        return fitted

    fit(library.Net)
    library.Net.hidden = 7
    with pytest.raises(ConfigError, match=r"changed a_library.Net.hidden.*register_pickle_by_val"):
        fit(library.Net)
    cloudpickle.register_pickle_by_value(library)
    try:
        assert fit(library.Net)(torch.ones(2)).item() > 4
    finally:
        cloudpickle.unregister_pickle_by_value(library)


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
