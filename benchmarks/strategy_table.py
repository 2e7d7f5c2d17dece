"""Which strategies does ``strategies.py`` compare, and with which optimizer each?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SGD = {"optimizer": "sgd", "learning_rate": 0.1, "optimizer_params": {"momentum": 0.9}}
ADAMW = {"optimizer": "adamw", "learning_rate": 3e-3}
PLAIN = {"optimizer": "sgd", "learning_rate": 0.3}


@dataclass(frozen=True)
class Contender:
    """A strategy and the optimizer that it trains with."""

    strategy: Any
    optimizer: dict[str, Any] = field(default_factory=lambda: SGD)


def contenders() -> dict[str, Contender]:
    """Name -> strategy; imported here, so that one that is broken is named by its error."""
    from sparkdl.comm import compression
    from sparkdl.comm.compression.onebit import OneBitCompression
    from sparkdl.sync.asynchronous.async_sgd import AsyncSGD
    from sparkdl.sync.asynchronous.hogwild import Hogwild
    from sparkdl.sync.averaging.adasum import Adasum
    from sparkdl.sync.averaging.block_momentum import BlockMomentum
    from sparkdl.sync.averaging.diloco import DiLoCo
    from sparkdl.sync.averaging.local_sgd import LocalSGD
    from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
    from sparkdl.sync.averaging.slowmo import SlowMo
    from sparkdl.sync.gradients.allreduce import AllReduce
    from sparkdl.sync.own_weights.elastic_averaging import ElasticAveraging
    from sparkdl.sync.own_weights.gossip import Gossip

    compressed = {
        f"all-reduce, {name}": Contender(AllReduce(compression=compression.resolve(name)))
        for name in ("fp16", "bf16", "int8", "twobit", "threshold", "powersgd")
    }
    return {
        "all-reduce": Contender(AllReduce()),
        "all-reduce, double buffering": Contender(AllReduce(double_buffering=True)),
        **compressed,
        # The default of 100 would be longer than the whole training here.
        "all-reduce, onebit": Contender(AllReduce(compression=OneBitCompression(warmup_steps=20))),
        "all-reduce, top-k": Contender(AllReduce(compression="topk"), PLAIN),
        "Adasum": Contender(Adasum()),
        "parameter averaging, 4": Contender(ParameterAveraging(averaging_period=4)),
        "parameter averaging, 16": Contender(ParameterAveraging(averaging_period=16)),
        "local SGD, 16": Contender(LocalSGD(averaging_period=16)),
        "local SGD, 16, fp16": Contender(LocalSGD(averaging_period=16, compression="fp16")),
        "local SGD, adaptive": Contender(LocalSGD(averaging_period="adaptive")),
        "block momentum, 16": Contender(BlockMomentum(averaging_period=16)),
        "SlowMo, 16": Contender(SlowMo(averaging_period=16)),
        "DiLoCo, 16": Contender(DiLoCo(averaging_period=16), ADAMW),
        "elastic averaging, 8": Contender(ElasticAveraging(averaging_period=8)),
        "gossip": Contender(Gossip()),
        "asynchronous": Contender(AsyncSGD(), PLAIN),
        "asynchronous, bound 4": Contender(AsyncSGD(staleness_bound=4), PLAIN),
        "hogwild, 16": Contender(Hogwild(averaging_period=16), PLAIN),
    }


STRATEGIES = contenders()
