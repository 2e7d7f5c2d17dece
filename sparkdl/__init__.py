"""Train and apply PyTorch models on Spark DataFrames.

The public names are listed in ``__init__.pyi`` and imported when they are first used:
``import sparkdl`` alone imports neither torch nor pyspark, so that a Spark driver, a worker and a
command line each pay only for what they need.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from sparkdl.errors import did_you_mean
from sparkdl.familiar_names import as_method
from sparkdl.runtime.installation import refuse_mixed_installation
from sparkdl.runtime.public_names import MODULE_OF, public

__version__ = "0.1.0"

__all__ = sorted({*MODULE_OF, "__version__"})

refuse_mixed_installation(__file__)


def __getattr__(name: str) -> object:
    if name not in MODULE_OF:
        message = f"module 'sparkdl' has no attribute {name!r}"
        hint = "" if name[0] == "_" else as_method(name) or did_you_mean(name, MODULE_OF)
        # An import replaces the words of an AttributeError by its own, which know no such name.
        if hint and sys._getframe(1).f_code.co_name == "_handle_fromlist" and not _is_module(name):
            raise ImportError(f"{message}{hint}", name=__name__, path=__file__)
        raise AttributeError(f"{message}{hint}", name=name, obj=None)
    value = public(name)
    globals()[name] = value
    return value


def _is_module(name: str) -> bool:
    return find_spec(f"{__name__}.{name}") is not None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
