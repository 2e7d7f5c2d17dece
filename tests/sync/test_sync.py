from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest

from sparkdl import sync
from sparkdl.errors import ConfigError
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.strategy import Synchronizer, SyncStrategy


@dataclass(frozen=True, kw_only=True)
class Mine(SyncStrategy):
    def setup(self, model: Any, make_optimizer: Any, comm: Any) -> Synchronizer:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class NeedsOption(Mine):
    period: int


DRIVEN_BY_TIME = {"asyncsgd", "hogwild"}


@pytest.mark.parametrize("name", sorted(sync.STRATEGIES))
def test_every_name_makes_a_picklable_strategy(name: str) -> None:
    strategy = sync.resolve(name)
    assert isinstance(strategy, SyncStrategy)
    assert pickle.loads(pickle.dumps(strategy)) == strategy
    assert strategy.deterministic == (name not in DRIVEN_BY_TIME)


def test_default_object_class_and_path() -> None:
    assert sync.resolve(None) == AllReduce()
    assert sync.resolve("AllReduce") == AllReduce()
    mine = Mine()
    assert sync.resolve(mine) is mine
    assert isinstance(sync.resolve(Mine), Mine)
    assert type(sync.resolve(f"{__name__}:Mine")).__name__ == "Mine"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("alreduce", r"unknown strategy 'alreduce'; known: adasum, allreduce"),
        ("no.such.module:X", "cannot import 'no.such.module:X'"),
        (f"{__name__}:Missing", "cannot import"),
        ("json:dumps", "must be a SyncStrategy"),
        (7, "must be a SyncStrategy"),
        (NeedsOption, "cannot be made without options"),
    ],
)
def test_what_is_no_strategy_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sync.resolve(wrong)
