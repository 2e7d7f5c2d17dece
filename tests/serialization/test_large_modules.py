"""Do modules of more than 2 GB come back, with no more memory than one copy beside the module?"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from sparkdl.storage.storage import LocalStorage
from tests.serialization.saving import save_module

ROOT = Path(__file__).parents[2]
NUM_ROWS = 2_300_000
WIDTH = 256
NUM_BYTES = NUM_ROWS * WIDTH * 4

LOAD = """
import resource, sys, torch, sparkdl
from torch import nn

def touch(*_, **__):  # torch's own initialization costs half a minute and is overwritten
    pass

nn.init.normal_ = touch
module = sparkdl.load_module(sys.argv[1])
weight = module[0].weight
assert weight.shape == (2_300_000, 256)
print(weight[-1, 0].item(), weight[1_234_567, 7].item(), weight[5, 5].item())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for file in sorted(tmp_path.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()


def tall() -> nn.Sequential:
    """Nearly all zeros, in memory that the system does not give before it is written to."""
    embedding = nn.Embedding(NUM_ROWS, WIDTH, _weight=torch.zeros(NUM_ROWS, WIDTH))
    with torch.no_grad():
        embedding.weight[-1, 0] = 1.5
        embedding.weight[1_234_567, 7] = -2.5
    return nn.Sequential(embedding)


@pytest.mark.slow
def test_a_module_over_two_gigabytes_comes_back_in_twice_its_size(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert NUM_BYTES > 2**31
    monkeypatch.setattr(nn.init, "normal_", lambda *_, **__: None)
    save_module(tall(), None, LocalStorage(folder), "model", example_inputs=None, extra={})
    file = folder / "model" / "weights.safetensors"
    record = json.loads((folder / "model" / "module.json").read_text())["files"][file.name]
    assert record["size_bytes"] == file.stat().st_size > NUM_BYTES
    with file.open("rb") as opened:
        assert hashlib.file_digest(opened, "sha256").hexdigest() == record["sha256"]
    command = [sys.executable, "-W", "error", "-c", LOAD, str(folder)]
    shown = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=90
    ).stdout.split()
    assert [float(value) for value in shown[:3]] == [1.5, -2.5, 0.0]
    own = 700 << 20  # Python and torch
    assert int(shown[3]) < 2 * NUM_BYTES + own
