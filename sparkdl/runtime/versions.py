"""The versions that driver and workers must share, how they differ, and which were tested."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata

_COMPARED = ("torch", "pyspark", "pyarrow")
TESTED = {
    "python": ("3.11", "3.13"),
    "pyspark": ("4.1", "4.3"),
    "torch": ("2.9", "2.14"),
    "pandas": ("2.2", "2.3"),
    "numpy": ("1.26", "2.5"),
    "pyarrow": ("15.0", "26.0"),
    "cloudpickle": ("3.0", "3.1"),
    "safetensors": ("0.4", "0.8"),
    "fsspec": ("2024.2", "2026.9"),
}
"""Package -> the oldest and the newest version with which ``make versions`` has trained."""


def versions() -> dict[str, str]:
    """Versions that must agree between driver and workers; imports none of the packages."""
    from sparkdl import __version__

    found = {"python": platform.python_version(), "sparkdl": __version__}
    return found | {name: installed(name) or "none" for name in _COMPARED}


@cache  # it parses a file, and a worker that is reused is asked at every fit
def installed(package: str) -> str | None:
    """The version of an installed package, which is not imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> list[int]:
    """The numbers of a version; 4.1.0 is 4.1."""
    found = [int(part) for part in re.split(r"[^\d.]", version)[0].split(".") if part]
    return (found + 4 * [0])[:4]


def distance(name: str, version: str) -> str | None:
    """Say that a version is older or newer than those that were tested; None if it is neither."""
    oldest, newest = TESTED[name]
    if numbers(version)[:2] < numbers(oldest)[:2]:
        return f"{version} is older than the oldest tested, {oldest}"
    if numbers(version)[:2] > numbers(newest)[:2]:
        return f"{version} is newer than the newest tested, {newest}"
    return None


def untested() -> str:
    """Return a clause for an error about versions here that are not tested; empty: none are."""
    said = ""
    for name in TESTED:
        version = platform.python_version() if name == "python" else installed(name)
        if version is not None and (found := distance(name, version)) is not None:
            said += f"; {name} {found}"
    return said


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
