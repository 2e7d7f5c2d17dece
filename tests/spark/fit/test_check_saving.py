"""A fit says of a module that save will refuse; of others nothing, and most are not exported."""

from __future__ import annotations

import logging
from collections.abc import Callable

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


class OfNumpy(Layer):
    __module__ = "__main__"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.from_numpy(x.numpy().copy()))


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
        (OfNumpy, "torch.export cannot export it"),
        (OwnOperator, "torch.export cannot export it"),
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


@pytest.mark.parametrize(("make", "number"), [(Layer, 0), (InFile, 0), (Masked, 1)])
def test_one_that_can(
    make: Callable[[], nn.Module],
    number: int,
    exports: list[nn.Module],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert num_classes(make(), [X, Y], request()) == 3
    assert not messages(caplog)
    assert len(exports) == number
