"""Control groups, in which processes get little of this machine, or nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest


def _limits(controller: str, percent: int) -> tuple[dict[str, str], dict[str, str]]:
    """Files of a control group, and what is written there: in version 1, and in version 2."""
    quota = str(1000 * percent)
    return {
        "freezer": ({"freezer.state": "FROZEN"}, {"cgroup.freeze": "1"}),
        "cpu": (
            {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": quota},
            {"cpu.max": f"{quota} 100000"},
        ),
        "memory": ({"memory.limit_in_bytes": str(64 << 20)}, {"memory.max": str(64 << 20)}),
    }[controller]


@contextmanager
def limited(controller: str, pids: Sequence[int], *, percent: int = 2) -> Iterator[None]:
    """Put processes into a control group, below the one in which this process is.

    There they are frozen, share 64 MiB, or so many ``percent`` of a processor. What they have
    allocated before does not count. Who is moved out of it, is frozen no more.

    Raises:
        OSError: this machine has no such control groups, or lets nobody make one.
    """
    version, own = _own_group(controller)
    group = own / f"sparkdl-faults-{os.getpid()}-{controller}"
    group.mkdir()
    try:
        for name, value in _limits(controller, percent)[version - 1].items():
            (group / name).write_text(value)
        _move(pids, group)
        yield
    finally:
        _move((group / "cgroup.procs").read_text().split(), own)
        group.rmdir()


def _move(pids: Sequence[int | str], group: Path) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))


def _own_group(controller: str) -> tuple[int, Path]:
    """Version and place of this process's group."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = {name: path for _, names, path in lines for name in names.split(",")}
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    for version, kind, name in ((1, "cgroup", controller), (2, "cgroup2", "")):
        for _, place, this_kind, options, *_ in mounts:
            if this_kind == kind and name in own and (not name or name in options.split(",")):
                return version, Path(place + own[name])
    raise FileNotFoundError(f"no control groups for {controller!r} are mounted")


def skip_without(controller: str) -> None:
    """Skip the test on a machine that has no such control groups, or lets nobody make one."""
    try:
        with limited(controller, []):
            pass
    except OSError as error:
        pytest.skip(f"this test needs control groups ({controller}): {error}")
