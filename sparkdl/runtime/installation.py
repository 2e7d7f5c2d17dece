"""A check that no other package named ``sparkdl`` is mixed into this installation.

PyPI's ``sparkdl`` is another vendor's abandoned package, preinstalled on some platforms. It uses
the same folder name, so installing both into one place mixes their files.
"""

from __future__ import annotations

from pathlib import Path

from sparkdl.errors import SparkDLError


def foreign_distributions(package_file: str) -> list[str]:
    """Names of metadata folders of PyPI's ``sparkdl`` beside the package of ``package_file``."""
    folder = Path(package_file).resolve().parent.parent
    patterns = ("sparkdl-*.dist-info", "sparkdl-*.egg-info")
    return sorted(found.name for pattern in patterns for found in folder.glob(pattern))


def refuse_mixed_installation(package_file: str) -> None:
    """Called on import, on the driver and on every worker.

    Raises:
        SparkDLError: the package's folder also holds files of PyPI's ``sparkdl``.
    """
    foreign = foreign_distributions(package_file)
    if foreign:
        raise SparkDLError(
            f"another package named 'sparkdl' ({foreign[0]}) is installed in the folder of "
            f"sparkdl-torch, {Path(package_file).resolve().parent}, and their files are mixed; "
            f"run 'pip uninstall -y sparkdl sparkdl-torch', then install this package again"
        )
