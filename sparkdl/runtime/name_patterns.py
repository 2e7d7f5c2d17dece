"""Patterns that name parameters of a module.

A pattern is a shell's: ``*`` stands for any characters, dots included, ``?`` for one, ``[0-3]`` for
one of these. It means a parameter if it fits its name, or the name of a layer that holds it:
``encoder`` and ``encoder.*`` mean all parameters of the layer ``encoder``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from sparkdl.errors import ConfigError, did_you_mean


def fits(pattern: str, name: str) -> bool:
    """Whether ``pattern`` means the parameter or buffer ``name``."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def fits_any(patterns: Iterable[str], name: str) -> bool:
    """Whether one of ``patterns`` means ``name``."""
    return any(fits(pattern, name) for pattern in patterns)


def check_fit(patterns: Iterable[str], names: Sequence[str], param: str) -> None:
    """Refuse patterns that mean nothing, such as a misspelt layer.

    Args:
        patterns: what the user gave.
        names: what there is.
        param: the Param that the patterns are from.

    Raises:
        ConfigError: names the pattern, and what may have been meant.
    """
    for pattern in patterns:
        if not any(fits(pattern, name) for name in names):
            layers = sorted({name.rpartition(".")[0] for name in names} - {""}) or list(names)
            hint = did_you_mean(pattern.rstrip(".*"), [*layers, *names])
            hint = hint or f"; there are {_shown(layers)}"
            raise ConfigError(f"{param}: no parameter of the module fits {pattern!r}{hint}")


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + ", ..." * (len(names) > 10)
