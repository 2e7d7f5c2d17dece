"""The strategies that ``strategies.py`` compares, and the optimizer that each trains with.

Every public strategy that runs in a gang has a row for each of its examples, with rounds that are
not too long for the small network; further forms follow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

SGD = {"optimizer": "sgd", "learning_rate": 0.1, "optimizer_params": {"momentum": 0.9}}
ADAMW = {"optimizer": "adamw", "learning_rate": 3e-3}
PLAIN = {"optimizer": "sgd", "learning_rate": 0.3}
OPTIMIZERS = {"DiLoCo": ADAMW, "AsyncSGD": PLAIN, "Hogwild": PLAIN}
"""Where it is not SGD with momentum: late gradients act like momentum by themselves."""
MOST_STEPS = 16


@dataclass(frozen=True)
class Contender:
    """A strategy and the optimizer that it trains with."""

    strategy: Any
    optimizer: dict[str, Any]


def contenders() -> dict[str, Contender]:
    """Strategy, as a user writes it -> what trains."""
    import sparkdl
    from sparkdl.explain.comparison import strategy_text
    from sparkdl.sync import known_strategies

    all_reduce = sparkdl.AllReduce
    forms = [
        *(shortened(form) for kind in known_strategies() for form in kind.examples()),
        all_reduce(double_buffering=True),
        *(all_reduce(compression=name) for name in ("fp16", "int8", "twobit", "threshold")),
        # The default of 100 would be longer than the whole training here.
        all_reduce(compression=sparkdl.OneBitCompression(warmup_steps=20)),
        sparkdl.ParameterAveraging(averaging_period=4),
        sparkdl.ParameterAveraging(averaging_period=16),
        sparkdl.LocalSGD(averaging_period=16, compression="fp16"),
        sparkdl.LocalSGD(averaging_period="adaptive"),
    ]
    found = {
        strategy_text(form): Contender(form, OPTIMIZERS.get(type(form).__name__, SGD))
        for form in forms
        if form.why_not_gang() is None
    }
    largest = all_reduce(compression="topk")  # has a momentum of its own
    return {**found, strategy_text(largest): Contender(largest, PLAIN)}


def shortened(strategy: Any) -> Any:
    """The strategy with rounds of at most so many steps."""
    period = getattr(strategy, "averaging_period", None)
    if isinstance(period, int) and period > MOST_STEPS:
        return replace(strategy, averaging_period=MOST_STEPS)
    return strategy


STRATEGIES = contenders()
