"""Synchronization strategies: the rules that keep replicas in agreement, one file each."""

from __future__ import annotations

from sparkdl.runtime.public_names import make_named
from sparkdl.sync.strategy import Synchronizer, SyncStrategy

__all__ = ["STRATEGIES", "SyncStrategy", "Synchronizer", "resolve"]

STRATEGIES = {
    "adasum": "sparkdl:Adasum",
    "allreduce": "sparkdl:AllReduce",
    "asyncsgd": "sparkdl:AsyncSGD",
    "blockmomentum": "sparkdl:BlockMomentum",
    "diloco": "sparkdl:DiLoCo",
    "elasticaveraging": "sparkdl:ElasticAveraging",
    "gossip": "sparkdl:Gossip",
    "hogwild": "sparkdl:Hogwild",
    "localsgd": "sparkdl:LocalSGD",
    "oneshotaveraging": "sparkdl:OneShotAveraging",
    "parameteraveraging": "sparkdl:ParameterAveraging",
    "populationbasedtraining": "sparkdl:PopulationBasedTraining",
    "slowmo": "sparkdl:SlowMo",
    "tournament": "sparkdl:Tournament",
}
"""Name -> where the class is; classes are imported when they are asked for.

Case and underscores of a name do not matter.
"""


def resolve(strategy: str | SyncStrategy | type[SyncStrategy] | None) -> SyncStrategy:
    """The strategy that the user named.

    Args:
        strategy: an object, which is returned as it is; or a class, a name of `STRATEGIES` or a
            ``"package.module:Class"``, which are made with their default options; None means
            ``"allreduce"``.

    Raises:
        ConfigError: there is no such strategy.
    """
    made: SyncStrategy = make_named(strategy or "allreduce", SyncStrategy, STRATEGIES, "strategy")
    return made
