"""Where does a worker find itself, and do all workers and the driver run the same software?"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from sparkdl.comm.channel import Address

_COMPARED = ("sparkdl", "torch", "pyspark", "pyarrow")


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """A worker's place in the gang, as the launcher found it."""

    rank: int
    world_size: int
    address: str
    """Address that Spark uses for this host; the peers can reach it."""
    gpu_addresses: tuple[str, ...]
    """What Spark assigned to this task, such as ``("1",)``; empty without GPU scheduling."""
    channel: Address


def versions() -> dict[str, str]:
    """Versions that must agree between driver and workers; imports none of the packages."""
    found = {"python": platform.python_version()}
    for name in _COMPARED:
        found[name] = _version(name)
    return found


@cache  # it parses a file, and a worker that is reused is asked at every fit
def _version(name: str) -> str:
    if name == "sparkdl":
        from sparkdl import __version__

        return __version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def difference(driver: Mapping[str, str], worker: Mapping[str, str], where: str) -> str | None:
    """One sentence that names what differs and the remedy; None if nothing that matters does.

    Python's micro version may differ, and so may the build that a local label such as ``+cpu``
    names: a driver without GPUs has another torch than its executors.
    """
    for name, expected in driver.items():
        actual = worker.get(name, "none")
        if name == "python":
            if actual.split(".")[:2] == expected.split(".")[:2]:
                continue
            remedy = "point PYSPARK_PYTHON and PYSPARK_DRIVER_PYTHON to the same Python"
        elif _release(actual) == _release(expected) or (name == "pyspark" and actual == "none"):
            continue
        elif actual == "none":
            remedy = f"install {name} {expected} there, or ship the environment with --archives"
        else:
            remedy = "install the same version on both sides"
        shown = f"no {name}" if actual == "none" else f"{name} {actual}"
        return f"{where} has {shown}, the driver has {name} {expected}; {remedy}"
    return None


def _release(version: str) -> str:
    return version.partition("+")[0]


def numbered(hosts: Sequence[object]) -> tuple[int, ...]:
    """Number of each rank's node, from 0 in the order of first appearance in ``hosts``."""
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(host, len(numbers)) for host in hosts)


def local_rank(nodes: Sequence[int], rank: int) -> int:
    """Place of ``rank`` among the ranks of its node."""
    return list(nodes[:rank]).count(nodes[rank])
