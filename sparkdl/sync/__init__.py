"""Synchronization strategies: the rules that keep replicas in agreement, one file each."""

from __future__ import annotations

from importlib import import_module

from sparkdl.errors import ConfigError
from sparkdl.runtime.public_names import public_names
from sparkdl.sync.strategy import Synchronizer, SyncStrategy

__all__ = ["STRATEGIES", "SyncStrategy", "Synchronizer", "known_strategies", "resolve"]


def _stem(module: str) -> str:
    return module.rpartition(".")[2].replace("_", "")


STRATEGIES = {
    name.lower(): f"sparkdl:{name}"
    for name, module in public_names().items()
    if module.startswith(f"{__name__}.") and _stem(module) == name.lower()
}
"""Name -> where the class is, of each public class whose file has its name.

Case and underscores of a name do not matter; classes are imported when they are asked for.
"""


def known_strategies() -> list[type[SyncStrategy]]:
    """The classes of all strategies; all-reduce, the default, comes first."""
    names = sorted(STRATEGIES, key=lambda name: (name != "allreduce", name))
    return [type(resolve(name)) for name in names]


def resolve(strategy: str | SyncStrategy | type[SyncStrategy] | None) -> SyncStrategy:
    """The strategy that the user named.

    Args:
        strategy: an object, which is returned as it is; or a class, a name of `STRATEGIES` or a
            ``"package.module:Class"``, which are made with their default options; None means
            ``"allreduce"``.

    Raises:
        ConfigError: there is no such strategy.
    """
    if strategy is None:
        strategy = "allreduce"
    if isinstance(strategy, SyncStrategy):
        return strategy
    found: object = strategy
    if isinstance(strategy, str):
        found = _import(STRATEGIES.get(strategy.lower().replace("_", ""), strategy))
    if not (isinstance(found, type) and issubclass(found, SyncStrategy)):
        raise ConfigError(f"syncStrategy must be a SyncStrategy or its name; received {strategy!r}")
    try:
        return found()
    except TypeError as error:
        raise ConfigError(
            f"strategy {strategy!r} cannot be made without options ({error}); "
            "pass an object instead of its name"
        ) from error


def _import(path: str) -> object:
    module, _, name = path.partition(":")
    if not name:
        known = ", ".join(sorted(STRATEGIES))
        raise ConfigError(
            f"unknown strategy {path!r}; known: {known}, or name a class of your own as "
            "'package.module:Class'"
        )
    try:
        found: object = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"strategy {path!r} cannot be imported: {error}") from error
    return found
