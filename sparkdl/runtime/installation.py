"""A check that no other package named ``sparkdl`` is mixed into this installation.

PyPI's ``sparkdl`` is another vendor's abandoned package, preinstalled on some platforms. It uses
the same folder name, so installing both into one place mixes their files.
"""

from __future__ import annotations

from pathlib import Path

from sparkdl.errors import SparkDLError


def refuse_mixed_installation(package_file: str) -> None:
    """Raise SparkDLError if PyPI's ``sparkdl`` has files in the package's folder.

    Called on import, on the driver and on every worker.
    """
    package = Path(package_file).resolve().parent
    patterns = ("sparkdl-*.dist-info", "sparkdl-*.egg-info")
    if foreign := sorted(found for pattern in patterns for found in package.parent.glob(pattern)):
        raise SparkDLError(
            f"another package named 'sparkdl' ({foreign[0].name}) is installed in the folder of "
            f"sparkdl-torch, {package}, and their files are mixed; "
            f"run 'pip uninstall -y sparkdl sparkdl-torch', then install this package again"
        )
