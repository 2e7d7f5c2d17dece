"""A fit says of a module that save will refuse; of others nothing, and most are not exported."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparkdl.serialization import saved_module
from tests.spark.fit.requests import request
from tests.spark.fit.test_check_rows import X, Y, num_classes


class Layer(nn.Module):
    """A class of a script."""

    __module__ = "__main__"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


class Branches(Layer):
    __module__ = "__main__"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class OfLists(Layer):
    __module__ = "__main__"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.tensor([[math.cos(v) for v in row] for row in x.tolist()]))


class OfNumpy(Layer):
    """Goes through numpy, whose functions torch knows."""

    __module__ = "__main__"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.from_numpy(np.tanh(x.numpy())))


@torch.library.custom_op("sparkdl_check_saving::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class OwnOperator(Layer):
    __module__ = "__main__"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(double(x))


class Masked(Layer):
    """Asks for a number, and can be exported nevertheless."""

    __module__ = "__main__"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.relu(x) * x.max().item())


class OverRows(Layer):
    """Takes rows one after the other, and so a fixed number of them."""

    __module__ = "__main__"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(OverRows, self).forward(row) for row in x.split(1)])


class OfConstant(Layer):
    """Has a constant of the number of rows."""

    __module__ = "__main__"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / math.lgamma(x.shape[0] + 2.0)


class SingleRow(Layer):
    """Does something else for a single row."""

    __module__ = "__main__"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if len(x) > 1 else super().forward(x) * 2


class ManyRows(Layer):
    """Does something else for many rows."""

    __module__ = "__main__"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.shape[0] > 10 else super().forward(x) * 2


class Sized(Layer):
    """Reads the number of rows, and does the same whatever it is."""

    __module__ = "__main__"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(len(x), -1)) / x.shape[0] + x.new_zeros(x.size(0), 1)


class InFile(Branches):
    """A class of a file, which is saved by its name."""

    __module__ = __name__


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Modules that were exported."""
    tried: list[nn.Module] = []
    write = saved_module.write_program

    def noted(module: nn.Module, example: saved_module.Given) -> bytes:
        tried.append(module)
        return write(module, example)

    monkeypatch.setattr(saved_module, "write_program", noted)
    return tried


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (Branches, "forward branches on values of its tensors"),
        (OfLists, "torch.export cannot export it"),
        (OwnOperator, "torch.export cannot export it"),
        (OverRows, "torch.export cannot export it"),
        (OfConstant, "torch.export cannot export it"),
        (ManyRows, "torch.export cannot export it"),
        (SingleRow, "torch.export cannot export it"),
    ],
)
def test_a_module_that_cannot_be_saved(
    make: Callable[[], nn.Module], cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert num_classes(make(), [X, Y], request()) == 3
    (told,) = messages(caplog)
    assert told.startswith("the fitted model will predict, but save will refuse it: the module ")
    assert cause in told
    assert "defined in __main__" in told


@pytest.mark.parametrize(
    ("make", "number"), [(Layer, 0), (InFile, 0), (Sized, 0), (Masked, 1), (OfNumpy, 1)]
)
def test_one_that_can(
    make: Callable[[], nn.Module],
    number: int,
    exports: list[nn.Module],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert num_classes(make(), [X, Y], request()) == 3
    assert not messages(caplog)
    assert len(exports) == number
