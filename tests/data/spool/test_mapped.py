"""A worker whose rows come in windows takes no more memory than `docs/data.md` says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sparkdl.data.batches import GATHER_BYTES
from sparkdl.data.shuffle_windows import Windows, make_windows
from sparkdl.data.spool.mapped import MappedFile
from sparkdl.errors import StorageError

READER = Path(__file__).with_name("read_windows.py")
MIB = 1 << 20
ROW_BYTES, ROWS = 3000, 40_000
SPOOL_BYTES = ROW_BYTES * ROWS  # 114 MiB
SLACK = 6 * MIB  # of Python, the allocator, and the kernel's own counting


@pytest.fixture(scope="module")
def spool(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    directory = tmp_path_factory.mktemp("spool")
    values = np.random.default_rng(0).integers(0, 255, (ROWS, ROW_BYTES), dtype=np.uint8)
    values.tofile(directory / "train-000.bin")
    return directory, int(values.sum(dtype=np.int64))


def memory_of(directory: Path, windows: Windows | None, what: str) -> dict[str, int]:
    chosen = json.dumps(None if windows is None else vars(windows))
    arguments = [str(directory), str(ROWS), str(ROW_BYTES), chosen, what]
    done = subprocess.run(
        [sys.executable, str(READER), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are told by Linux")
def test_windows_bound_the_memory_of_training(spool: tuple[Path, int]) -> None:
    directory, total = spool
    windows = make_windows(8 * MIB, ROW_BYTES)
    found = memory_of(directory, windows, "train")
    whole = memory_of(directory, None, "train")
    assert found["sum"] == whole["sum"] == total
    window_bytes = windows.num_rows * ROW_BYTES
    group_bytes = windows.group_rows * ROW_BYTES
    order_bytes = 12 * windows.num_rows
    formula = 2 * window_bytes + 4 * GATHER_BYTES + 2 * group_bytes + order_bytes
    assert found["peak"] <= formula + SLACK
    # Otherwise the spool is mapped as a whole, so the measurement can tell.
    assert whole["peak"] > SPOOL_BYTES > 2 * (formula + SLACK)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are told by Linux")
def test_windows_bound_the_memory_of_validation(spool: tuple[Path, int]) -> None:
    directory, total = spool
    windows = make_windows(64 * MIB, ROW_BYTES)
    found = memory_of(directory, windows, "validation")
    assert found["sum"] == total
    assert found["peak"] <= 4 * windows.group_rows * ROW_BYTES + SLACK
    assert memory_of(directory, None, "validation")["peak"] > SPOOL_BYTES


def test_rows_are_read_without_their_pages(tmp_path: Path) -> None:
    values = np.arange(MIB, dtype=np.int32)
    values.tofile(tmp_path / "file")
    file = MappedFile(tmp_path / "file", values.nbytes)
    mapped, out = file.values("int32"), np.zeros(MIB, dtype=np.int32)
    file.read(mapped[10:-1], out[10:-1])
    file.read(mapped[5:5], out[5:5])
    assert out[10:-1].tolist() == values[10:-1].tolist()
    assert not out[:10].any() and not out[-1]
    os.truncate(tmp_path / "file", 100)
    with pytest.raises(StorageError, match=r"cannot read the spool .* has become shorter"):
        file.read(mapped[10:-1], out[10:-1])
