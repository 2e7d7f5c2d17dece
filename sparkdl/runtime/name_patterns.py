"""Patterns that name parameters of a module.

A pattern is a shell's: ``*`` stands for any characters, dots included, ``?`` for one, ``[0-3]`` for
one of these. It means a parameter if it fits its name, or the name of a layer that holds it:
``encoder`` and ``encoder.*`` mean all parameters of the layer ``encoder``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from sparkdl.errors import ConfigError, did_you_mean


def fits(pattern: str, name: str) -> bool:
    """Return True if ``pattern`` means the parameter or buffer ``name``."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def fits_any(patterns: Iterable[str], name: str) -> bool:
    """Return True if one of ``patterns`` means ``name``."""
    return any(fits(pattern, name) for pattern in patterns)


def check_fit(patterns: Iterable[str], names: Sequence[str], param: str) -> None:
    """Refuse patterns of a Param that mean none of ``names``, such as a misspelt layer.

    ConfigError names the pattern, and what may have been meant.
    """
    for pattern in patterns:
        if not any(fits(pattern, name) for name in names):
            layers = sorted({name.rpartition(".")[0] for name in names} - {""}) or list(names)
            hint = did_you_mean(pattern.rstrip(".*"), [*layers, *names])
            hint = hint or f"; its layers are {some_of([repr(layer) for layer in layers])}"
            raise ConfigError(f"{param}: no parameter of the module fits {pattern!r}{hint}")


def renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The state dict with other names; see `InitialWeights.names`.

    ConfigError if a name means nothing, or two come to be the same.
    """
    rules = [(_pattern(old), old) for old in sorted(names, key=len, reverse=True)]
    used: set[str] = set()
    origin: dict[str, str] = {}
    for name in state:
        matches = ((pattern.match(name), old) for pattern, old in rules)
        match, old = next((found for found in matches if found[0]), (None, ""))
        becomes = name
        if match:
            used.add(old)
            *parts, rest = match.groups()
            left = iter(parts)
            layer = re.sub(r"\*", lambda _, left=left: next(left), names[old])  # type: ignore[misc]
            becomes = ".".join(filter(None, (layer, rest)))
        if becomes in origin:
            raise ConfigError(f"names: both {origin[becomes]} and {name} would become {becomes}")
        origin[becomes] = name
    for old in names.keys() - used:
        split = [name.split(".") for name in state]
        layers = sorted({".".join(one[:end]) for one in split for end in range(1, len(one) + 1)})
        close = difflib.get_close_matches(old, layers, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else ""
        hint = hint or f"there are {some_of(list(state))}"
        raise ConfigError(f"names: nothing in the weights is called {old!r}; {hint}")
    return {becomes: state[name] for becomes, name in origin.items()}


def _pattern(name: str) -> re.Pattern[str]:
    """Return a regex of the names that a name of `InitialWeights.names` means.

    Its last group is what follows.
    """
    if not name:
        return re.compile(r"(.+)$")
    # What is behind a dot is no reason to try again before it, which would take ever longer.
    parts = ["([^.]*)".join(map(re.escape, part.split("*"))) for part in name.split(".")]
    whole = r"\.".join(rf"(?>{part}(?=\.|$))" for part in parts)
    return re.compile(rf"{whole}(?:$|\.(?=.))(.*)$")


def some_of(names: Sequence[str]) -> str:
    """Names in words, the first of them if they are many."""
    return ", ".join(names[:10]) + ", ..." * (len(names) > 10)


def spread(pattern: str) -> list[str]:
    """A pattern with ``|`` and ranges as those without: ``q|k.0-1`` as ``q.0`` and three more."""
    parts = [
        [one for choice in part.split("|") for one in _range(choice)] for part in pattern.split(".")
    ]
    return [".".join(chosen) for chosen in product(*parts)]


def _range(part: str) -> list[str]:
    found = re.fullmatch(r"(\d+)-(\d+)", part)
    return [str(n) for n in range(int(found[1]), int(found[2]) + 1)] if found else [part]
