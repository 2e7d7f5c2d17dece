"""Does a fit run in a gang, or in rounds on plain Spark stages?"""

from __future__ import annotations

from typing import Literal

from sparkdl.errors import ConfigError
from sparkdl.sync.strategy import SyncStrategy

MODES = ("auto", "gang", "rounds")


def choose_mode(requested: str, strategy: SyncStrategy) -> Literal["gang", "rounds"]:
    """What the user asked for; ``auto`` leaves it to the strategy.

    Raises:
        ConfigError: there is no such mode, or the strategy cannot run in it.
    """
    if requested not in MODES:
        raise ConfigError(f"executionMode must be one of {MODES}; received {requested!r}")
    if requested == "gang":
        if (obstacle := strategy.why_not_gang()) is not None:
            raise ConfigError(
                f"{type(strategy).__name__} cannot run with executionMode='gang': {obstacle}; use "
                "executionMode='rounds'"
            )
        return "gang"
    obstacle = strategy.why_not_rounds()
    if requested == "auto":
        return "rounds" if strategy.prefers_rounds and obstacle is None else "gang"
    if obstacle is not None:
        raise ConfigError(
            f"{type(strategy).__name__} cannot run with executionMode='rounds': {obstacle}; use "
            "executionMode='gang'"
        )
    return "rounds"
