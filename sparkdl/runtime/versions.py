"""The versions of the software that driver and workers must share, and how they differ."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from importlib import metadata

_COMPARED = ("torch", "pyspark", "pyarrow")


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
