"""Does a lack of memory lead to messages, instead of the end of a process?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.comm.topology import shared_memory
from sparkdl.comm.topology.shared_memory import NoSharedMemory, map_together

ROOT = Path(__file__).parents[3]
MIB = 1 << 20


def test_what_is_free_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = LocalCommunicator()
    monkeypatch.setattr(shared_memory, "free_memory_bytes", lambda: 100 * MIB)
    map_together(comm, 30 * MIB, comm).discard()
    with pytest.raises(NoSharedMemory, match=r"40 MiB and 100 MiB are free.*memoryOverhead"):
        map_together(comm, 40 * MIB, comm)
    monkeypatch.setattr(shared_memory, "free_memory_bytes", lambda: None)
    map_together(comm, MIB, comm).discard()


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with 700 MiB, as a container has."""
    first = Path("/sys/fs/cgroup/memory")
    root = first if first.is_dir() else first.parent
    folder = root / f"sparkdl-test-{uuid4().hex}"
    try:
        folder.mkdir()
        limit = folder / ("memory.limit_in_bytes" if root == first else "memory.max")
        limit.write_text(str(700 * MIB))
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"no control group of memory can be made here: {error}")
    try:
        yield folder
    finally:
        folder.rmdir()


PROGRAM = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.comm.topology import shared_memory
if sys.argv[2] == "unchecked":
    shared_memory.free_memory_bytes = lambda: None
comm = LocalCommunicator()
try:
    shared_memory.map_together(comm, 1 << 30, comm)
except shared_memory.NoSharedMemory as error:
    print(error)
"""


@pytest.mark.slow
def test_a_container_without_room_for_it_is_an_error_and_no_signal(group: Path) -> None:
    def run(how: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PROGRAM, str(group), how]
        return subprocess.run(
            command, cwd=ROOT, text=True, capture_output=True, timeout=300, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    assert run("unchecked").returncode == -signal.SIGKILL, "so the look at what is free is needed"
    found = run("checked")
    assert found.returncode == 0, found.stderr
    assert "1024 MiB" in found.stdout
