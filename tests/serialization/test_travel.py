"""What becomes of modules on their way to a worker and back: all kinds of them, and refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.serialization.packed_module import (
    travelled,
)

HERE = Path(__file__).parent / "travelling"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_kind_of_module_computes_the_same_in_another_process(tmp_path: Path) -> None:
    """Forward and three steps each of SGD and Adam give equal bits; ties and hooks are there."""
    file = tmp_path / "modules"
    for script in ("modules.py", "worker.py"):  # each a process without the other's classes
        run = [sys.executable, "-W", "error:TypedStorage", str(HERE / script), str(file)]
        result = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["bad"] == {}
    assert len(found["names"]) > 40


class Net(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


LOCK = threading.Lock()


class UsesLock(Net):
    def forward(self, x: torch.Tensor) -> Any:
        with LOCK:
            return self.layer(x)


class MadeAnew(Net):
    def __reduce__(self) -> Any:
        return MadeAnew, ()


class Renamed:
    """Says that it is a value of the main program, which workers do not have."""

    def __reduce__(self) -> Any:
        return "some_name"


def hooked(value: Any) -> Net:
    net = Net()
    net.layer.weight.register_hook(lambda gradient: gradient if value else None)
    return net


def shares_with_a_script() -> nn.Module:
    net = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    return net


REFUSED: dict[str, tuple[Any, str]] = {
    "lock": (lambda: Net(lock=threading.Lock()), "its attribute lock"),
    "lock inside": (lambda: nn.Sequential(Net(parts=[{"a": threading.Lock()}])), "0.parts"),
    "lambda": (lambda: Net(act=lambda x: (LOCK, x)), "its attribute act"),
    "file": (lambda: Net(file=Path(os.devnull).open("w")), "its attribute file"),  # noqa: SIM115
    "generator": (lambda: Net(rows=(x for x in "ab")), "its attribute rows"),
    "thread": (lambda: Net(thread=threading.Thread()), "its attribute thread"),
    "hook": (lambda: hooked(threading.Lock()), "its attribute layer.weight"),
    "another": (MadeAnew, "layer.weight has other values"),
    "tie with a script": (shares_with_a_script, "do not share memory"),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_travel_is_named(kind: str) -> None:
    make, named = REFUSED[kind]
    with pytest.raises(ConfigError, match=named):
        travelled(make(), copies=True)
