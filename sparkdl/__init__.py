"""Train and apply PyTorch models on Spark DataFrames.

The public names are listed in ``__init__.pyi`` and imported when they are first used:
``import sparkdl`` alone imports neither torch nor pyspark, so that a Spark driver, a worker and a
command line each pay only for what they need.
"""

from __future__ import annotations

from importlib import import_module

from sparkdl.runtime.installation import refuse_mixed_installation
from sparkdl.runtime.public_names import MODULE_OF

__version__ = "0.1.0.dev0"

__all__ = sorted({*MODULE_OF, "__version__"})

refuse_mixed_installation(__file__)


def __getattr__(name: str) -> object:
    if name not in MODULE_OF:
        raise AttributeError(f"module 'sparkdl' has no attribute {name!r}")
    value = getattr(import_module(MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
