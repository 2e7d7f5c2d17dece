"""Synchronization strategies: the rules that keep replicas in agreement, one file each."""

from __future__ import annotations

from sparkdl.runtime.public_names import MODULE_OF, make_named
from sparkdl.sync.strategy import Synchronizer, SyncStrategy

__all__ = ["STRATEGIES", "SyncStrategy", "Synchronizer", "known_strategies", "resolve"]


STRATEGIES = {
    name.lower(): f"sparkdl:{name}"
    for name, module in MODULE_OF.items()
    if module.startswith(f"{__name__}.")
    and module.rpartition(".")[2].replace("_", "") == name.lower()
}
"""Name -> where the class is, of each public class whose file has its name.

Case and underscores of a name do not matter; classes are imported when they are asked for.
"""


def known_strategies() -> list[type[SyncStrategy]]:
    """The classes of all strategies; all-reduce, the default, comes first."""
    names = sorted(STRATEGIES, key=lambda name: (name != "allreduce", name))
    return [type(resolve(name)) for name in names]


def resolve(strategy: str | SyncStrategy | type[SyncStrategy] | None) -> SyncStrategy:
    """The strategy that the user named; see `make_named`. None means ``"allreduce"``."""
    made: SyncStrategy = make_named(
        "allreduce" if strategy is None else strategy, SyncStrategy, STRATEGIES, "strategy"
    )
    from sparkdl.sync.collective import CollectiveStrategy  # it imports torch

    if isinstance(made, CollectiveStrategy):
        made.resolved_compression()  # it may be the name of a class, too
    return made
