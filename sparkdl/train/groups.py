"""Which options of its own does a group of parameters give to the optimizer?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.runtime.name_patterns import check_fit, fits

Groups = list[dict[str, Any]]
"""What torch's optimizers take: ``params`` and options of each group."""


class ParameterGroups:
    """The groups of one module's parameters.

    The first holds what no pattern means, unless that is nothing; the others follow in the order
    in which they were given. Reports and schedules that speak of the learning rate mean the first.

    Args:
        module: its parameters that train are divided.
        options: pattern (see `patterns`) -> options, in torch's words, such as ``lr``.

    Raises:
        ConfigError: a pattern means no parameter that trains, or two mean the same one.
    """

    def __init__(self, module: nn.Module, options: Mapping[str, Mapping[str, Any]]) -> None:
        aliases: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append(name)
        trained = [p for p in module.parameters() if p.requires_grad]
        check_fit(options, [n for p in trained for n in aliases[id(p)]], "parameterGroups")
        self._options = {pattern: dict(values) for pattern, values in options.items()}
        self._patterns = [_pattern_of(aliases[id(p)], list(options)) for p in trained]

    def divide(self, parameters: Sequence[nn.Parameter]) -> Groups:
        """Put ``parameters`` into their groups.

        Args:
            parameters: one for each parameter of the module that trains, in its order; a strategy
                may have others step in their stead.

        Raises:
            ConfigError: they are more or fewer.
        """
        if len(parameters) != len(self._patterns):
            raise ConfigError(
                f"parameterGroups divide the {len(self._patterns)} parameters that train, but the "
                f"strategy makes an optimizer of {len(parameters)}; let it pass those with "
                "requires_grad, in the module's order"
            )
        members: dict[str | None, list[nn.Parameter]] = {None: []}
        members |= {pattern: [] for pattern in self._options}
        for parameter, pattern in zip(parameters, self._patterns, strict=True):
            members[pattern].append(parameter)
        return [
            {"params": group, **({} if pattern is None else self._options[pattern])}
            for pattern, group in members.items()
            if group
        ]


def _pattern_of(names: Iterable[str], patterns: Sequence[str]) -> str | None:
    names = list(names)
    found = [pattern for pattern in patterns if any(fits(pattern, name) for name in names)]
    if len(found) > 1:
        raise ConfigError(
            f"parameterGroups: both {found[0]!r} and {found[1]!r} mean {names[0]!r}; let each "
            "parameter be meant by one pattern only"
        )
    return found[0] if found else None
